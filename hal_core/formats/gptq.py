"""GPTQ's own files: one zero rule a file, and `dynamic` patterns that override or leave out modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hal_core.formats.gptq_tensors import GPTQPacking
from hal_core.formats.packing import Decision, Rule
from hal_core.formats.quant_config import QuantConfig, compile_pattern

if TYPE_CHECKING:
    import re

__all__ = ["GPTQRules"]

_BITS = (2, 3, 4, 8)
#: The stored zero point is minus one in version 1 and as it is in version 2.
_VERSIONS = {"gptq": True, "gptq_v2": False}


class GPTQRules:
    """Modules by the first `dynamic` pattern that matches from the start of the name, else by the file-wide fields."""

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        self.version = self._version()
        for field, wanted in (("pack_dtype", "int32"), ("data_type", "int"), ("method", "gptq")):
            if config.text(field, wanted) != wanted:
                raise config.error(field, f"{config.fields[field]!r} is not served", f"served: {wanted}")
        if config.flag("is_marlin_format", False):
            raise config.error("is_marlin_format", "weights packed for one kernel are not served", "use the checkpoint's plain GPTQ form")
        if config.fields.get("adapter"):
            raise config.error("adapter", "a low-rank adapter beside the weights is not served", "merge or remove it")
        self.base = self._rule(config, None)
        self._inner = self._inner_modules()
        self._patterns = [self._pattern(key, value) for key, value in config.mapping("dynamic").items()]

    def _version(self) -> str:
        names = {name for field in ("checkpoint_format", "format") if (name := self.config.text(field, None)) is not None} or {"gptq"}
        if len(names) > 1:
            raise self.config.error(
                "checkpoint_format", f"{' and '.join(sorted(names))} contradict each other", "keep the one that is right"
            )
        version: str = names.pop()
        if version not in _VERSIONS:
            raise self.config.error("checkpoint_format", f"{version!r} is not served", f"served: {', '.join(_VERSIONS)}")
        return version

    def _rule(self, fields: QuantConfig, base: Rule | None) -> Rule:
        if base is None:
            bits, group = fields.bits(_BITS), fields.group()
            symmetric, act_order = fields.flag("sym", None), fields.flag("desc_act", False)
        else:
            bits, group = fields.bits(_BITS, base.bits), fields.group(base.group)
            symmetric, act_order = fields.flag("sym", base.symmetric), fields.flag("desc_act", base.act_order)
        return Rule(GPTQPacking(), bits, group, symmetric, _VERSIONS[self.version], act_order)

    def _inner_modules(self) -> tuple[str, ...] | None:
        value = self.config.fields.get("modules_in_block_to_quantize")
        if value is None:
            return None
        flat: list[Any] = []
        for item in value if isinstance(value, list) else [value]:
            flat += item if isinstance(item, list) else [item]
        if not all(isinstance(name, str) for name in flat):
            raise self.config.error("modules_in_block_to_quantize", "expected lists of module names")
        return tuple(flat)

    def _pattern(self, key: str, value: Any) -> tuple[re.Pattern[str], str, Rule, bool]:
        sign, _, rest = key.partition(":")
        pattern = compile_pattern(rest if sign in ("+", "-") else key, f"{self.config.where}: dynamic")
        if sign == "-":
            return pattern, key, self.base, False
        return pattern, key, self._rule(self.config.sub(value, f"dynamic {key!r}"), self.base), True

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Names of the tensors of quantized modules."""
        return self.base.packing.suffixes

    def decide(self, module: str) -> Decision:
        for pattern, key, rule, quantized in self._patterns:
            if pattern.match(module):
                # A pattern meant for a router may match the beginning of `gate_proj`: there the tensors decide.
                firm = quantized or (False if pattern.fullmatch(module) else None)
                return Decision(rule, firm, f"dynamic pattern {key}", explicit=quantized)
        if module.rpartition(".")[2] == "lm_head":
            head = self.config.flag("lm_head", None)
            return Decision(self.base, head, f"lm_head is {head}", explicit=True)
        if self._inner is not None:
            listed = any(module.endswith(f".{name}") for name in self._inner)
            return Decision(self.base, listed, "modules_in_block_to_quantize", explicit=listed)
        return Decision(self.base, True, f"{self.config.where}: bits {self.base.bits}")
