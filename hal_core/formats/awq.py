"""AWQ's own files: 4 bits, two layouts, and a list of modules that were left alone."""

from __future__ import annotations

from hal_core.formats.awq_tensors import AWQGemvPacking, AWQPacking
from hal_core.formats.packing import Decision, Packing, Rule
from hal_core.formats.quant_config import QuantConfig, has_components

__all__ = ["AWQRules"]

_VERSIONS: dict[str, Packing] = {"gemm": AWQPacking(), "gemv": AWQGemvPacking()}


class AWQRules:
    """Modules by `modules_to_not_convert`, matched by whole dotted names.

    The writer itself matches substrings, so that its entry ``gate`` would hit ``gate_proj`` too; where only a substring
    matches, the tensors decide.
    """

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        self.version = str(config.text("version", "gemm")).lower()
        if self.version not in _VERSIONS:
            raise config.error("version", f"{self.version!r} is not served", f"served: {', '.join(_VERSIONS)}; convert the checkpoint")
        if config.text("backend", "autoawq") != "autoawq":
            raise config.error("backend", f"{config.fields['backend']!r} is not served", "served: autoawq")
        zero_point = config.flag("zero_point", None)
        symmetric = None if zero_point is None else not zero_point
        self.base = Rule(_VERSIONS[self.version], config.bits((4,)), config.group(), symmetric)
        self._left_alone = config.texts("modules_to_not_convert")

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Names of the tensors of quantized modules."""
        return self.base.packing.suffixes

    def decide(self, module: str) -> Decision:
        if any(has_components(module, name) for name in self._left_alone):
            return Decision(self.base, False, "modules_to_not_convert")
        if any(name in module for name in self._left_alone):
            return Decision(self.base, None, "modules_to_not_convert, by a part of a name")
        return Decision(self.base, True, f"{self.config.where}: bits {self.base.bits}")
