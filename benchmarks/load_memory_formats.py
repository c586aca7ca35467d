"""Peak memory of ``hal.load`` under the reference for int3 GPTQ, FP8 block and Q4_K GGUF checkpoints, as ``load_memory.py`` for int4.

    python benchmarks/load_memory_formats.py [--format gptq3|fp8_block|q4_k] [--gigabytes 1.5] [--moe] [--policy require:reference] [--json]

The limit is 1.10 x (packed + unquantized bytes) + the largest module's canonical bytes + 64 MB. ``file_limit`` takes the bytes of the
file for those that the loaded ops hold: what is held must not have grown either.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
from pathlib import Path

import gguf
import load_memory as base
import numpy as np
import torch

GROUP = 128
KINDS = {"gptq3": 3 / 8 + 2 / GROUP, "fp8_block": 1 + 4 / GROUP**2, "q4_k": 4.5 / 8}  # bytes of a weight
SIZES = {"I32": 4, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


def layers_for(kind: str, gigabytes: float, moe: bool) -> int:
    """Layers that give a checkpoint of at least this size."""
    one = sum(n * k for n, k in base.shapes(1, moe).values()) * KINDS[kind]
    return int(-(-gigabytes * 1e9 // one))


def write_gptq(folder: Path, layers: int, moe: bool) -> tuple[Path, int]:
    """Symmetric int3 in groups of 128."""
    config = base.config(layers, moe)
    config["quantization_config"] = {"quant_method": "gptq", "bits": 3, "group_size": GROUP, "sym": True, "desc_act": False}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = [(name, "BF16", shape) for name, shape in base.plain(layers, moe).items()]
    for name, (n, k) in base.shapes(layers, moe).items():
        tensors += [
            (f"{name}.qweight", "I32", (k * 3 // 32, n)),
            (f"{name}.qzeros", "I32", (k // GROUP, n * 3 // 32)),
            (f"{name}.scales", "F16", (k // GROUP, n)),
        ]
    return folder, write_file(folder, tensors)


def write_fp8(folder: Path, layers: int, moe: bool) -> tuple[Path, int]:
    """FP8 with a float scale for each block of 128 x 128."""
    config = base.config(layers, moe)
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [GROUP, GROUP]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = [(name, "BF16", shape) for name, shape in base.plain(layers, moe).items()]
    for name, (n, k) in base.shapes(layers, moe).items():
        tensors += [(f"{name}.weight", "F8_E4M3", (n, k)), (f"{name}.weight_scale_inv", "F32", (-(-n // GROUP), -(-k // GROUP)))]
    return folder, write_file(folder, tensors)


def write_file(folder: Path, tensors: list[tuple[str, str, tuple[int, ...]]]) -> int:
    """The tensors of a folder, one at a time; returns their bytes."""
    header, offset = {}, 0
    for name, dtype, shape in tensors:
        end = offset + SIZES[dtype] * int(torch.Size(shape).numel())
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, dtype, shape in tensors:
            file.write(content(name, dtype, shape).numpy().tobytes())
    return offset


def content(name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Values of a tensor."""
    if name.endswith("qzeros"):
        return zeros_of_3(shape)
    if dtype == "F8_E4M3":
        return torch.randint(0, 0x78, shape, dtype=torch.uint8)  # positive and finite
    return torch.full(shape, 1e-3) if dtype == "F32" else base.content(name, dtype, shape)


def zeros_of_3(shape: tuple[int, ...]) -> torch.Tensor:
    """Zero points 4, stored minus one: the words that the tools write."""
    words = torch.tensor([0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D], dtype=torch.int64).to(torch.int32)
    return words.repeat(shape[0], shape[1] // 3)


def gguf_tensors(layers: int, moe: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type by GGUF name; experts are fused."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, shape in base.plain(layers, moe).items():
        top = {"model.embed_tokens.weight": "token_embd", "lm_head.weight": "output", "model.norm.weight": "output_norm"}.get(name)
        if top is None:
            _, _, layer, rest = name.split(".", 3)
            top = f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}"
        found[f"{top}.weight"] = (shape, "BF16" if top in ("token_embd", "output") else "F32")
    for name, shape in base.shapes(layers, moe).items():
        _, _, layer, rest = name.split(".", 3)
        if ".experts." in name:
            role = rest.rpartition(".")[2].removesuffix("_proj")
            found[f"blk.{layer}.ffn_{role}_exps.weight"] = ((base.MOE["experts"], *shape), "Q4_K")
        else:
            found[f"blk.{layer}.{GGUF_NAMES[rest]}.weight"] = (shape, "Q4_K")
    return found


def write_gguf(folder: Path, layers: int, moe: bool) -> tuple[Path, int]:
    """Random Q4_K blocks with small scales, a tensor at a time."""
    size = base.MOE if moe else base.DENSE
    path, tensors = folder / "model.gguf", gguf_tensors(layers, moe)
    writer = gguf.GGUFWriter(path, "qwen3moe" if moe else "qwen3")
    writer.add_context_length(4096)
    writer.add_embedding_length(size["hidden"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(size["inner"])
    writer.add_head_count(size["hidden"] // 128)
    writer.add_head_count_kv(8)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if moe:
        writer.add_expert_count(size["experts"])
        writer.add_expert_used_count(8)
        writer.add_expert_feed_forward_length(size["inner"])
    sizes = {}
    for name, (shape, kind) in tensors.items():
        block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        sizes[name] = int(np.prod(shape)) // block * nbytes
        stored = (*shape[:-1], shape[-1] // block * nbytes)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), sizes[name], gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, (_, kind) in tensors.items():
        writer.write_tensor_data(gguf_content(sizes[name], kind))
    writer.close()
    return path, sum(sizes.values())


def gguf_content(nbytes: int, kind: str) -> np.ndarray:
    """Bytes of a tensor."""
    if kind != "Q4_K":
        plain = torch.full((nbytes // 2,), 0.01).bfloat16() if kind == "BF16" else torch.ones(nbytes // 4)
        return plain.view(torch.uint8).numpy()
    blocks = np.random.default_rng(0).integers(0, 256, (nbytes // 144, 144), dtype=np.uint8)
    blocks[:, :4] = np.array([0.0005, 0.003], dtype=np.float16).view(np.uint8)
    return blocks.reshape(-1)


def largest_canonical(kind: str, moe: bool) -> int:
    """Bytes of the largest module in canonical form; a block of experts is one module."""
    size = base.MOE if moe else base.DENSE
    one = (3 * size["experts"] if moe else 1) * size["hidden"] * size["inner"]
    return int(one * {"gptq3": 1 + 2 / GROUP, "fp8_block": KINDS["fp8_block"], "q4_k": 4.625 / 8}[kind])


def main() -> int:
    """Write, load, report; exit code 1 when a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="q4_k", choices=list(KINDS))
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--moe", action="store_true", help="Qwen3-MoE with 128 experts a layer")
    parser.add_argument("--policy", default="require:reference")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    layers = layers_for(options.format, options.gigabytes, options.moe)
    with tempfile.TemporaryDirectory() as scratch:
        write = {"gptq3": write_gptq, "fp8_block": write_fp8, "q4_k": write_gguf}[options.format]
        path, size = write(Path(scratch), layers, options.moe)
        canonical = largest_canonical(options.format, options.moe)
        found = base.measure(path, options.policy, canonical)
    file_limit = int(1.10 * size + canonical + 64e6)
    result = {"checkpoint_bytes": size, **found, "file_limit": file_limit, "ratio_to_file_limit": found["peak"] / file_limit}
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:20} {value / 1e6:10.1f} MB" if isinstance(value, int) else f"{name:20} {value}")
    return int(max(result["ratio_to_limit"], result["ratio_to_file_limit"]) > 1)


if __name__ == "__main__":
    sys.exit(main())
