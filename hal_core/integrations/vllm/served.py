"""The checkpoint that an engine serves: which of its quantized layers has which name there, and whether every one found its place.

No engine is imported here. Weights are read by our own readers, whole, when a layer is prepared; the engine's loader never sees them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hal_core.errors import FormatError
from hal_core.plan import PlannedOp, plan_checkpoint
from hal_core.spec import EmbeddingSpec, LinearSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hal_core.formats.base import Checkpoint

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
        self.checkpoint, self._dtype, self._rename = checkpoint, dtype, rename
        self._planned = plan_checkpoint(checkpoint, dtype, numerics)
        self.modules = {_renamed(op.module, rename): op for op in self._planned}
        self._taken: set[str] = set()
        self._hidden: set[str] = set()
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
        """The ops of a layer, which thereby have found their place: its own, or those of its parts; empty where nothing is quantized.

        Args:
            prefix: the layer's name.
            parts: names of the modules that the engine fuses in it; those that are not quantized beside others that are become ops too.

        Raises:
            FormatError: a part is missing.
        """
        names = [prefix] if prefix in self.modules else list(parts)
        if not any(name in self.modules for name in names):
            return ()
        self._taken.update(names)
        return tuple(self.modules[name] if name in self.modules else self._plain(prefix, name) for name in names)

    def _plain(self, prefix: str, name: str) -> PlannedOp:
        """An unquantized part, whose parameters the engine's loader must not see: it has no place for them."""
        weight, bias = self._stored(f"{name}.weight"), self._stored(f"{name}.bias")
        entry = self.checkpoint.entries.get(weight)
        if entry is None or len(entry.shape) != 2:
            raise FormatError(f"parameter {weight}", f"missing, or no matrix, and layer {prefix} needs it", "complete the checkpoint")
        members = (("weight", weight), *((("bias", bias),) if bias in self.checkpoint.entries else ()))
        self._hidden.add(weight)
        return PlannedOp(name, LinearSpec(*entry.shape, entry.scheme, dtype=self._dtype, bias=len(members) == 2), members)

    def _stored(self, name: str) -> str:
        """The checkpoint's name of one of the engine's parameters."""
        if self._rename is None or name in self.checkpoint.entries:
            return name
        return next((stored for stored in self.checkpoint.entries if self._rename(stored) == name), name)

    def only_embedding(self) -> str:
        """Engine's name of the quantized embedding, where there is one; else empty."""
        names = [name for name, op in self.modules.items() if isinstance(op.spec, EmbeddingSpec)]
        return names[0] if len(names) == 1 else ""

    def tied_embedding(self) -> str | None:
        """Engine's name of a quantized embedding that is also the output head."""
        tied = (name for name, op in self.modules.items() if getattr(op.spec, "tied_head", False))
        return next(tied, None)

    def below(self, prefix: str) -> str | None:
        """A quantized module at or below ``prefix``, or None."""
        return next((name for name in self.modules if name == prefix or name.startswith(f"{prefix}.")), None)

    def hidden_names(self) -> set[str]:
        """Names of the file's tensors that the engine's loader must not see. The biases of linears are its own."""
        members = ((op, role, name) for op in self._planned for role, name in op.members)
        names = (name for op, role, name in members if role != "bias" or op.spec.op == "moe")
        return self._hidden.union(*map(self.checkpoint.stored_names, names))

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
