"""AutoRound: the exporter picks the packing by itself, and `extra_config` overrides single modules."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hal_core.formats.autoround_floats import FLOAT_PACKINGS, element_rule
from hal_core.formats.awq_tensors import AWQPacking
from hal_core.formats.gptq_tensors import GPTQPacking
from hal_core.formats.packing import Decision, Rule
from hal_core.formats.quant_config import QuantConfig, compile_pattern

if TYPE_CHECKING:
    from hal_core.formats.packing import Packing

__all__ = ["AutoRoundRules"]

_BITS = (2, 3, 4, 8)
#: A key without any of a pattern's special characters but the dot, which every module name has.
_PLAIN_NAME = re.compile(r"[\w.\-]+")
#: packing_format: the layout, its bits, and whether the stored zero point is minus one. Only auto_gptq's is.
_PACKINGS: dict[str, tuple[Packing, tuple[int, ...], bool]] = {
    "auto_round": (GPTQPacking(), _BITS, False),
    "auto_round:gptqmodel": (GPTQPacking(), _BITS, False),
    "auto_round:auto_gptq": (GPTQPacking(), _BITS, True),
    "auto_round:auto_awq": (AWQPacking(), (4,), False),
}


class AutoRoundRules:
    """Modules by `extra_config` (exact names, then the first matching pattern), else by the file-wide fields."""

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        self.packing_format = self._packing_format()
        if config.fields.get("rotation_config"):
            raise config.error("rotation_config", "rotated weights are not served", "export the model without a rotation")
        self.packing, self._bits, self._minus_one = _PACKINGS.get(self.packing_format, (GPTQPacking(), _BITS, False))
        if self.packing_format in _PACKINGS and config.integer("act_bits", 16) < 16:
            raise config.error("act_bits", f"{config.fields['act_bits']} is not served for packing {self.packing_format}", "served: 16")
        self.base = self._rule(config)
        self._blocks = self._block_names()
        self._named: dict[str, tuple[Rule, bool]] = {}
        self._patterns: list[tuple[re.Pattern[str], str, Rule, bool]] = []
        for key, value in config.mapping("extra_config").items():
            rule, quantized = self._override(config.sub(value, f"extra_config {key!r}"))
            if _PLAIN_NAME.fullmatch(key):
                self._named[key] = (rule, quantized)
            else:
                self._patterns.append((compile_pattern(key, config.where), key, rule, quantized))

    def _packing_format(self) -> str:
        """Older files name a backend instead; those that are also packings mean the same."""
        name: str = self.config.text("packing_format", None) or self.config.text("backend", "auto_round")
        if name not in _PACKINGS and name not in FLOAT_PACKINGS:
            served = ", ".join((*_PACKINGS, *FLOAT_PACKINGS))
            raise self.config.error("packing_format", f"{name!r} is not served", f"served: {served}; export the model again in one of them")
        return name

    def _block_names(self) -> tuple[str, ...]:
        for field in ("block_name_to_quantize", "to_quant_block_names"):
            value = self.config.fields.get(field)
            if value is None:
                continue
            flat: list[Any] = []
            for item in value if isinstance(value, list) else [value]:
                flat += item if isinstance(item, list) else [item]
            if not all(isinstance(part, str) for part in flat):
                raise self.config.error(field, "expected names of blocks")
            return tuple(name for part in flat for piece in part.split(",") if (name := piece.strip().strip(".")))
        return ()

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Names of the tensors of quantized modules."""
        return self.base.packing.suffixes

    def _rule(self, fields: QuantConfig) -> Rule:
        if self.packing_format in FLOAT_PACKINGS:
            return element_rule(fields, self.config, FLOAT_PACKINGS[self.packing_format])
        base = self.base if fields is not self.config else None
        kind = fields.text("data_type", "int")
        if kind != "int":
            raise fields.error("data_type", f"{kind!r} is not served for packing {self.packing_format}", "served: int")
        bits = fields.bits(self._bits, *(() if base is None else (base.bits,)))
        group = fields.group(*(() if base is None else (base.group,)))
        symmetric = fields.flag("sym", None if base is None else base.symmetric)
        return Rule(self.packing, bits, group, symmetric, self._minus_one)

    def _override(self, fields: QuantConfig) -> tuple[Rule, bool]:
        bits: Any = fields.integer("bits", self.base.bits)
        if bits >= 16:
            return self.base, False
        return self._rule(fields), True

    def decide(self, module: str) -> Decision:
        key = next((part for part in _parts(module) if part in self._named), None)
        if key is not None:
            rule, quantized = self._named[key]
            # The exporter may list a head as quantized and still store its plain weight: there the tensors decide.
            firm = None if quantized and module.rpartition(".")[2] == "lm_head" else quantized
            return Decision(rule, firm, f"extra_config names {key}", explicit=key == module)
        for pattern, key, rule, quantized in self._patterns:
            if pattern.search(module):
                firm = None if not quantized and _router_pattern(key, module) else quantized
                return Decision(rule, firm, f"extra_config pattern {key}")
        if self._blocks and not any(f"{module}.".startswith(f"{block}.") for block in self._blocks):
            return Decision(self.base, None, "block_name_to_quantize")
        return Decision(self.base, True, f"{self.config.where}: bits {self.base.bits}")


def _parts(module: str) -> list[str]:
    """The name itself, then every run of its dotted components, the longest first: a block's name covers what is below it.

    Looked up in a table, because the exporter lists every expert by name: thousands of patterns would be tried on each.
    """
    words = module.split(".")
    if len(words) > 32:
        return [module]  # no real name is so deep, and the runs grow with the square
    return [".".join(words[start : start + size]) for size in range(len(words), 0, -1) for start in range(len(words) - size + 1)]


def _router_pattern(key: str, module: str) -> bool:
    """A pattern meant for the router, ``mlp.gate`` and anything after, also matches ``mlp.gate_proj``: there the tensors decide."""
    return module.endswith("gate_proj") and re.search(r"gate(\.\*|\$)?$", key) is not None
