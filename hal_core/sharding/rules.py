"""Tensor parallelism by the ordinary rules: what one rank of a layer asks of its kernel, or why the layer cannot be cut.

Columns (N) of q, k, v, gate and up; rows (K) of o and down; the intermediate size of experts; rows of the embedding and the head. A
cut may not go through a head; one through a scale group or block makes finer groups (:mod:`hal_core.sharding.cuts`). Everything else
is kept whole on each rank. Nothing is read but the specs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hal_core.errors import SettingError, ShapeError
from hal_core.refusal import Refusal
from hal_core.sharding.cuts import Cut, cut_scheme
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


def _part(where: str, size: int, degree: int) -> int | _Illegal:
    """``size / degree``, if it is whole."""
    return (f"{where}={size} in {degree} shards", f"{size} is not a multiple of {degree}") if size % degree else size // degree


def _cut_scheme(where: str, scheme: WeightScheme, rows: tuple[int, int], columns: tuple[int, int]) -> WeightScheme | _Illegal:
    """How a part is stored; rows and columns are ``(part, whole)``."""
    cuts = [Cut(0, part, whole, part) for part, whole in (rows, columns)]
    try:
        return cut_scheme(where, scheme, *cuts)
    except ShapeError as error:
        part, whole = rows if rows[0] < rows[1] else columns
        return f"{where}={whole} in {whole // part} shards", error.found


def _notes(*pairs: tuple[WeightScheme | None, WeightScheme | None]) -> tuple[str, ...]:
    """What is said of parts whose groups are finer than those of the whole."""
    return tuple(dict.fromkeys(f"{old} cut through groups, held as {new} (exact)" for old, new in pairs if old != new))


def _columns(module: str, spec: LinearSpec, degree: int, heads: int | None) -> Shard | _Illegal:
    if heads is not None and heads % degree:
        return f"{module}: n={spec.n} in {degree} shards", f"{heads} heads are not a multiple of {degree}"
    halves = 2 if module.endswith("gate_up_proj") else 1
    part = _part(f"{module}: n", spec.n // halves, degree)
    return part if isinstance(part, tuple) else _of_columns(module, spec, part, spec.n // halves, halves)


def _of_columns(module: str, spec: LinearSpec, part: int, whole: int, halves: int = 1) -> Shard | _Illegal:
    scheme = _cut_scheme(f"{module}: n", spec.weights, (part, whole), (spec.k, spec.k))
    if isinstance(scheme, tuple):
        return scheme
    return Shard(replace(spec, n=part * halves, weights=scheme), "columns (n)", _notes((spec.weights, scheme)))


def _key_columns(module: str, spec: LinearSpec, degree: int, heads: Heads) -> Shard | _Illegal:
    """Fewer key heads than ranks: each head is held by several."""
    if heads.keys is None or heads.keys % degree == 0 or spec.n % heads.keys:
        return _columns(module, spec, degree, None)
    if degree % heads.keys:
        return f"{module}: n={spec.n} in {degree} shards", f"{heads.keys} key heads neither divide {degree} nor are divided by it"
    found = _of_columns(module, spec, spec.n // heads.keys, spec.n)
    if isinstance(found, tuple):
        return found
    return replace(found, notes=(f"each of {heads.keys} key heads is held by {degree // heads.keys} ranks", *found.notes))


def _rows(module: str, spec: LinearSpec, degree: int, heads: int | None) -> Shard | _Illegal:
    if heads is not None and heads % degree:
        return f"{module}: k={spec.k} in {degree} shards", f"{heads} heads are not a multiple of {degree}"
    part = _part(f"{module}: k", spec.k, degree)
    if isinstance(part, tuple):
        return part
    scheme = _cut_scheme(f"{module}: k", spec.weights, (spec.n, spec.n), (part, spec.k))
    if isinstance(scheme, tuple):
        return scheme
    return Shard(replace(spec, k=part, weights=scheme), "rows (k)", _notes((spec.weights, scheme)))


def _experts(module: str, spec: MoESpec, degree: int) -> Shard | _Illegal:
    """Gate and up are cut along N, down along K, all at the intermediate size."""
    inner, outer = spec.intermediate, (spec.hidden, spec.hidden)
    part = _part(f"{module}: intermediate", inner, degree)
    if isinstance(part, tuple):
        return part
    schemes: dict[str, WeightScheme | None] = {}
    for role, scheme in (("gate", spec.gate), ("up", spec.up), ("down", spec.down)):
        sides = (outer, (part, inner)) if role == "down" else ((part, inner), outer)
        found = None if scheme is None else _cut_scheme(f"{module} {role}: intermediate", scheme, *sides)
        if isinstance(found, tuple):
            return found
        schemes[role] = found
    up, down = schemes["up"], schemes["down"]
    assert up is not None  # every block of experts has these two
    assert down is not None
    notes = _notes((spec.gate, schemes["gate"]), (spec.up, up), (spec.down, down))
    return Shard(replace(spec, intermediate=part, gate=schemes["gate"], up=up, down=down), "intermediate of each expert", notes)
