"""The MXFP8 entry of CUTLASS experts: the flag that says so, and activations that are so, must come together.

FlashInfer does not compare the two: with the flag alone it reads bf16 numbers as bytes and scales that are not there, and with the
scales alone it takes the bytes for unscaled fp8. Both give numbers and no error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hal_core.errors import ShapeError
from hal_core.ops import QuantizedActivation

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MXFP8", "check_mxfp8", "mxfp8_arguments"]

_GROUP = 32
#: Over what one scale holds.
MXFP8 = f"g{_GROUP}"


def mxfp8_arguments(flag: bool, x: Tensor | QuantizedActivation) -> dict[str, Any]:
    """Arguments ``input``, ``input_sf``, ``use_mxfp8_act_scaling`` and ``swizzled_input_sf`` of a call.

    Args:
        flag: the op was prepared for MXFP8 activations.
        x: ``[T, H]``, or codes ``float8_e4m3fn [T, H]`` with E8M0 scales ``uint8 [T, H / 32]``.

    Raises:
        ShapeError: one of flag and payload without the other, or a payload of another form.
    """
    payload = isinstance(x, QuantizedActivation)
    if flag and not payload:
        found = f"x is {x.dtype}, without scales"
        raise ShapeError(
            "experts prepared for MXFP8 activations", found, "quantize x to MXFP8 first, or prepare for unquantized activations"
        )
    if payload and not flag:
        found = f"x is {x.values.dtype} with scales per {x.granularity}"
        raise ShapeError("experts prepared for unquantized activations", found, "give x unquantized, or prepare for MXFP8 activations")
    if not payload:
        return {"input": x, "input_sf": None, "use_mxfp8_act_scaling": False, "swizzled_input_sf": True}
    assert isinstance(x, QuantizedActivation)  # payload says so
    values, scales = x.values, x.scales
    wanted = (*values.shape[:-1], -(-values.shape[-1] // _GROUP))
    if x.granularity != MXFP8 or values.dtype != torch.float8_e4m3fn or scales.dtype != torch.uint8 or tuple(scales.shape) != wanted:
        found = f"{values.dtype} {list(values.shape)} with {scales.dtype} {list(scales.shape)} per {x.granularity}"
        raise ShapeError("MXFP8 activations", found, f"give float8_e4m3fn [T, H] with uint8 {list(wanted)} scales per {MXFP8}")
    return {"input": values, "input_sf": scales, "use_mxfp8_act_scaling": True, "swizzled_input_sf": False}


def check_mxfp8(asked: str, x: Any, hidden: int, device: torch.device) -> QuantizedActivation:
    """MXFP8 activations as FlashInfer reads them: rows of ``hidden`` codes and their scales one after another, on ``device``.

    Raises:
        ShapeError: others, of which FlashInfer would read past the end or in another order.
    """
    mxfp8_arguments(True, x)
    assert isinstance(x, QuantizedActivation)  # else it was refused
    for name, part, width in (("values", x.values, hidden), ("scales", x.scales, hidden // _GROUP)):
        if part.dim() != 2 or part.shape[1] != width or part.device != device or not part.is_contiguous():
            found = f"{name} {list(part.shape)} on {part.device}{'' if part.is_contiguous() else ', not contiguous'}"
            raise ShapeError(f"{asked} input", found, f"give contiguous {name} [T, {width}] on {device}")
    return x
