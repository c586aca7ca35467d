"""Writes small GGUF models with the gguf package's own writer and quantizer."""

from __future__ import annotations

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, EXPERTS, VOCAB, LAYERS = 64, 4, 2, 32, 96, 4, 64, 2
KINDS = {"F32": np.float32, "F16": np.float16}


def tensor_shapes(architecture: str, bias: bool = False) -> dict[str, tuple[int, ...]]:
    """Every tensor of a tiny model, by its GGUF name."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * HEAD, HIDDEN), "attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
            "attn_v.weight": (KV_HEADS * HEAD, HIDDEN), "attn_output.weight": (HIDDEN, HEADS * HEAD),
        }  # fmt: skip
        if architecture != "llama":
            block |= {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
        if bias:
            block |= {"attn_q.bias": (HEADS * HEAD,), "attn_k.bias": (KV_HEADS * HEAD,), "attn_v.bias": (KV_HEADS * HEAD,)}
        if architecture == "qwen3moe":
            block |= {"ffn_gate_inp.weight": (EXPERTS, HIDDEN), "ffn_gate_exps.weight": (EXPERTS, FFN, HIDDEN)}
            block |= {"ffn_up_exps.weight": (EXPERTS, FFN, HIDDEN), "ffn_down_exps.weight": (EXPERTS, HIDDEN, FFN)}
        else:
            block |= {"ffn_gate.weight": (FFN, HIDDEN), "ffn_up.weight": (FFN, HIDDEN), "ffn_down.weight": (HIDDEN, FFN)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def values(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def metadata(writer: gguf.GGUFWriter, architecture: str) -> None:
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
    if architecture == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(FFN)


def write(path, architecture="llama", kind="Q4_1", tensors=None, extra=None, kinds=None):
    """A file of one quantization type (vectors stay F32). extra: called with the writer. kinds: type by tensor name."""
    writer = gguf.GGUFWriter(path, architecture)
    metadata(writer, architecture)
    if extra is not None:
        extra(writer)
    for name, tensor in (values(tensor_shapes(architecture)) if tensors is None else tensors).items():
        chosen = (kinds or {}).get(name, kind)
        if tensor.ndim == 1 or chosen in KINDS:
            writer.add_tensor(name, tensor.astype(KINDS.get(chosen, np.float32) if tensor.ndim > 1 else np.float32))
        else:
            kind_type = gguf.GGMLQuantizationType[chosen]
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind_type), raw_dtype=kind_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
