"""Peak memory of ``hal.load`` against the bytes it keeps, on a synthetic int4 checkpoint, measured in a process of its own.

    python benchmarks/load_memory.py [--layers 16] [--moe] [--json]

The limit is 1.10 x (packed + unquantized bytes) + the largest module's canonical bytes + 64 MB.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

GROUP = 128
DENSE = {"hidden": 4096, "inner": 12288, "vocab": 8192}
MOE = {"hidden": 2048, "inner": 768, "vocab": 8192, "experts": 128}


def shapes(layers: int, moe: bool) -> dict[str, tuple[int, int]]:
    """Quantized modules of the model, ``name -> (N, K)``."""
    size = MOE if moe else DENSE
    h, i = size["hidden"], size["inner"]
    found = {}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        found |= {f"{at}.self_attn.{p}_proj": (n, h) for p, n in (("q", h), ("k", 1024), ("v", 1024))}
        found[f"{at}.self_attn.o_proj"] = (h, h)
        for block in [f"{at}.mlp.experts.{e}" for e in range(size["experts"])] if moe else [f"{at}.mlp"]:
            found |= {f"{block}.gate_proj": (i, h), f"{block}.up_proj": (i, h), f"{block}.down_proj": (h, i)}
    return found


def config(layers: int, moe: bool) -> dict[str, object]:
    """A Qwen3 or Qwen3-MoE config.json with AutoRound's quantization section."""
    size = MOE if moe else DENSE
    heads = size["hidden"] // 128
    base = {
        "model_type": "qwen3_moe" if moe else "qwen3", "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "hidden_size": size["hidden"], "intermediate_size": size["inner"], "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": size["vocab"], "dtype": "bfloat16", "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "hidden_act": "silu",
        "quantization_config": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
                                "group_size": GROUP, "sym": True},
    }  # fmt: skip
    if moe:
        base |= {"num_experts": size["experts"], "num_experts_per_tok": 8, "moe_intermediate_size": size["inner"], "norm_topk_prob": True}
    return base


def plain(layers: int, moe: bool) -> dict[str, tuple[int, ...]]:
    """Unquantized parameters, in bf16."""
    size = MOE if moe else DENSE
    h = size["hidden"]
    found: dict[str, tuple[int, ...]] = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (size["vocab"], h)) | {
        "model.norm.weight": (h,)
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        found |= {f"{at}.{n}.weight": (h,) for n in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"{at}.self_attn.{n}.weight": (128,) for n in ("q_norm", "k_norm")}
        if moe:
            found[f"{at}.mlp.gate.weight"] = (size["experts"], h)
    return found


def write_checkpoint(folder: Path, layers: int, moe: bool) -> int:
    """Write the checkpoint a tensor at a time; returns its bytes."""
    (folder / "config.json").write_text(json.dumps(config(layers, moe)))
    tensors: list[tuple[str, str, tuple[int, ...]]] = [(n, "BF16", s) for n, s in plain(layers, moe).items()]
    for name, (n, k) in shapes(layers, moe).items():
        tensors += [
            (f"{name}.qweight", "I32", (k // 8, n)),
            (f"{name}.qzeros", "I32", (k // GROUP, n // 8)),
            (f"{name}.scales", "F16", (k // GROUP, n)),
        ]
    header, offset = {}, 0
    for name, dtype, shape in tensors:
        count = (4 if dtype == "I32" else 2) * int(torch.Size(shape).numel())
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + count]}
        offset += count
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, dtype, shape in tensors:
            file.write(content(name, dtype, shape).numpy().tobytes())
    return offset


def content(name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random codes and small scales; symmetric zeros are stored as 7, the true 8 minus one."""
    if name.endswith("qzeros"):
        return torch.full(shape, 0x77777777, dtype=torch.int32)
    if dtype == "I32":
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
    values = torch.rand(shape) * 0.02 + 0.001
    return values.half() if dtype == "F16" else values.bfloat16().view(torch.int16)


CHILD = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, transformers, hal_core
def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))
hal_core.probe()
from transformers import AutoModelForCausalLM  # imported before the measurement: it is no part of loading
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
before = status("VmRSS")
model = hal_core.load(sys.argv[1], policy=sys.argv[2])
peak, after, report = status("VmHWM"), status("VmRSS"), model.hal
print(json.dumps({"before": before, "peak": peak - before, "after": after - before, "packed": report.packed_bytes,
    "unquantized": report.unquantized_bytes, "kernels": report.kernels()}))
"""


def measure(folder: Path, policy: str, canonical: int) -> dict[str, object]:
    """Load in a subprocess and compare its peak with the limit."""
    done = subprocess.run([sys.executable, "-c", CHILD, str(folder), policy], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    limit = 1.10 * (found["packed"] + found["unquantized"]) + canonical + 64e6
    return {**found, "largest_canonical": canonical, "limit": int(limit), "ratio_to_limit": found["peak"] / limit}


def main() -> int:
    """Write, load, report; exit code 1 when the limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--moe", action="store_true", help="Qwen3-MoE with 128 experts a layer")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(Path(folder), options.layers, options.moe)
        # a block of experts is one module: its three matrices are read together
        one = 3 * MOE["experts"] * MOE["hidden"] * MOE["inner"] if options.moe else DENSE["hidden"] * DENSE["inner"]
        canonical = one // 2 + 2 * one // GROUP
        result = {"checkpoint_bytes": size, **measure(Path(folder), options.policy, canonical)}
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:20} {value / 1e6:10.1f} MB" if isinstance(value, int) else f"{name:20} {value}")
    return int(result["ratio_to_limit"] > 1)


if __name__ == "__main__":
    sys.exit(main())
