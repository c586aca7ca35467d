"""What a compressed-tensors group says of its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.schemes import ActivationScheme, Granularity

if TYPE_CHECKING:
    from hal_core.formats.quant_config import QuantConfig

__all__ = ["input_activations"]

_SERVED = "served: int8 and fp8 by token, group or tensor, and mxfp4, mxfp8, nvfp4"


def input_activations(group: QuantConfig) -> ActivationScheme | None:
    """The scheme of ``input_activations``, or None when inputs are not quantized.

    Raises:
        FormatError: a kind of quantization that is not known, or that contradicts itself.
    """
    fields = group.fields.get("input_activations")
    if fields is None:
        return None
    inputs = group.sub(fields, "input_activations")
    kind, bits = inputs.text("type", "int"), inputs.integer("num_bits", 8)
    dynamic = inputs.fields.get("dynamic", False)
    if dynamic not in (True, False, "local", None) or (isinstance(dynamic, int) and not isinstance(dynamic, bool)):
        raise inputs.error("dynamic", f"{str(dynamic)[:40]!r} is not known", "known: true, false, local")
    strategy = inputs.text("strategy", "token" if dynamic is True else "tensor")
    size = inputs.group() if strategy in ("group", "tensor_group") else None
    symmetric = inputs.flag("symmetric", True)
    dtype = _element(inputs, kind, bits, size)
    four = dtype in ("mxfp4", "mxfp8", "nvfp4")
    if dtype is None or (not symmetric and dtype != "int8") or (dynamic == "local") != (strategy == "tensor_group" and dynamic is not True):
        raise inputs.error("type", f"{kind} of {bits} bits, {strategy}, dynamic {dynamic}, symmetric {symmetric}, is not served", _SERVED)
    if dynamic in (False, None) and strategy != "tensor":
        raise inputs.error("strategy", f"static scales by {strategy} are not served", "served: static by tensor")
    if strategy in ("token", "tensor") and not four:
        granularity = Granularity.token() if strategy == "token" else Granularity.tensor()
        return ActivationScheme(dtype, granularity, dynamic is True, symmetric)
    if size is None or size == -1:
        raise inputs.error("strategy", f"{strategy} with group size {size} is not served for {dtype}", _SERVED)
    return ActivationScheme(dtype, Granularity.groups(size), symmetric=symmetric)


def _element(inputs: QuantConfig, kind: str, bits: int, size: int | None) -> str | None:
    """The element type; groups of 32 with scales in bytes are MX, groups of 16 are NVFP4."""
    if (kind, bits) == ("int", 8):
        return "int8"
    if kind != "float":
        return None
    if bits == 8:
        return "mxfp8" if size == 32 and inputs.text("scale_dtype", None) == "torch.uint8" else "fp8_e4m3"
    return {32: "mxfp4", 16: "nvfp4"}.get(size or 0) if bits == 4 else None
