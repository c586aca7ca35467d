"""Writes small GGUF models with the gguf package's own writer, and its quantizer for the types that it can quantize to.

For the others every field of a block is random, floats apart, which stay finite.
"""

from __future__ import annotations

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, EXPERTS, VOCAB, LAYERS = 64, 4, 2, 32, 96, 4, 64, 2
#: Hidden size, head size and inner size, by width.
SIZES = {1: (HIDDEN, HEAD, FFN), 8: (256, 64, 512)}
KINDS = {"F32": np.float32, "F16": np.float16}
#: Where the fp16 of a block are, for types without a quantizer.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
SUPERBLOCKS = tuple(kind for kind in HALVES if kind != "IQ4_NL")


#: No architectures of the format, which calls both llama: experts merged, and each apart.
MIXTRAL = ("mixtral", "mixtral-old")


def width(kind: str) -> int:
    """What a dimension is multiplied by, so that rows hold whole blocks."""
    return 8 if kind in SUPERBLOCKS else 1


def tensor_shapes(architecture: str, bias: bool = False, wide: int = 1) -> dict[str, tuple[int, ...]]:
    """Every tensor of a tiny model, by its GGUF name."""
    HIDDEN, HEAD, FFN = SIZES[wide]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * HEAD, HIDDEN), "attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
            "attn_v.weight": (KV_HEADS * HEAD, HIDDEN), "attn_output.weight": (HIDDEN, HEADS * HEAD),
        }  # fmt: skip
        if architecture not in ("llama", *MIXTRAL):
            block |= {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
        if bias:
            block |= {"attn_q.bias": (HEADS * HEAD,), "attn_k.bias": (KV_HEADS * HEAD,), "attn_v.bias": (KV_HEADS * HEAD,)}
        if architecture == "mixtral-old":
            block["ffn_gate_inp.weight"] = (EXPERTS, HIDDEN)
            for expert in range(EXPERTS):
                block |= {f"ffn_{role}.{expert}.weight": (FFN, HIDDEN) for role in ("gate", "up")}
                block[f"ffn_down.{expert}.weight"] = (HIDDEN, FFN)
        elif architecture in ("qwen3moe", "mixtral"):
            block |= {"ffn_gate_inp.weight": (EXPERTS, HIDDEN), "ffn_gate_exps.weight": (EXPERTS, FFN, HIDDEN)}
            block |= {"ffn_up_exps.weight": (EXPERTS, FFN, HIDDEN), "ffn_down_exps.weight": (EXPERTS, HIDDEN, FFN)}
        else:
            block |= {"ffn_gate.weight": (FFN, HIDDEN), "ffn_up.weight": (FFN, HIDDEN), "ffn_down.weight": (HIDDEN, FFN)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def values(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def random_blocks(shape: tuple[int, ...], kind: str, seed: int) -> np.ndarray:
    """Bytes of a tensor of random blocks."""
    draw = np.random.default_rng(seed)
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // size, nbytes), dtype=np.uint8)
    for start in HALVES[kind]:
        halves = (draw.standard_normal(blocks.shape[:-1]) * 0.01).astype(np.float16)
        blocks[..., start : start + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def encoded(tensor: np.ndarray, kind: str, seed: int) -> np.ndarray:
    """A tensor's bytes in a quantized type; of its shape only, where the package has no quantizer."""
    if kind in HALVES:
        return random_blocks(tensor.shape, kind, seed)
    return gguf.quants.quantize(tensor, gguf.GGMLQuantizationType[kind])


def metadata(writer: gguf.GGUFWriter, architecture: str, wide: int = 1) -> None:
    HIDDEN, HEAD, FFN = SIZES[wide]
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if architecture in ("qwen3moe", *MIXTRAL):
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(FFN)


def write(path, architecture="llama", kind="Q4_1", tensors=None, extra=None, kinds=None):
    """A file of one quantization type (vectors stay F32). extra: called with the writer. kinds: type by tensor name."""
    writer = gguf.GGUFWriter(path, "llama" if architecture in MIXTRAL else architecture)
    wide = width(kind)
    metadata(writer, architecture, wide)
    if extra is not None:
        extra(writer)
    for name, tensor in (values(tensor_shapes(architecture, wide=wide)) if tensors is None else tensors).items():
        chosen = (kinds or {}).get(name, kind)
        if tensor.ndim == 1 or chosen in KINDS:
            writer.add_tensor(name, tensor.astype(KINDS.get(chosen, np.float32) if tensor.ndim > 1 else np.float32))
        else:
            writer.add_tensor(name, encoded(tensor, chosen, len(name)), raw_dtype=gguf.GGMLQuantizationType[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
