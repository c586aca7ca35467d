"""Changes of a stored weight that a kernel may need and a layout may not make: each named, with the error it may add.

A layout is a bijection; a transform is not. The error bound is the largest relative L2 error that it adds to a weight,
``|w' - w| / |w|``, and holds for every weight that ``apply`` returns: where a weight's own numbers decide, they are measured and
a weight outside the bound is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hal_core.codes import E8M0_NAN, count_fp8_nans, to_fnuz
from hal_core.errors import ShapeError, UnfitWeightsError
from hal_core.schemes import Granularity, GranularityKind, WeightScheme, ZeroKind
from hal_core.selection import Transform

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.canonical import QuantizedTensor

__all__ = ["Fnuz", "GroupToChannel", "Recast", "ToFP8", "WeightTransform", "added_error"]

_RECAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: float32 elements compared at a time.
_CHUNK = 1 << 22
_MOST_E4M3 = 448.0


class WeightTransform(ABC):
    """A change of canonical weights. name: as selections show it. error_bound: largest relative L2 error that it adds."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def error_bound(self) -> float: ...

    @abstractmethod
    def obstacle(self, scheme: WeightScheme) -> str:
        """Why it does not apply to a scheme; empty when it does."""

    @abstractmethod
    def apply(self, weight: QuantizedTensor) -> QuantizedTensor:
        """The changed weight; tensors that do not change are shared.

        Raises:
            ShapeError: not for this scheme. UnfitWeightsError: the numbers cannot be changed within the bound.
        """

    @property
    def record(self) -> Transform:
        """What a kernel returns from ``transforms(spec)``, for the selection."""
        return Transform(self.name, self.error_bound)

    def _check(self, scheme: WeightScheme) -> None:
        if found := self.obstacle(scheme):
            raise ShapeError(self._asked(scheme), found)

    def _asked(self, scheme: WeightScheme) -> str:
        return f"transform {self.name} of a weight {scheme}"

    def _refused(self, scheme: WeightScheme, found: str, fix: str) -> UnfitWeightsError:
        """What the numbers of a weight rule out, though its scheme is served: another kernel may hold them as they are."""
        return UnfitWeightsError(self._asked(scheme), found, fix)


def added_error(before: QuantizedTensor, after: QuantizedTensor) -> float:
    """Relative L2 error of the dequantized weights, over all experts together; 0 where both are 0."""
    wrong = whole = 0.0
    for old, new in zip(_matrices(before), _matrices(after), strict=True):
        block = old.scheme.granularity.block or new.scheme.granularity.block
        step = old.shape[0] if block else max(1, _CHUNK // old.shape[1])
        for start in range(0, old.shape[0], step):
            stop = min(start + step, old.shape[0])
            truth = old.rows(start, stop).dequantize().double()
            wrong += float((new.rows(start, stop).dequantize().double() - truth).square().sum())
            whole += float(truth.square().sum())
    return (wrong / whole) ** 0.5 if whole else float(wrong > 0)


def _matrices(weight: QuantizedTensor) -> list[QuantizedTensor]:
    if len(weight.shape) == 2:
        return [weight]
    return [matrix for index in range(weight.shape[0]) for matrix in _matrices(weight.expert(index))]


@dataclass(frozen=True)
class Fnuz(WeightTransform):
    """e4m3fn to e4m3fnuz, the fp8 of gfx942: the same byte is half the value there, so scales double. Exact.

    Minus zero becomes zero, as its byte means NaN there. NaN bytes would become 240 and are refused.
    """

    name = "e4m3fn_to_e4m3fnuz"
    error_bound = 0.0

    def obstacle(self, scheme: WeightScheme) -> str:
        return "" if scheme.dtype == "fp8_e4m3" else "it changes fp8_e4m3 elements"

    def apply(self, weight: QuantizedTensor) -> QuantizedTensor:
        self._check(weight.scheme)
        assert weight.scales is not None  # quantized schemes have scales
        if count := count_fp8_nans(weight.values):
            found = f"{count} values are NaN"  # of no use to another kernel either
            raise ShapeError(self._asked(weight.scheme), found, "the checkpoint is damaged: fetch or make it again")
        static = None if weight.input_scale is None else self._doubled(weight.input_scale, weight.scheme)
        scheme = replace(weight.scheme, dtype="fp8_e4m3fnuz")
        return replace(
            weight, scheme=scheme, values=to_fnuz(weight.values), scales=self._doubled(weight.scales, weight.scheme), input_scale=static
        )

    def _doubled(self, scales: Tensor, scheme: WeightScheme) -> Tensor:
        """Twice the scales in their own dtype; a byte of E8M0 is an exponent."""
        if scales.dtype == torch.uint8:
            too_large = bool((scales >= E8M0_NAN - 1).any())
            doubled = scales + 1
        else:
            doubled = scales * 2
            too_large = not bool(torch.isfinite(doubled).all())
        if too_large:
            raise self._refused(scheme, f"twice the largest scale is not finite in {scales.dtype}", "recast the scales to float32 first")
        return doubled


@dataclass(frozen=True)
class ToFP8(WeightTransform):
    """A float weight in e4m3, with a float32 scale for every row or block: its largest magnitude becomes the largest code, 448.

    A rounded element moves by a 17th of itself at most, one below the normal codes by 2**-10 of a scale: for the whole less than
    2**-4, whatever the weight.
    """

    to: WeightScheme

    def __post_init__(self) -> None:
        kinds = (GranularityKind.CHANNEL, GranularityKind.BLOCK)
        if self.to.dtype != "fp8_e4m3" or self.to.granularity.kind not in kinds:
            fix = "known: fp8_e4m3:channel, and blocks such as fp8_e4m3:b128x128"
            raise ShapeError(f"recast of weights to {self.to}", "not known", fix)

    @property
    def name(self) -> str:
        return f"recast:{self.to}"

    error_bound = 2.0**-4

    def obstacle(self, scheme: WeightScheme) -> str:
        return "it changes float weights" if scheme.quantized else ""

    def apply(self, weight: QuantizedTensor) -> QuantizedTensor:
        self._check(weight.scheme)
        (n, k), lead = weight.shape[-2:], weight.shape[:-2]
        rows, columns = self.to.granularity.block or (1, k)
        down, across = -(-n // rows), -(-k // columns)
        padded = torch.nn.functional.pad(weight.values.float(), (0, across * columns - k, 0, down * rows - n))
        blocks = padded.view(*lead, down, rows, across, columns)
        scales = blocks.abs().amax((-3, -1), keepdim=True) / _MOST_E4M3
        if not bool((torch.isfinite(scales) & ((scales == 0) | (scales > torch.finfo(torch.float32).tiny))).all()):
            raise self._refused(weight.scheme, "values that are not finite, or too small for a scale", "keep the weight as it is stored")
        codes = (blocks / torch.where(scales == 0, 1.0, scales)).clamp_(-_MOST_E4M3, _MOST_E4M3).view(padded.shape)[..., :n, :k]
        values = codes.contiguous().to(torch.float8_e4m3fn)
        return replace(weight, scheme=self.to, values=values, scales=scales.view(*lead, down, across))


@dataclass(frozen=True)
class GroupToChannel(WeightTransform):
    """Group scales of int4 folded into one scale a row of int8: ``s' = max|s| * 8/127`` and ``q' = round(q * s / s')``.

    Codes reach from -8 to 7, so ``q'`` stays within 127 and nothing is clipped; with a zero point z they reach ``max(z, 15 - z)`` far,
    which stands in the place of 8. An element moves by at most ``s' / 2``. What that
    is of the whole depends on how far a row's group scales differ; a weight for which it is more than ``error_bound`` is refused.
    """

    error_bound: float = 0.02
    name = "group_to_channel:int8"

    def obstacle(self, scheme: WeightScheme) -> str:
        grouped = scheme.granularity.kind is GranularityKind.GROUP
        served = scheme.dtype == "int4" and scheme.zero is not ZeroKind.MINIMUM and grouped
        return "" if served else "it folds int4 groups without minima"

    def apply(self, weight: QuantizedTensor) -> QuantizedTensor:
        self._check(weight.scheme)
        assert weight.scales is not None  # quantized schemes have scales
        zeros = None if weight.zeros is None else weight.zeros.short()  # beyond 15 the difference is below zero, which bytes cannot hold
        reach = 8 / 127 if zeros is None else torch.maximum(zeros, 15 - zeros).float() / 127
        scales = (weight.scales.float().abs() * reach).amax(-1, keepdim=True)
        if not bool((torch.isfinite(scales) & ((scales == 0) | (scales > torch.finfo(torch.float32).tiny))).all()):
            raise self._refused(weight.scheme, "scales that float32 cannot hold after the change", "keep the groups")
        divisor = torch.where(scales == 0, torch.ones_like(scales), scales)
        values = weight.dequantize().div_(divisor).round_().to(torch.int8)
        result = replace(weight, scheme=WeightScheme("int8", Granularity.channel()), values=values, scales=scales, zeros=None, g_idx=None)
        found = added_error(weight, result)
        if found > self.error_bound:
            told = f"it would add a relative error of {found:.3g}, more than {self.error_bound:g}: the scales of a row differ too much"
            raise self._refused(weight.scheme, told, "keep the groups")
        return result


@dataclass(frozen=True)
class Recast(WeightTransform):
    """Scales and minima in another 16-bit float. fp16 to bf16 rounds to 8 bits; bf16 to fp16 is exact, or refused.

    A scale moves by 2**-8 of itself at most, and so does a weight that has no minimum. With minima the two may cancel: there the
    error is measured, and a weight outside the bound is refused.
    """

    to: str

    def __post_init__(self) -> None:
        if self.to not in _RECAST:
            raise ShapeError(f"recast of scales to {self.to!r}", "not known", f"known: {', '.join(_RECAST)}")

    @property
    def name(self) -> str:
        return f"recast_scales:{self.to}"

    @property
    def error_bound(self) -> float:
        return 2.0**-8 if self.to == "bf16" else 0.0

    def obstacle(self, scheme: WeightScheme) -> str:
        return "" if scheme.quantized else "an unquantized weight has no scales"

    def apply(self, weight: QuantizedTensor) -> QuantizedTensor:
        self._check(weight.scheme)
        assert weight.scales is not None  # quantized schemes have scales
        mins = None if weight.mins is None else self._cast(weight.mins, weight.scheme)
        result = replace(weight, scales=self._cast(weight.scales, weight.scheme), mins=mins)
        # float32 products of the two differ from exact ones by 2**-24 of themselves
        if mins is not None and (found := added_error(weight, result)) > self.error_bound + 2.0**-22:
            raise self._refused(weight.scheme, f"it would add a relative error of {found:.3g}", "keep the scales as they are stored")
        return result

    def _cast(self, tensor: Tensor, scheme: WeightScheme) -> Tensor:
        kind = _RECAST[self.to]
        if tensor.dtype == kind:
            return tensor
        if tensor.dtype not in _RECAST.values():
            raise self._refused(scheme, f"scales of {tensor.dtype}", "it changes fp16 and bf16")
        cast = tensor.to(kind)
        if not bool(torch.isfinite(cast).all()) or (self.to == "fp16" and not torch.equal(cast.float(), tensor.float())):
            raise self._refused(scheme, f"some scales have no equal in {self.to}", "keep the scales as they are stored")
        return cast
