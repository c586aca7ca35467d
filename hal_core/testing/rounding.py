"""Activations quantized as a kernel declares it, in float64: the truth that such a kernel is held to closely.

Shares no arithmetic with ``hal_core.reference``, which is judged like any other kernel. Only dynamic symmetric int8 and e4m3 are known
here; kernels that quantize in another way are held to their own bound alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.kernel import Kernel
    from hal_core.numerics import ActivationQuant
    from hal_core.schemes import WeightScheme

__all__ = ["Rounding", "rounding_of"]

#: The number that the largest magnitude of a row or group becomes.
_LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0}


@dataclass(frozen=True)
class Rounding:
    """``ways``: what the kernel declares for a spec, one or several groups."""

    ways: tuple[ActivationQuant, ...]

    def __call__(self, x: Tensor, weight: QuantizedTensor, expert: int | None = None) -> Tensor:
        """float64 ``x [M, K]`` as its codes stand for it where it meets ``weight``, in the order of the weight's groups."""
        span = self._span(weight.scheme, x.shape[-1])
        if weight.g_idx is None or span >= x.shape[-1]:
            return _rounded(x, span, self.ways[0].dtype)
        groups = weight.g_idx if expert is None else weight.g_idx[expert]
        order = torch.argsort(groups.to(torch.int64), stable=True)
        return _rounded(x[:, order], span, self.ways[0].dtype)[:, torch.argsort(order)]

    def _span(self, scheme: WeightScheme, k: int) -> int:
        """With several ways a matrix has that of its own groups, or else the widest."""
        sizes = {int(way.granularity[1:]) if way.granularity.startswith("g") else k for way in self.ways}
        own = scheme.granularity.group
        return own if own is not None and own in sizes else max(sizes)


def _rounded(x: Tensor, span: int, dtype: str) -> Tensor:
    parts = [_coded(part, dtype) for part in torch.split(x, max(1, span), dim=-1)]
    return torch.cat(parts, dim=-1)


def _coded(x: Tensor, dtype: str) -> Tensor:
    size = x.abs().amax(-1, keepdim=True) / _LARGEST[dtype]
    size = torch.where(size > 0, size, 1.0)
    if dtype == "int8":
        return (x / size).round() * size
    # three bits below the leading one, and no exponent under that of 2**-6
    magnitude = (x / size).abs().clamp(max=_LARGEST[dtype])
    step = torch.exp2(magnitude.clamp(min=2.0**-6).log2().floor() - 3)
    return ((magnitude / step).round() * step).clamp(max=_LARGEST[dtype]) * x.sign() * size


def rounding_of(kernel: Kernel[Any], spec: Any) -> Rounding | None:
    """What the kernel does to activations of ``spec``; None where it does nothing, or nothing that is known here."""
    numerics = kernel.computes(spec)
    known = len({a.dtype for a in numerics.activations}) == 1 and all(
        a.dtype in _LARGEST and a.dynamic and a.symmetric and _is_row(a.granularity) for a in numerics.activations
    )
    return Rounding(numerics.activations) if numerics.activations and known and numerics.weights == "as_stored" else None


def _is_row(granularity: str) -> bool:
    """Whether a scale holds for a row or a run of it."""
    return granularity == "token" or (granularity.startswith("g") and granularity[1:].isdigit())
