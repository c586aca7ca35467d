"""Exact changes of scheme: a tensor rewritten in a scheme that can hold every value of it, bit for bit equal when dequantized.

Needed where tensors of different schemes must be one, e.g. a block whose experts were quantized to different widths.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hal_core.canonical import pack_nibbles
from hal_core.errors import ShapeError
from hal_core.schemes import Granularity, GranularityKind, WeightScheme, ZeroKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from hal_core.canonical import QuantizedTensor

__all__ = ["common_scheme", "widen"]


def common_scheme(schemes: Iterable[WeightScheme], k: int) -> WeightScheme | None:
    """The narrowest scheme that holds every one of ``schemes`` exactly for rows of ``k``; None when there is none.

    Integer codes go to the widest of them (int4 or int8), groups to their greatest common divisor, and a scheme
    without zero point beside one with gets the zero point that its signed codes imply.
    """
    found = list(dict.fromkeys(schemes))
    if len(found) == 1:
        return found[0]
    zeros = {s.zero for s in found}
    if any(not s.dtype.startswith("int") or s.act_order or _group(s, k) is None for s in found):
        return None
    if ZeroKind.MINIMUM in zeros and len(zeros) > 1:
        return None
    group = math.gcd(*(_group(s, k) or k for s in found))
    granularity = Granularity.channel() if group == k else Granularity.groups(group)
    zero = next(iter(zeros)) if len(zeros) == 1 else ZeroKind.INTEGER
    return WeightScheme("int8" if max(s.bits for s in found) > 4 else "int4", granularity, zero)


def _group(scheme: WeightScheme, k: int) -> int | None:
    kind = scheme.granularity.kind
    if kind is GranularityKind.CHANNEL:
        return k
    return scheme.granularity.group if kind is GranularityKind.GROUP else None


def widen(tensor: QuantizedTensor, scheme: WeightScheme) -> QuantizedTensor:
    """``tensor`` in ``scheme``, which must come from :func:`common_scheme` of a set that contains its own.

    Raises:
        ShapeError: the scheme cannot hold the tensor exactly.
    """
    old, k = tensor.scheme, tensor.shape[-1]
    if old == scheme:
        return tensor
    if common_scheme((old, scheme), k) != scheme or tensor.scales is None:
        raise ShapeError(f"a weight {old}", f"cannot be held exactly as {scheme}", "use one scheme for the tensors that are joined")
    columns = -(-k // (_group(scheme, k) or k))
    repeat = (_group(old, k) or k) // (_group(scheme, k) or k)

    def spread(grid: Tensor | None) -> Tensor | None:
        return None if grid is None else grid.repeat_interleave(repeat, dim=-1)[..., :columns].contiguous()

    codes, zeros = tensor.codes(), spread(tensor.zeros)
    if old.zero is ZeroKind.NONE and scheme.zero is ZeroKind.INTEGER:
        middle = 1 << (old.bits - 1)
        codes = codes + middle
        zeros = torch.full((*tensor.shape[:-1], columns), middle, dtype=torch.uint8)
    signed = scheme.zero is ZeroKind.NONE
    values = pack_nibbles(codes) if scheme.bits == 4 else codes.to(torch.int8 if signed else torch.uint8)
    return replace(tensor, scheme=scheme, values=values, scales=spread(tensor.scales), zeros=zeros, mins=spread(tensor.mins))
