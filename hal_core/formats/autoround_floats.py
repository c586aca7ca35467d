"""AutoRound's float exports, and its int8 with quantized inputs: element types beside the packed integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.formats.element_tensors import ElementPacking
from hal_core.formats.fp8 import fp8_element
from hal_core.formats.packing import Rule
from hal_core.schemes import ActivationScheme, Granularity

if TYPE_CHECKING:
    from hal_core.formats.quant_config import QuantConfig

__all__ = ["FLOAT_PACKINGS", "element_rule"]

_FP8 = ("weight", "weight_scale", "weight_scale_inv", "input_scale")
_LLMC = ("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_global_scale", "input_global_scale", "input_scale")
#: packing_format: the tensors' names. `auto_round:llm_compressor` holds compressed-tensors' names under AutoRound's config.
FLOAT_PACKINGS: dict[str, ElementPacking] = {
    "auto_round:fp8": ElementPacking("auto-round:fp8", _FP8),
    "auto_round:fp8_static": ElementPacking("auto-round:fp8_static", _FP8),
    "auto_round:llm_compressor": ElementPacking("auto-round:llm_compressor", _LLMC),
}
_GROUPS = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
_SERVED = "served: fp8, mxfp4, mxfp8, nvfp4 and, for llm_compressor, int8"


def _element(config: QuantConfig, kind: str, bits: int, field: str) -> str:
    """Element type of a ``data_type`` or ``act_data_type`` with its bits."""
    name = kind.lower()
    if name.startswith("mx_fp") and bits in (4, 8):
        return f"mxfp{bits}"
    if name.startswith("nv_fp") and "e5m3" not in name and bits == 4:
        return "nvfp4"
    if name.startswith("fp") and bits == 8:
        return "fp8_e5m2" if "e5m2" in name else fp8_element(config) if field == "data_type" else "fp8_e4m3"
    if name == "int" and bits == 8:
        return "int8"
    raise config.error(field, f"{kind[:40]!r} of {bits} bits is not served", _SERVED)


def element_rule(fields: QuantConfig, base: QuantConfig, packing: ElementPacking) -> Rule:
    """The rule of one module, whose own ``fields`` override those of the whole file, ``base``."""
    merged = fields if fields is base else base.sub({**base.fields, **fields.fields}, fields.where)
    bits = merged.integer("bits")
    element = _element(merged, merged.text("data_type", "int"), bits, "data_type")
    if element == "int8" and packing.name != "auto-round:llm_compressor":
        raise merged.error("data_type", f"int is not served for {packing.name}", _SERVED)
    if merged.flag("sym", True) is False:
        raise merged.error("sym", "false is not served for these elements", "served: true")
    block, group, by_shape = _granularity(merged, element)
    return Rule(
        packing, bits, group, True, activations=_activations(merged), element=element, block=block, by_shape=by_shape,
    )  # fmt: skip


def _granularity(fields: QuantConfig, element: str) -> tuple[tuple[int, int] | None, int, bool]:
    """Block, group size, and whether the scales' shape tells tensor from channel (the sizes 0 and -1 do not always)."""
    size = fields.fields.get("group_size", -1)
    if isinstance(size, list):
        if element not in ("fp8_e4m3", "fp8_e5m2") or len(size) != 2 or not all(type(part) is int and 0 < part < 2**31 for part in size):
            raise fields.error("group_size", f"{str(size)[:80]} is not served for {element}", "served: [rows, columns] for fp8")
        return (size[0], size[1]), -1, False
    if type(size) is not int or size != _GROUPS.get(element, size):
        raise fields.error("group_size", f"{str(size)[:80]} is not served for {element}", f"served: {_GROUPS.get(element, 'an integer')}")
    if element in _GROUPS:
        return None, size, False
    return (None, -1, True) if size in (0, -1) else (None, fields.group(), False)


def _activations(fields: QuantConfig) -> ActivationScheme | None:
    bits = fields.integer("act_bits", 16)
    if bits is None or bits >= 16:
        return None
    dtype = _element(fields, fields.text("act_data_type", "int"), bits, "act_data_type")
    dynamic, size = fields.flag("act_dynamic", True), fields.integer("act_group_size", -1)
    if fields.flag("act_sym", True) is False and dtype != "int8":
        raise fields.error("act_sym", f"false is not served for {dtype}", "served: true")
    if dtype in _GROUPS:
        if size != _GROUPS[dtype]:
            raise fields.error("act_group_size", f"{size} is not served for {dtype}", f"served: {_GROUPS[dtype]}")
        return ActivationScheme(dtype, Granularity.groups(size))
    if not dynamic:
        return ActivationScheme(dtype, Granularity.tensor(), dynamic=False, symmetric=fields.flag("act_sym", True))
    if not -1 <= size < 2**31:
        raise fields.error("act_group_size", str(size), "it is -1, 0 or the number of inputs that share a scale")
    granularity = {-1: Granularity.token(), 0: Granularity.tensor()}.get(size) or Granularity.groups(size)
    return ActivationScheme(dtype, granularity, symmetric=fields.flag("act_sym", True))
