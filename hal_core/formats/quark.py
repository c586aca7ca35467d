"""Quark: a scheme for all layers, schemes for patterns of names, and a list of layers that were left alone."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

from hal_core.formats.element_tensors import ElementPacking
from hal_core.formats.module_names import ModuleList
from hal_core.formats.packing import Decision, Rule
from hal_core.schemes import ActivationScheme, Granularity

if TYPE_CHECKING:
    from hal_core.formats.quant_config import QuantConfig

__all__ = ["PACKING", "QuarkRules"]

PACKING = ElementPacking("quark", ("weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point"))
_SERVED = "served: fp8_e4m3 and int8 by tensor or channel, and fp4 in groups of 32 with e8m0 scales"


class QuarkRules:
    """Modules by `exclude`, then by the first pattern of `layer_quant_config`, else by `global_quant_config`."""

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        self.suffixes: tuple[str, ...] = PACKING.suffixes
        if config.fields.get("layer_type_quant_config"):
            raise config.error("layer_type_quant_config", "schemes by class of layer are not served", "served: by name")
        export = config.mapping("export")
        if export.get("weight_format", "real_quantized") != "real_quantized":
            raise config.error("export", f"weight_format {str(export['weight_format'])[:40]!r} is not served", "served: real_quantized")
        self._base = _rule(config.sub(config.fields.get("global_quant_config"), "global_quant_config"))
        self._patterns = [
            (key, _rule(config.sub(value, f"layer_quant_config {key!r}"))) for key, value in config.mapping("layer_quant_config").items()
        ]
        self._left_alone = ModuleList(config.texts("exclude"), config.where)

    def decide(self, module: str) -> Decision:
        if self._left_alone.holds(module):
            return Decision(self._base, False, "exclude")
        for key, rule in self._patterns:
            if fnmatch.fnmatchcase(module, key):
                return Decision(rule, None, f"layer_quant_config {key}")
        return Decision(self._base, None, "global_quant_config")


def _rule(fields: QuantConfig) -> Rule:
    for field in ("output_tensors", "bias"):
        if fields.fields.get(field):
            raise fields.error(field, "is quantized, which is not served", "served: weights and inputs")
    weight = _tensor(fields, "weight")
    if weight is None:
        raise fields.error("weight", "missing or null", "fetch the config again")
    dtype, scheme, size = weight.text("dtype"), weight.text("qscheme"), weight.integer("group_size", None)
    inputs = _tensor(fields, "input_tensors")
    activations = None if inputs is None else _activations(inputs)
    if weight.flag("symmetric", True) is False or weight.flag("is_dynamic", False):
        raise weight.error("symmetric", "weights with zero points, or quantized at run time, are not served", _SERVED)
    if dtype == "fp4" and scheme == "per_group" and size == 32 and weight.text("scale_format", None) == "e8m0":
        return Rule(PACKING, 4, 32, True, activations=activations, element="mxfp4")
    if dtype in ("fp8_e4m3", "int8") and scheme in ("per_tensor", "per_channel") and weight.integer("ch_axis", 0) in (None, 0):
        return Rule(PACKING, 8, -1, True, activations=activations, element=str(dtype), per_tensor=scheme == "per_tensor")
    raise weight.error("dtype", f"{str(dtype)[:40]!r} {str(scheme)[:40]}, group size {size}, is not served", _SERVED)


def _tensor(fields: QuantConfig, field: str) -> QuantConfig | None:
    """One tensor's specification; several in a row are quantized more than once, which is not served."""
    value: Any = fields.fields.get(field)
    if value is None:
        return None
    if isinstance(value, list):
        if len(value) != 1:
            raise fields.error(field, f"{len(value)} stages of quantization are not served", "served: one")
        value = value[0]
    return fields.sub(value, field)


def _activations(inputs: QuantConfig) -> ActivationScheme:
    dtype, scheme, dynamic = inputs.text("dtype"), inputs.text("qscheme"), inputs.flag("is_dynamic", False)
    symmetric = inputs.flag("symmetric", True)
    if dtype == "fp4" and scheme == "per_group" and inputs.integer("group_size", None) == 32 and dynamic:
        return ActivationScheme("mxfp4", Granularity.groups(32))
    if dtype in ("fp8_e4m3", "int8") and (symmetric or dtype == "int8"):
        if scheme == "per_tensor":
            return ActivationScheme(str(dtype), Granularity.tensor(), dynamic, symmetric)
        if scheme in ("per_channel", "per_token") and dynamic:  # a channel of the inputs' first axis is a token
            return ActivationScheme(str(dtype), Granularity.token(), True, symmetric)
    raise inputs.error("dtype", f"{str(dtype)[:40]!r} {str(scheme)[:40]}, dynamic {dynamic}, is not served", _SERVED)
