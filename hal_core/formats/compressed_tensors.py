"""compressed-tensors: groups of targets, each with its own weights; `ignore` wins over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.formats.ct_tensors import CTPackedPacking
from hal_core.formats.packing import Decision, Rule
from hal_core.formats.quant_config import QuantConfig, compile_pattern
from hal_core.schemes import ActivationScheme, Granularity

if TYPE_CHECKING:
    import re

__all__ = ["CompressedTensorsRules"]

_BITS = (2, 3, 4, 8)
_REGEX = "re:"
#: Activation order: the first two only order the work of quantizing, the others are stored as an index.
_PLAIN_ORDERS = (None, False, "weight", "static")
_GROUP_ORDERS = (True, "group", "dynamic")


@dataclass(frozen=True)
class _Target:
    """One name, pattern (``re:`` in the file) or class name of a module, and the rule of its group."""

    text: str
    pattern: re.Pattern[str] | None
    rule: Rule

    @property
    def is_class(self) -> bool:
        """Module names are dotted or lower case; class names are neither."""
        return self.pattern is None and "." not in self.text and self.text[:1].isupper()


class CompressedTensorsRules:
    """Modules by exact name, then the first matching pattern in alphabetical order, then class: the writer's own order."""

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        _refuse_extras(config)
        self.format: str = config.text("format", "pack-quantized")
        groups = config.mapping("config_groups")
        if not groups:
            raise config.error("config_groups", "missing or empty", "the config is incomplete: fetch it again")
        self._targets: list[_Target] = []
        for name, value in groups.items():
            group = config.sub(value, f"config_groups {name!r}")
            rule = self._rule(group)
            self._targets += [_Target(text, self._compiled(text), rule) for text in group.texts("targets")]
        if not self._targets:
            raise config.error("config_groups", "no group has a target", "the config is incomplete: fetch it again")
        self._targets.sort(key=lambda target: (target.pattern is not None, target.text))
        self._ignore = [(text, self._compiled(text)) for text in config.texts("ignore")]

    def _compiled(self, text: str) -> re.Pattern[str] | None:
        return compile_pattern(text[len(_REGEX) :], self.config.where) if text.startswith(_REGEX) else None

    def _rule(self, group: QuantConfig) -> Rule:
        form = group.text("format", None) or self.format
        if form != "pack-quantized":
            raise group.error("format", f"{form!r} is not served yet", "served: pack-quantized (weight-only integers)")
        if group.fields.get("output_activations") is not None:
            raise group.error("output_activations", "quantized outputs are not served")
        weights = group.sub(group.fields.get("weights"), "weights")
        if weights.text("type", "int") != "int" or weights.fields.get("dynamic") not in (None, False):
            raise weights.error("type", f"{weights.fields.get('type')!r} is not served for pack-quantized", "served: int, not dynamic")
        size, per_tensor = _group_size(weights)
        order = weights.fields.get("actorder")
        if order not in _PLAIN_ORDERS and order not in _GROUP_ORDERS:
            raise weights.error("actorder", f"{str(order)[:80]!r} is not known", "known: weight, static, group, dynamic")
        return Rule(
            CTPackedPacking(), weights.bits(_BITS, field="num_bits"), size, weights.flag("symmetric", True),
            act_order=order in _GROUP_ORDERS, activations=_activations(group), per_tensor=per_tensor,
        )  # fmt: skip

    def decide(self, module: str) -> Decision:
        found = self._target(module)
        rule = (found or self._targets[0]).rule
        for text, pattern in self._ignore:
            if text == module or (pattern is not None and pattern.fullmatch(module)):
                return Decision(rule, False, f"ignore {text}")
            if pattern is not None and pattern.match(module):
                # Patterns match from the start, so one for `mlp.gate` also hits `mlp.gate_proj`: there the tensors decide.
                return Decision(rule, None, f"ignore {text}, by the beginning of the name")
        if found is None:
            return Decision(rule, False, "no target matches")
        if found.is_class and found.text != "Linear":
            return Decision(rule, None, f"target {found.text}")  # which modules are of that class is not in the file
        return Decision(rule, True, f"target {found.text}", explicit=not found.is_class)

    def _target(self, module: str) -> _Target | None:
        for target in self._targets:
            if target.text == module or (target.pattern is not None and target.pattern.match(module)):
                return target
        classes = [target for target in self._targets if target.is_class]
        return next((target for target in classes if target.text == "Linear"), classes[0] if classes else None)


def _refuse_extras(config: QuantConfig) -> None:
    """Parts of the configuration that change what the stored numbers mean."""
    sparsity = config.mapping("sparsity_config")
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise config.error("sparsity_config", f"format {str(sparsity.get('format'))[:80]!r} is not served", "served: dense")
    if config.mapping("transform_config"):
        raise config.error("transform_config", "online transforms are not served", "use a checkpoint without them")


def _group_size(weights: QuantConfig) -> tuple[int, bool]:
    """Group size (-1 for a row) and whether one scale serves the whole matrix."""
    strategy = weights.text("strategy", None)
    size = weights.integer("group_size", None)
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "group":
        return weights.group(), False
    if strategy in ("channel", "tensor"):
        return -1, strategy == "tensor"
    raise weights.error("strategy", f"{strategy!r} is not served for pack-quantized", "served: tensor, channel, group")


def _activations(group: QuantConfig) -> ActivationScheme | None:
    """What the checkpoint says of activations."""
    fields = group.fields.get("input_activations")
    if fields is None:
        return None
    inputs = group.sub(fields, "input_activations")
    kind, bits = inputs.text("type", "int"), inputs.integer("num_bits", 8)
    dtype = {("int", 8): "int8", ("float", 8): "fp8_e4m3"}.get((kind, bits))
    strategy = inputs.text("strategy", "token")
    if dtype is None or strategy not in ("token", "group") or inputs.fields.get("dynamic") is not True:
        raise inputs.error("strategy", f"{kind}{bits} {strategy}, dynamic {str(inputs.fields.get('dynamic'))[:20]}, is not served here",
                           "served: 8-bit dynamic by token or group")  # fmt: skip
    granularity = Granularity.token() if strategy == "token" else Granularity.groups(inputs.group())
    return ActivationScheme(dtype, granularity, dynamic=True, symmetric=inputs.flag("symmetric", True))
