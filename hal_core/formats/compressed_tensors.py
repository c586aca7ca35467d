"""compressed-tensors: groups of targets, each with its own weights; `ignore` wins over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.formats.ct_activations import input_activations
from hal_core.formats.ct_tensors import CTPackedPacking
from hal_core.formats.element_tensors import ElementPacking
from hal_core.formats.fp8 import weight_block
from hal_core.formats.module_names import fused_names
from hal_core.formats.packing import Decision, Rule
from hal_core.formats.quant_config import QuantConfig, compile_pattern

if TYPE_CHECKING:
    import re

__all__ = ["ELEMENTS", "CompressedTensorsRules"]

_BITS = (2, 3, 4, 8)
_REGEX = "re:"
#: Activation order: the first two only order the work of quantizing, the others are stored as an index.
_PLAIN_ORDERS = (None, False, "weight", "static")
_GROUP_ORDERS = (True, "group", "dynamic")
_MIXED = "mixed-precision"
_PLAIN, _FOUR = ("weight", "weight_scale"), ("weight_packed", "weight_scale")
_INPUTS = ("input_scale", "input_zero_point")
#: Formats that store elements of their own type: element, bits, the tensors' names.
ELEMENTS: dict[str, tuple[str, int, ElementPacking]] = {
    name: (element, bits, ElementPacking(f"compressed-tensors:{name}", suffixes))
    for name, element, bits, suffixes in (
        ("int-quantized", "int8", 8, (*_PLAIN, "weight_zero_point", *_INPUTS)),
        ("float-quantized", "fp8_e4m3", 8, (*_PLAIN, *_INPUTS)),
        ("mxfp8-quantized", "mxfp8", 8, _PLAIN),
        ("mxfp4-pack-quantized", "mxfp4", 4, _FOUR),
        ("nvfp4-pack-quantized", "nvfp4", 4, (*_FOUR, "weight_global_scale", "input_global_scale")),
    )
}  # fmt: skip
#: The one group size of an element type.
_GROUPS = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}


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

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Names of tensors that any of the groups writes."""
        return tuple(dict.fromkeys(suffix for target in self._targets for suffix in target.rule.packing.suffixes))

    def _rule(self, group: QuantConfig) -> Rule:
        weights = group.sub(group.fields.get("weights"), "weights")
        form = group.text("format", None) or self.format
        if form == _MIXED:  # a group that does not say has the form that its weights imply
            form = _implied(weights)
        if form == "naive-quantized":
            form = "int-quantized" if weights.text("type", "int") == "int" else "float-quantized"
        if form != "pack-quantized" and form not in ELEMENTS:
            raise group.error("format", f"{str(form)[:80]!r} is not served", f"served: pack-quantized, {', '.join(ELEMENTS)}")
        if group.fields.get("output_activations") is not None:
            raise group.error("output_activations", "quantized outputs are not served")
        if form != "pack-quantized":
            return _element_rule(form, weights, group)
        return _packed_rule(weights, group)

    def decide(self, module: str) -> Decision:
        found = self._target(module)
        rule = (found or self._targets[0]).rule
        for text, pattern in self._ignore:
            names = fused_names(module, text)
            if text in names or (pattern is not None and any(map(pattern.fullmatch, names))):
                return Decision(rule, False, f"ignore {text}")
            if pattern is not None and any(map(pattern.match, names)):
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
        for target in self._targets:
            for fused in fused_names(module, target.text)[1:]:
                if target.text == fused or (target.pattern is not None and target.pattern.match(fused)):
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


def _implied(weights: QuantConfig) -> str:
    """The form in which weights of a kind are stored, as the writer infers it."""
    kind, bits, size = weights.text("type", "int"), weights.integer("num_bits"), weights.integer("group_size", None)
    if kind == "float" and bits == 4:
        return "mxfp4-pack-quantized" if size == 32 else "nvfp4-pack-quantized"
    if kind == "float":
        return "mxfp8-quantized" if size == 32 and weights.text("scale_dtype", None) == "torch.uint8" else "float-quantized"
    raise weights.error("num_bits", f"mixed-precision, and the group has no format for {kind} of {bits} bits", "add the group's format")


def _packed_rule(weights: QuantConfig, group: QuantConfig) -> Rule:
    if weights.text("type", "int") != "int" or weights.fields.get("dynamic") not in (None, False):
        raise weights.error("type", f"{weights.fields.get('type')!r} is not served for pack-quantized", "served: int, not dynamic")
    size, per_tensor = _group_size(weights)
    order = weights.fields.get("actorder")
    if order not in _PLAIN_ORDERS and order not in _GROUP_ORDERS:
        raise weights.error("actorder", f"{str(order)[:80]!r} is not known", "known: weight, static, group, dynamic")
    activations = input_activations(group)
    if activations is not None and not activations.dynamic:
        raise group.error("input_activations", "static scales beside packed integers are not served", "served: dynamic")
    return Rule(
        CTPackedPacking(), weights.bits(_BITS, field="num_bits"), size, weights.flag("symmetric", True),
        act_order=order in _GROUP_ORDERS, activations=activations, per_tensor=per_tensor,
    )  # fmt: skip


def _element_rule(form: str, weights: QuantConfig, group: QuantConfig) -> Rule:
    element, bits, packing = ELEMENTS[form]
    kind = "int" if element == "int8" else "float"
    if weights.text("type", "int") != kind or weights.fields.get("dynamic") not in (None, False):
        raise weights.error("type", f"{weights.fields.get('type')!r} is not served for {form}", f"served: {kind}, not dynamic")
    if weights.fields.get("actorder") not in _PLAIN_ORDERS:
        raise weights.error("actorder", f"{str(weights.fields['actorder'])[:80]!r} is not served for {form}", "served: weight, static")
    symmetric = weights.flag("symmetric", True)
    if not symmetric and kind == "float":
        raise weights.error("symmetric", f"false is not served for {form}", "float elements have no zero point")
    block = weight_block(weights, "block_structure") if weights.text("strategy", None) == "block" else None
    if weights.text("strategy", None) == "block" and block is None:
        raise weights.error("block_structure", "missing", "e.g. [128, 128]")
    size, per_tensor = (-1, False) if block else _group_size(weights)
    if size != _GROUPS.get(element, size):
        raise weights.error("group_size", f"{size} is not served for {form}", f"served: {_GROUPS[element]}")
    activations = input_activations(group)
    if activations is not None and not activations.dynamic and _INPUTS[0] not in packing.suffixes:
        raise group.error("input_activations", f"static scales are not served for {form}", "served: dynamic")
    return Rule(
        packing, weights.bits((bits,), field="num_bits"), size, symmetric, activations=activations, per_tensor=per_tensor, element=element,
        block=block,
    )  # fmt: skip


def _group_size(weights: QuantConfig) -> tuple[int, bool]:
    """Group size (-1 for a row) and whether one scale serves the whole matrix."""
    strategy = weights.text("strategy", None)
    size = weights.integer("group_size", None)
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy in ("group", "tensor_group"):
        return weights.group(), False
    if strategy in ("channel", "tensor"):
        return -1, strategy == "tensor"
    raise weights.error("strategy", f"{strategy!r} is not served", "served: tensor, channel, group, block")
