"""GGUF metadata to the fields of a Hugging Face config.json; what would change numbers and is not known is refused."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

from hal_core.errors import FormatError
from hal_core.formats.gguf_names import ARCHITECTURES, MIXTRAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hal_core.formats.gguf_header import GGUFHeader

__all__ = ["GGUFMetadata", "model_config"]

#: Multipliers that other model families keep under the same architecture: absent or neutral here.
_NEUTRAL = {"logit_scale": 1.0, "embedding_scale": 1.0, "residual_scale": 1.0, "attention.scale": None, "expert_weights_scale": 1.0,
            "expert_gating_func": 1, "expert_shared_count": 0, "attention.causal": True}  # fmt: skip


class GGUFMetadata:
    """Typed access to the metadata of one architecture."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.architecture = fields.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise FormatError(
                "GGUF field general.architecture", f"{str(self.architecture)[:80]!r} is not served", f"served: {', '.join(ARCHITECTURES)}"
            )

    def get(self, field: str) -> Any:
        """A field below the architecture's name; None when absent."""
        return self.fields.get(f"{self.architecture}.{field}")

    def error(self, field: str, found: str) -> FormatError:
        return FormatError(f"GGUF field {self.architecture}.{field}", found, "the file is damaged, or made for a model that is not served")

    def count(self, field: str, default: int | None = None) -> int:
        value = self.get(field)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= 2**31:
            raise self.error(field, f"expected a positive integer, found {str(value)[:80]}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self.get(field)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(field, f"expected a number, found {str(value)[:80]}")
        return shortest(float(value))


def shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05 instead of 9.999999747378752e-06."""
    for digits in range(6, 10):
        text = float(f"{value:.{digits}g}")
        if abs(text) < 3e38 and struct.pack("<f", text) == struct.pack("<f", value):
            return text
    return value


def model_config(header: GGUFHeader, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    """A config.json for transformers. rope_factors: the values of ``rope_freqs.weight``, when the file has that tensor.

    Raises:
        FormatError: a field is missing or of the wrong kind, or asks for something that is not served.
    """
    meta = GGUFMetadata(header.metadata)
    _refuse_unknown_arithmetic(meta)
    class_name, model_type = MIXTRAL if meta.get("expert_count") and meta.architecture == "llama" else ARCHITECTURES[str(meta.architecture)]
    hidden, heads = meta.count("embedding_length"), meta.count("attention.head_count")
    head_dim = meta.count("attention.key_length", max(hidden // heads, 1))
    if meta.count("rope.dimension_count", head_dim) != head_dim or meta.count("attention.value_length", head_dim) != head_dim:
        raise meta.error("rope.dimension_count", f"rotary and value sizes must equal the head size {head_dim}")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta.count("feed_forward_length", 1 if model_type == "qwen3_moe" else None),
        "num_hidden_layers": meta.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta, rope_factors, head_dim),
        "vocab_size": _vocabulary(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }
    if model_type == "mixtral" and config.pop("attention_bias"):
        raise FormatError("tensor blk.0.attn_q.bias", "Mixtral's projections have no bias", "the file is of a model that is not served")
    if model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    config |= _experts(meta, model_type)
    for token in ("bos", "eos", "padding"):
        value = meta.fields.get(f"tokenizer.ggml.{token}_token_id")
        if type(value) is int:
            config[f"{'pad' if token == 'padding' else token}_token_id"] = value
    return config


def _experts(meta: GGUFMetadata, model_type: str) -> dict[str, Any]:
    """Fields of a model with experts."""
    if model_type == "mixtral":
        return {
            "num_local_experts": meta.count("expert_count"), "num_experts_per_tok": meta.count("expert_used_count"), "sliding_window": None,
        }  # fmt: skip
    if model_type != "qwen3_moe":
        return {}
    return {
        "num_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
        "norm_topk_prob": True,  # the runtimes of this format always normalize for this architecture
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _vocabulary(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise FormatError("tensor token_embd.weight", "missing", "the file is incomplete, e.g. one part of a split model")
    return embedding.shape[0]


def _refuse_unknown_arithmetic(meta: GGUFMetadata) -> None:
    for field, neutral in _NEUTRAL.items():
        value = meta.get(field)
        if value is not None and value != neutral:
            raise meta.error(field, f"{str(value)[:80]} is not served for this architecture")
    if meta.fields.get("split.count", 1) not in (0, 1):
        raise FormatError("GGUF field split.count", f"one of {meta.fields['split.count']} parts", "merge the parts into one file first")
    window = meta.get("attention.sliding_window")
    if window is not None and window < meta.count("context_length"):
        raise meta.error("attention.sliding_window", f"{window} is not served for this architecture")


def _rope_scaling(meta: GGUFMetadata, factors: Sequence[float] | None, head_dim: int) -> dict[str, Any] | None:
    kind = meta.get("rope.scaling.type")
    if factors is not None:
        if kind not in (None, "none"):
            raise meta.error("rope.scaling.type", f"{kind!r} beside a rope_freqs tensor")
        return _llama3_scaling(meta, factors, head_dim)
    if kind in (None, "none"):
        factor = meta.get("rope.scale_linear")
        return None if factor in (None, 1.0) else {"rope_type": "linear", "factor": meta.number("rope.scale_linear")}
    if kind == "linear":
        return {"rope_type": "linear", "factor": meta.number("rope.scaling.factor")}
    if kind == "yarn":
        original = meta.count("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": meta.number("rope.scaling.factor"), "original_max_position_embeddings": original}
    raise meta.error("rope.scaling.type", f"{str(kind)[:80]!r} is not served")


def _llama3_scaling(meta: GGUFMetadata, factors: Sequence[float], head_dim: int) -> dict[str, Any]:
    """The file keeps only the resulting divisor of each frequency; find the published parameters that give it."""
    scaling = {"rope_type": "llama3", "factor": shortest(max(factors)), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for original in (8192, 4096, 16384, 32768):
        expected = _llama3_factors(meta.number("rope.freq_base", 10000.0), head_dim, max(factors), original)
        if len(expected) == len(factors) and all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, factors, strict=True)):
            return {**scaling, "original_max_position_embeddings": original}
    raise FormatError("tensor rope_freqs.weight", "does not follow the llama3 rule that the served architectures use")


def _llama3_factors(base: float, head_dim: int, factor: float, original: int) -> list[float]:
    """Divisor of each rotary frequency under the llama3 rule with low and high frequency factors 1 and 4."""
    low, high = 1.0, 4.0
    found = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * base ** (index / head_dim)
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found
