"""Modules that the file stores fused (``qkv_proj``, ``gate_up_proj``): one tensor, so their parts must have one scheme.

A configuration may speak of the parts, and its patterns for one of them may fit the fused name by accident (``.*v_proj`` does).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.errors import FormatError
from hal_core.formats.module_names import part_names

if TYPE_CHECKING:
    from hal_core.formats.packing import Decision, Rules

__all__ = ["check_parts"]

#: More than any group, so that none is cut to the width of a matrix.
_INPUTS = 2**40


def check_parts(module: str, decision: Decision, rules: Rules) -> None:
    """Refuse a fused module whose parts the configuration gives different schemes.

    A configuration that names the fused module itself has decided.

    Raises:
        FormatError: names the module, two parts and both of their schemes.
    """
    if module.rpartition(".")[2] in decision.reason:  # the name or pattern that decided speaks of the fused module
        return
    found = [(part, rules.decide(part)) for part in part_names(module)]
    for part, other in found[1:]:
        first, one = found[0]
        if _key(one) != _key(other):
            raise FormatError(
                f"module {module}", f"one tensor, but by the config {first} is {_told(one)} and {part} is {_told(other)}",
                "give its parts one scheme, or name the fused module in the config",
            )  # fmt: skip


def _key(decision: Decision) -> tuple[object, ...]:
    """What must be alike; where the tensors are to tell whether a module is quantized, they have told."""
    rule = decision.rule
    if decision.quantized is False:
        return (False,)
    return True, rule.scheme(_INPUTS), rule.packing.name, rule.zero_minus_one, rule.activations


def _told(decision: Decision) -> str:
    if decision.quantized is False:
        return f"not quantized ({decision.reason})"
    rule = decision.rule
    activations = "" if rule.activations is None else f" with inputs {rule.activations}"
    return f"{rule.scheme(_INPUTS)}{activations} ({decision.reason})"
