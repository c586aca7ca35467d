"""FP8 as DeepSeek and others publish it: `quant_method: fp8`, scales by block, by row or for the whole matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.formats.element_tensors import ElementPacking
from hal_core.formats.module_names import ModuleList
from hal_core.formats.packing import Decision, Rule
from hal_core.formats.quant_config import QuantConfig
from hal_core.schemes import ActivationScheme, Granularity

if TYPE_CHECKING:
    from hal_core.formats.packing import Packing

__all__ = ["FP8Rules", "fp8_element", "fp8_packing", "weight_block"]

_SUFFIXES = ("weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
#: Fields of few words, and those that are served.
_WORDS = {"scale_fmt": ("ue8m0", "float32"), "expert_dtype": ("fp8",), "activation_scheme": ("dynamic", "static")}


def fp8_packing(name: str) -> Packing:
    """The tensors of FP8 checkpoints, under a format's name."""
    return ElementPacking(name, _SUFFIXES)


def fp8_element(config: QuantConfig) -> str:
    """Element type by the field ``fmt``."""
    fmt = config.text("fmt", "e4m3")
    names = {"e4m3": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "e5m2": "fp8_e5m2"}
    if fmt not in names:
        raise config.error("fmt", f"{str(fmt)[:40]!r} is not served", f"served: {', '.join(names)}")
    return names[fmt]


def weight_block(config: QuantConfig, field: str = "weight_block_size") -> tuple[int, int] | None:
    """Rows and columns that share a scale, or None."""
    value = config.fields.get(field)
    if value is None:
        return None
    good = isinstance(value, list) and len(value) == 2 and all(type(size) is int and 0 < size < 2**31 for size in value)
    if not good:
        raise config.error(field, f"{str(value)[:80]} is not two positive integers", "e.g. [128, 128]")
    return value[0], value[1]


class FP8Rules:
    """Modules by `modules_to_not_convert` or `ignored_layers`, matched by whole dotted names; tensors decide the rest.

    transformers' own writer leaves a matrix that it cannot cut into whole blocks unquantized and does not list it, so a
    plain weight is no contradiction here.
    """

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        for field, served in _WORDS.items():
            value = config.text(field, None)
            if value is not None and value not in served:
                raise config.error(field, f"{value[:40]!r} is not served", f"served: {', '.join(served)}")
        block = weight_block(config)
        self.base = Rule(
            fp8_packing("fp8"), 8, -1, True, activations=self._activations(block), element=fp8_element(config), block=block,
            by_shape=block is None,
        )  # fmt: skip
        self._left_alone = ModuleList([*config.texts("modules_to_not_convert"), *config.texts("ignored_layers")], config.where)

    def _activations(self, block: tuple[int, int] | None) -> ActivationScheme:
        if self.config.text("activation_scheme", "dynamic") == "static":
            return ActivationScheme("fp8_e4m3", Granularity.tensor(), dynamic=False)
        return ActivationScheme("fp8_e4m3", Granularity.token() if block is None else Granularity.groups(block[1]))

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Names of the tensors of quantized modules."""
        return self.base.packing.suffixes

    def decide(self, module: str) -> Decision:
        if self._left_alone.holds(module):
            return Decision(self.base, False, "modules_to_not_convert")
        return Decision(self.base, None, f"{self.config.where}: quant_method fp8")
