"""ModelOpt: `hf_quant_config.json`, or `quantization_config` with `quant_method: modelopt`; one algorithm, or one a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.formats.element_tensors import ElementPacking
from hal_core.formats.module_names import ModuleList
from hal_core.formats.packing import Decision, Rule
from hal_core.schemes import ActivationScheme, Granularity

if TYPE_CHECKING:
    from hal_core.formats.quant_config import QuantConfig

__all__ = ["METHODS", "PACKING", "ModelOptRules"]

METHODS = ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed")
PACKING = ElementPacking("modelopt", ("weight", "weight_scale", "weight_scale_2", "input_scale"))
_MIXED = "MIXED_PRECISION"
_NV, _MX = Granularity.groups(16), Granularity.groups(32)
_RULES: dict[str, Rule] = {
    "FP8": Rule(PACKING, 8, -1, True, activations=ActivationScheme("fp8_e4m3", Granularity.tensor(), dynamic=False),
                element="fp8_e4m3", by_shape=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Rule(PACKING, 8, -1, True, activations=ActivationScheme("fp8_e4m3", Granularity.token()),
                                      element="fp8_e4m3", by_shape=True),
    "FP8_PB_WO": Rule(PACKING, 8, -1, True, element="fp8_e4m3", block=(128, 128)),
    "NVFP4": Rule(PACKING, 4, 16, True, activations=ActivationScheme("nvfp4", _NV), element="nvfp4"),
    "W4A16_NVFP4": Rule(PACKING, 4, 16, True, element="nvfp4"),
    "MXFP8": Rule(PACKING, 8, 32, True, activations=ActivationScheme("mxfp8", _MX), element="mxfp8"),
}  # fmt: skip


class ModelOptRules:
    """Modules by `exclude_modules` or `ignore`, which may hold wildcards; of mixed precision by `quantized_layers`."""

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        self.suffixes: tuple[str, ...] = PACKING.suffixes
        algorithm = str(config.text("quant_algo")).upper()
        self._layers: dict[str, Rule] | None = None
        if algorithm == _MIXED:
            layers = config.mapping("quantized_layers")
            if not layers:
                raise config.error("quantized_layers", "missing or empty", "fetch hf_quant_config.json again")
            self._layers = {name: self._rule(config.sub(value, f"quantized_layers {name!r}")) for name, value in layers.items()}
            self._base = next(iter(self._layers.values()))
        else:
            self._base = self._rule(config)
        self._left_alone = ModuleList([*config.texts("exclude_modules"), *config.texts("ignore")], config.where)

    def _rule(self, fields: QuantConfig) -> Rule:
        algorithm = str(fields.text("quant_algo")).upper()
        rule = _RULES.get(algorithm)
        if rule is None:
            raise fields.error("quant_algo", f"{algorithm[:40]!r} is not served", f"served: {', '.join((*_RULES, _MIXED))}")
        size = fields.integer("group_size", None)
        if size is not None and rule.group not in (-1, size):
            raise fields.error("group_size", f"{size} with {algorithm}", f"served: {rule.group}")
        if rule.block is not None and size not in (None, rule.block[1]):
            raise fields.error("group_size", f"{size} with {algorithm}", f"served: {rule.block[1]}")
        return rule

    def decide(self, module: str) -> Decision:
        if self._left_alone.holds(module):
            return Decision(self._base, False, "exclude_modules")
        if self._layers is not None:
            rule = self._layers.get(module)
            return Decision(rule or self._base, rule is not None, "quantized_layers", explicit=rule is not None)
        return Decision(self._base, None, f"{self.config.where}: quant_algo {self.config.fields['quant_algo']}")
