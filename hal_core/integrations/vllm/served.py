"""The checkpoint that an engine serves: which of its quantized layers has which name there, and whether every one found its place.

No engine is imported here. Weights are read by our own readers, whole, when a layer is prepared; the engine's loader never sees them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hal_core.errors import FormatError
from hal_core.plan import plan_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hal_core.formats.base import Checkpoint
    from hal_core.plan import PlannedOp

__all__ = ["ServedCheckpoint"]

_LAYER = re.compile(r"(.*\blayers\.(\d+))\.")


class ServedCheckpoint:
    """Planned ops by the engine's module names, and a count of those that its layers took.

    Args:
        checkpoint: an opened checkpoint.
        dtype: the model's dtype word.
        numerics: a word of :func:`hal_core.numerics.numerics_from_word`.
        rename: a parameter's name in the engine, where that differs; None where the engine has no place for it.

    Raises:
        FormatError: experts that are incomplete or differ; parameters of a block of experts that the plan has no place for.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, numerics: str, rename: Callable[[str], str | None] | None = None) -> None:
        self.checkpoint = checkpoint
        self._planned = plan_checkpoint(checkpoint, dtype, numerics)
        self.modules = {_renamed(op.module, rename): op for op in self._planned}
        self._taken: set[str] = set()
        self._check_experts()

    def _check_experts(self) -> None:
        members = {name for op in self._planned for _, name in op.members}
        blocks = tuple(f"{op.module}." for op in self._planned if op.spec.op == "moe")
        stray = (
            next((name for name in self.checkpoint.entries if name.startswith(blocks) and name not in members), None) if blocks else None
        )
        if stray is not None:
            raise FormatError(f"parameter {stray}", "of quantized experts, which have no place for it", "store experts in a published form")

    def take(self, prefix: str, parts: Sequence[str] = ()) -> tuple[PlannedOp, ...]:
        """The ops of a layer, which thereby have found their place: its own, or those of its parts; empty where it is not quantized.

        Args:
            prefix: the layer's name.
            parts: names of the modules that the engine fuses in it.

        Raises:
            FormatError: only some of its parts are quantized.
        """
        names = [prefix] if prefix in self.modules else list(parts)
        found = [name for name in names if name in self.modules]
        if found and len(found) < len(names):
            missing = next(name for name in names if name not in self.modules)
            raise FormatError(
                f"layer {prefix}", f"{found[0]} is quantized and {missing} is not, while the engine computes them as one",
                "quantize its parts alike",
            )  # fmt: skip
        self._taken.update(found)
        return tuple(self.modules[name] for name in found)

    def tied_embedding(self) -> str | None:
        """Engine's name of a quantized embedding that is also the output head."""
        tied = (name for name, op in self.modules.items() if getattr(op.spec, "tied_head", False))
        return next(tied, None)

    def below(self, prefix: str) -> str | None:
        """A quantized module at or below ``prefix``, or None."""
        return next((name for name in self.modules if name == prefix or name.startswith(f"{prefix}.")), None)

    def hidden_names(self) -> frozenset[str]:
        """Names of the file's tensors that the engine's loader must not see. The biases of linears are its own."""
        members = ((op, role, name) for op in self._planned for role, name in op.members)
        names = (name for op, role, name in members if role != "bias" or op.spec.op == "moe")
        return frozenset(stored for name in names for stored in self.checkpoint.stored_names(name))

    def check_all_taken(self, *, whole_model: bool) -> None:
        """Raise unless every quantized layer found its place; called once all layers exist.

        Args:
            whole_model: whether this process holds all layers; else those of layers that it does not hold at all are passed over.

        Raises:
            FormatError: names the parameter that the model has no place for.
        """
        count = self.checkpoint.config.get("num_hidden_layers")
        held = {match[1] for match in map(_LAYER.match, self._taken) if match}
        for name, op in self.modules.items():
            match = _LAYER.match(name)
            extra = match is not None and type(count) is int and int(match[2]) >= count  # a drafting head, served by another model
            elsewhere = not whole_model and (match is None or match[1] not in held)
            if name not in self._taken and not extra and not elsewhere:
                found = "quantized, and the engine's model has no quantized layer of this name"
                raise FormatError(f"parameter {op.members[0][1]}", found, "check model_type and architectures in config.json")


def _renamed(module: str, rename: Callable[[str], str | None] | None) -> str:
    if rename is None:
        return module
    name = rename(f"{module}.weight")
    return module if name is None else name.removesuffix(".weight")


def fused_parts(prefix: str, packed: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Names of the modules that the engine fuses in a layer, itself where it fuses none."""
    head, _, leaf = prefix.rpartition(".")
    return tuple(f"{head}.{part}" if head else part for part in packed.get(leaf, (leaf,)))
