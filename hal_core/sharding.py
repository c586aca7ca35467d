"""Tensor parallelism by the ordinary rules: what one rank of a layer asks of its kernel, or why the layer cannot be cut.

Columns (N) of q, k, v, gate and up; rows (K) of o and down; the intermediate size of experts; rows of the embedding and the head. A
cut may not go through a head, a scale group or a block. Everything else is kept whole on each rank. Nothing is read but the specs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hal_core.errors import SettingError
from hal_core.refusal import Refusal
from hal_core.spec import EmbeddingSpec, LinearSpec, MoESpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hal_core.schemes import WeightScheme
    from hal_core.spec import Spec

__all__ = ["MOST_SHARDS", "Heads", "Shard", "check_degree", "legal_degrees", "shard"]

MOST_SHARDS = 1024
_COLUMNS = ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "lm_head")
_OUTPUTS = ("o_proj", "out_proj")
_ROWS = (*_OUTPUTS, "down_proj", "w2", "fc2")
_QUERIES, _KEYS = ("q_proj",), ("k_proj", "v_proj")


@dataclass(frozen=True)
class Heads:
    """Attention heads of a model; None where its config does not say."""

    queries: int | None = None
    keys: int | None = None

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Heads:
        """From a ``config.json``; values that are no counts are passed over."""
        found = [config.get(name) for name in ("num_attention_heads", "num_key_value_heads")]
        queries, keys = (value if type(value) is int and value > 0 else None for value in found)
        return cls(queries, keys or queries)


@dataclass(frozen=True)
class Shard:
    """What one rank holds. rule: how the layer is cut. notes: what is repeated or padded."""

    spec: Spec
    rule: str
    notes: tuple[str, ...] = ()


def check_degree(degree: int) -> int:
    """The degree, if it is one.

    Raises:
        SettingError: below 1 or beyond :data:`MOST_SHARDS`.
    """
    if not 1 <= degree <= MOST_SHARDS:
        raise SettingError(f"--tp {degree}", f"not between 1 and {MOST_SHARDS}", "give the number of ranks")
    return degree


def legal_degrees(module: str, spec: Spec, heads: Heads, most: int = 16) -> tuple[int, ...]:
    """Every degree up to ``most`` by which the layer can be cut."""
    return (1, *(degree for degree in range(2, most + 1) if isinstance(_cut(module, spec, degree, heads), Shard)))


def shard(module: str, spec: Spec, degree: int, heads: Heads | None = None) -> Shard | Refusal:
    """The spec of one of ``degree`` ranks, or the refusal, which names layer, dimension and group, and the degrees that are legal.

    Args:
        module: the layer's dotted name; its last part decides the rule.
        spec: of the whole layer.
        degree: number of ranks.
        heads: of the model; without them a cut through a head is not seen.
    """
    heads = heads or Heads()
    if check_degree(degree) == 1:
        return Shard(spec, "whole")
    found = _cut(module, spec, degree, heads)
    if isinstance(found, Shard):
        return found
    legal = ", ".join(map(str, legal_degrees(module, spec, heads)))
    return Refusal("shape.shard", found[0], found[1], f"use one of the degrees {legal} (of those up to 16)")


_Illegal = tuple[str, str]


def _cut(module: str, spec: Spec, degree: int, heads: Heads) -> Shard | _Illegal:
    last = module.rpartition(".")[2]
    if isinstance(spec, MoESpec):
        return _experts(module, spec, degree)
    if isinstance(spec, EmbeddingSpec):
        return _table(spec, degree)
    if isinstance(spec, LinearSpec) and last in _KEYS:
        return _key_columns(module, spec, degree, heads)
    if isinstance(spec, LinearSpec) and last in _QUERIES + _COLUMNS:
        return _columns(module, spec, degree, heads.queries if last in _QUERIES else None)
    if isinstance(spec, LinearSpec) and last in _ROWS:
        return _rows(module, spec, degree, heads.queries if last in _OUTPUTS else None)
    return Shard(spec, "whole on each rank", (f"no rule for {last}",))


def _table(spec: EmbeddingSpec, degree: int) -> Shard:
    rows = -(-spec.rows // degree)
    notes = (f"{spec.rows} rows padded to {rows * degree}",) if rows * degree != spec.rows else ()
    return Shard(replace(spec, rows=rows), "rows of the table", notes)


def _part(where: str, size: int, degree: int, unit: int, what: str) -> int | _Illegal:
    """``size / degree``, if it is whole and a multiple of ``unit``."""
    asked = f"{where}={size} in {degree} shards"
    if size % degree:
        return asked, f"{size} is not a multiple of {degree}"
    part = size // degree
    return part if part % unit == 0 else (asked, f"{part} is not a multiple of {what} {unit}")


def _units(scheme: WeightScheme) -> tuple[tuple[int, str], tuple[int, str]]:
    """What a cut must be a multiple of, along N and along K."""
    g = scheme.granularity
    if g.block is not None:
        return (g.block[0], "the scale block"), (g.block[1], "the scale block")
    group = g.superblock or g.group or 1
    return (1, ""), (group, "the scale superblock" if g.superblock else "the scale group")


def _columns(module: str, spec: LinearSpec, degree: int, heads: int | None) -> Shard | _Illegal:
    if heads is not None and heads % degree:
        return f"{module}: n={spec.n} in {degree} shards", f"{heads} heads are not a multiple of {degree}"
    halves = 2 if module.endswith("gate_up_proj") else 1
    part = _part(f"{module}: n", spec.n // halves, degree, *_units(spec.weights)[0])
    return part if isinstance(part, tuple) else Shard(replace(spec, n=part * halves), "columns (n)")


def _key_columns(module: str, spec: LinearSpec, degree: int, heads: Heads) -> Shard | _Illegal:
    """Fewer key heads than ranks: each head is held by several."""
    if heads.keys is None or heads.keys % degree == 0 or spec.n % heads.keys:
        return _columns(module, spec, degree, None)
    if degree % heads.keys:
        return f"{module}: n={spec.n} in {degree} shards", f"{heads.keys} key heads neither divide {degree} nor are divided by it"
    part = _part(f"{module}: n", spec.n, heads.keys, *_units(spec.weights)[0])
    if isinstance(part, tuple):
        return part
    return Shard(replace(spec, n=part), "columns (n)", (f"each of {heads.keys} key heads is held by {degree // heads.keys} ranks",))


def _rows(module: str, spec: LinearSpec, degree: int, heads: int | None) -> Shard | _Illegal:
    if heads is not None and heads % degree:
        return f"{module}: k={spec.k} in {degree} shards", f"{heads} heads are not a multiple of {degree}"
    if spec.weights.act_order:
        return f"{module}: k={spec.k} in {degree} shards", "its activation order (g_idx) spreads each group over all ranks"
    part = _part(f"{module}: k", spec.k, degree, *_units(spec.weights)[1])
    return part if isinstance(part, tuple) else Shard(replace(spec, k=part), "rows (k)")


def _experts(module: str, spec: MoESpec, degree: int) -> Shard | _Illegal:
    """Gate and up are cut along N, down along K, all at the intermediate size."""
    part: int | _Illegal = spec.intermediate
    for role, scheme, axis in (("gate", spec.gate, 0), ("up", spec.up, 0), ("down", spec.down, 1)):
        if scheme is None:
            continue
        if axis == 1 and scheme.act_order:
            return f"{module} {role}: intermediate={spec.intermediate} in {degree} shards", "its g_idx spreads each group over all ranks"
        part = _part(f"{module} {role}: intermediate", spec.intermediate, degree, *_units(scheme)[axis])
        if isinstance(part, tuple):
            return part
    assert isinstance(part, int)
    return Shard(replace(spec, intermediate=part), "intermediate of each expert")
