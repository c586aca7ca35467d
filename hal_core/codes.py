"""Element and scale codes of the 8- and 4-bit float types: what a stored byte stands for."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["E8M0_NAN", "count_fp8_nans", "effective_scales", "from_fnuz", "scale_values", "to_fnuz"]

#: The one byte of an E8M0 scale that is no power of two.
E8M0_NAN = 255
_MINUS_ZERO, _NAN = 0x80, 0x7F
#: Bytes that are looked at together; they stay in a core's cache.
_PART = 1 << 18


def scale_values(scales: Tensor) -> Tensor:
    """float32 scales of a stored scale tensor; uint8 is E8M0, 2 to the power of (byte - 127), exact."""
    if scales.dtype == torch.uint8:
        return scales.view(torch.float8_e8m0fnu).float()
    return scales.float()


def effective_scales(scales: Tensor, global_scale: Tensor | None) -> Tensor:
    """float32 ``[.., N, G]``: scales times their tensor's global scale ``[..]``, rounded once.

    The product is formed in float64: for a global scale that a file stores as a divisor, the canonical reciprocal is float64,
    and the result is then the correctly rounded quotient of scale and divisor, bit for bit.
    """
    if global_scale is None:
        return scale_values(scales)
    return (scale_values(scales).double() * global_scale.double()[..., None, None]).float()


def count_fp8_nans(values: Tensor) -> int:
    """Bytes of an fp8 tensor that are no finite number: NaN, and in e5m2 infinity too."""
    least = 0x7F if values.dtype == torch.float8_e4m3fn else 0x7C
    bad = 0
    # a part at a time: summing a mask widens it to eight bytes an element
    codes = values.view(torch.uint8).reshape(-1)
    for start in range(0, codes.numel(), _PART):
        magnitude = codes[start : start + _PART] & 0x7F
        if int(magnitude.max()) >= least:
            bad += int((magnitude >= least).sum())
    return bad


def to_fnuz(values: Tensor) -> Tensor:
    """float8_e4m3fn to the float8_e4m3fnuz of half the numbers."""
    codes = values.view(torch.uint8)
    nan = (codes & 0x7F) == _NAN
    codes = torch.where(codes == _MINUS_ZERO, 0, codes)
    return torch.where(nan, _MINUS_ZERO, codes).to(torch.uint8).view(torch.float8_e4m3fnuz)


def from_fnuz(values: Tensor) -> Tensor:
    """Inverse of :func:`to_fnuz`, for what it made: float8_e4m3fn of twice the numbers."""
    codes = values.view(torch.uint8)
    return torch.where(codes == _MINUS_ZERO, _NAN, codes).to(torch.uint8).view(torch.float8_e4m3fn)
