"""One rank's part of a canonical weight. A cut through a scale group or block keeps every number: the part has finer groups.

Slicing canonical tensors instead of a file's packed words leaves no case of its own for 3-bit streams, packed zero points or reordered
nibbles: a format's reader has undone them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hal_core.canonical import QuantizedTensor, pack_nibbles, unpack_nibbles
from hal_core.errors import ShapeError
from hal_core.schemes import Granularity, WeightScheme

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["LEAST_GROUP", "Cut", "cut_scheme", "cut_weight", "join_rows", "rank_cut"]

#: Finer groups than this would take more memory for scales than for 4-bit codes.
LEAST_GROUP = 4


@dataclass(frozen=True)
class Cut:
    """``start:stop`` of a dimension of ``whole`` elements; every rank's part starts at a multiple of ``step``."""

    start: int
    stop: int
    whole: int
    step: int

    @classmethod
    def all_of(cls, whole: int) -> Cut:
        return cls(0, whole, whole, whole)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def uncut(self) -> bool:
        """Whether no rank's part is less than the whole."""
        return self.step >= self.whole


def rank_cut(where: str, whole: int, size: int, rank: int, degree: int) -> Cut:
    """Part of ``rank`` where each of ``degree`` ranks holds ``size``; parts are held by several ranks where there are fewer.

    Raises:
        ShapeError: the parts do not make up the whole.
    """
    if size < 1 or whole % size or degree % (whole // size):
        legal = ", ".join(str(d) for d in range(1, 17) if whole % d == 0)
        raise ShapeError(f"{where}: {whole} in {degree} shards", f"each rank is to hold {size}", f"use a degree that divides it: {legal}")
    start = rank // (degree // (whole // size)) * size
    return Cut(start, start + size, whole, size)


def cut_scheme(where: str, scheme: WeightScheme, rows: Cut, columns: Cut) -> WeightScheme:
    """How a part ``rows`` of N by ``columns`` of K is stored: as the whole, or in finer groups of the same numbers.

    Raises:
        ShapeError: the groups would be finer than :data:`LEAST_GROUP`, or a two-level group would be cut.
    """
    g = scheme.granularity
    if g.block is not None:
        finer = (_finer(where, g.block[0], rows), _finer(where, g.block[1], columns))
        return replace(scheme, granularity=Granularity.blocks(*finer))
    if g.group is None or columns.uncut:
        return scheme
    if scheme.act_order:
        size = columns.step // -(-columns.whole // g.group)
        _check_size(where, g.group, size, columns)
        return replace(scheme, granularity=Granularity.groups(size))
    if g.superblock is None:
        return replace(scheme, granularity=Granularity.groups(_finer(where, g.group, columns)))
    if columns.step % g.group:
        found = f"parts of {columns.step} cut groups of {g.group}, whose factors belong to superblocks of {g.superblock}"
        raise ShapeError(f"{where}: {scheme} of {columns.whole}", found, _legal(columns, g.group))
    return replace(scheme, granularity=Granularity.superblocks(g.group, math.gcd(g.superblock, columns.step)))


def _finer(where: str, group: int, cut: Cut) -> int:
    """The group size of parts of ``cut``; groups stay whole where every part starts at one, and one group of all is any number of it."""
    size = group if cut.uncut else math.gcd(group, cut.step) if group < cut.whole else cut.step
    _check_size(where, group, size, cut)
    return size


def _check_size(where: str, group: int, size: int, cut: Cut) -> None:
    if size < min(group, LEAST_GROUP):
        found = f"parts of {cut.step} cut groups of {group} into groups of {size}"
        raise ShapeError(f"{where}: {cut.whole} in shards", found, _legal(cut, math.gcd(group, LEAST_GROUP)))


def _legal(cut: Cut, unit: int) -> str:
    degrees = (d for d in range(1, 17) if cut.whole % d == 0 and (d == 1 or cut.whole // d % unit == 0))
    return f"use one of the degrees {', '.join(map(str, degrees))} (of those up to 16)"


def cut_weight(where: str, weight: QuantizedTensor, rows: Cut, columns: Cut) -> QuantizedTensor:
    """Rows and columns of ``weight [.., N, K]``, copied; equal bit for bit, when dequantized, to that slice of the whole.

    Raises:
        ShapeError: as :func:`cut_scheme`, or the cuts are those of another shape.
    """
    if (rows.whole, columns.whole) != weight.shape[-2:]:
        raise ShapeError(f"{where}: a cut of {rows.whole}x{columns.whole}", f"the weight is {list(weight.shape[-2:])}")
    if rows.uncut and columns.uncut:
        return weight
    scheme = cut_scheme(where, weight.scheme, rows, columns)
    parts = {name: _part(name, tensor, weight, scheme, rows, columns) for name, tensor in weight.tensors().items()}
    if weight.g_idx is not None and not columns.uncut:
        parts = _ordered_groups(parts, scheme, columns)
    return QuantizedTensor(scheme, (*weight.shape[:-2], rows.size, columns.size), **parts)


def _part(name: str, tensor: Tensor, weight: QuantizedTensor, scheme: WeightScheme, rows: Cut, columns: Cut) -> Tensor:
    if name == "values":
        return _codes(tensor[..., rows.start : rows.stop, :], weight.scheme, columns)
    if name == "g_idx":
        return tensor[..., columns.start : columns.stop].contiguous()
    if name in ("global_scale", "input_scale", "input_zero"):
        return tensor
    old, new = weight.scheme.granularity, scheme.granularity
    if old.block is not None and new.block is not None:
        picked = tensor.index_select(-2, _groups(rows, old.block[0], new.block[0]))
        return picked.index_select(-1, _groups(columns, old.block[1], new.block[1]))
    if tensor.shape[-2] == weight.shape[-2] and (weight.shape[-2] > 1 or old.group is not None):
        tensor = tensor[..., rows.start : rows.stop, :]
    if old.group is None or new.group is None or scheme.act_order:
        return tensor.contiguous()
    two_levels = old.superblock is not None and not name.startswith("sub_")
    sizes = (old.superblock, new.superblock) if two_levels else (old.group, new.group)
    assert sizes[0] is not None  # two levels have a superblock, and the others a group
    assert sizes[1] is not None
    return tensor.index_select(-1, _groups(columns, sizes[0], sizes[1]))


def _groups(cut: Cut, old: int, new: int) -> Tensor:
    """For each group of the part the group of the whole that it lies in."""
    return (cut.start + torch.arange(-(-cut.size // new)) * new) // old


def _codes(values: Tensor, scheme: WeightScheme, columns: Cut) -> Tensor:
    if columns.uncut or scheme.bits != 4:
        return (values if columns.uncut else values[..., columns.start : columns.stop]).contiguous()
    if columns.start % 2 or columns.size % 2:
        return pack_nibbles(unpack_nibbles(values, columns.whole)[..., columns.start : columns.stop])
    return values[..., columns.start // 2 : columns.stop // 2].contiguous()


def _ordered_groups(parts: dict[str, Tensor], scheme: WeightScheme, columns: Cut) -> dict[str, Tensor]:
    """Scales of a part with act-order: its columns may lie in any group, so all groups are kept.

    The group size of the part is nominal: it makes the number of groups fit its number of columns.
    """
    group = scheme.granularity.group
    assert group is not None  # act-order orders groups
    width = -(-columns.size // group)
    fillers = {name: filler for name, filler in (("scales", 1), ("zeros", 0), ("mins", 0)) if name in parts}
    return {**parts, **{n: torch.nn.functional.pad(parts[n], (0, width - parts[n].shape[-1]), value=v) for n, v in fillers.items()}}


def join_rows(weights: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """The rows of all weights as one, or None where their schemes, orders or whole-matrix numbers keep them apart."""
    first = weights[0]
    if len(weights) == 1:
        return first
    block = first.scheme.granularity.block
    alike = all((w.scheme, w.shape[-1], w.tensors().keys()) == (first.scheme, first.shape[-1], first.tensors().keys()) for w in weights)
    aligned = block is None or all(w.shape[-2] % block[0] == 0 for w in weights[:-1])
    if not alike or not aligned or first.scheme.granularity == Granularity.tensor():
        return None
    whole = {n: t for n, t in first.tensors().items() if n in ("g_idx", "global_scale", "input_scale", "input_zero")}
    if any(not torch.equal(getattr(w, name), tensor) for w in weights for name, tensor in whole.items()):
        return None
    if any(w.tensors()[name].dtype != tensor.dtype for w in weights for name, tensor in first.tensors().items()):
        return None
    names = [name for name in first.tensors() if name not in whole]
    joined = {name: torch.cat([w.tensors()[name] for w in weights], dim=-2) for name in names}
    shape = (*first.shape[:-2], sum(w.shape[-2] for w in weights), first.shape[-1])
    return QuantizedTensor(first.scheme, shape, **{**whole, **joined})
