"""GGUF tensor names to the names of the published checkpoint, for the served architectures."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hal_core.errors import FormatError, MissingDependencyError
from hal_core.formats.gguf_header import gguf_package

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ARCHITECTURES", "MIXTRAL", "name_table", "published_name", "rotary_rows"]

#: general.architecture: the Hugging Face class, and its model_type.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
#: What an architecture of ``llama`` with experts is.
MIXTRAL = ("MixtralForCausalLM", "mixtral")
_TOP = ("model.embed_tokens", "model.norm", "lm_head")
_LAYER = (
    "input_layernorm", "post_attention_layernorm",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate", "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj",
)  # fmt: skip
#: Mixtral's names, under which its experts and their router are published.
_MIXTRAL = ("block_sparse_moe.gate", "block_sparse_moe.experts.w1", "block_sparse_moe.experts.w2", "block_sparse_moe.experts.w3")
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
#: Older files have a tensor for each expert, ``ffn_up.3`` for the fourth of ``ffn_up_exps``.
_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d{1,6})")


def name_table(architecture: str, model_type: str) -> dict[str, str]:
    """GGUF module name (``blk.`` without its number) to published module name (without ``model.layers.N.``)."""
    package: Any = gguf_package()
    wanted = getattr(package.MODEL_ARCH, architecture.upper(), None)
    if wanted is None:
        raise MissingDependencyError(
            f"a GGUF file of architecture {architecture}", "the installed gguf package does not know it", "pip install -U gguf"
        )
    names = package.get_tensor_name_map(wanted, 1)
    table = {names.get_name(top): top for top in _TOP}
    for inner in (*(name for name in _LAYER if not name.startswith("mlp.")), *_MIXTRAL) if model_type == MIXTRAL[1] else _LAYER:
        found = names.get_name(f"model.layers.0.{inner}")
        if found is not None:
            table[found.replace("blk.0.", "blk.", 1)] = inner
    table.pop(None, None)
    return table


def published_name(name: str, table: Mapping[str, str]) -> str:
    """``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``.

    Raises:
        FormatError: a tensor that the architecture does not have.
    """
    module, _, suffix = name.rpartition(".")
    match = _BLOCK.fullmatch(module)
    inner = table.get(f"blk.{match[2]}" if match else module)
    if match and (each := _EXPERT.fullmatch(match[2])):
        merged = table.get(f"blk.{each[1]}_exps", "")
        inner = merged.replace(".experts.", f".experts.{int(each[2])}.") or None
    if inner is None or suffix not in ("weight", "bias"):
        raise FormatError(f"tensor {name}", "has no place in the architecture", "convert the model again, or use a served architecture")
    return f"model.layers.{int(match[1])}.{inner}.{suffix}" if match else f"{inner}.{suffix}"


def rotary_rows(heads: int, rows: int) -> list[int]:
    """Which stored row is each published row of a q or k matrix in a llama-architecture file.

    The file interleaves the two halves of each head (pairs rotate together); the published layout keeps them apart.
    """
    size = rows // heads
    return [head * size + pair * 2 + half for head in range(heads) for half in range(2) for pair in range(size // 2)]
