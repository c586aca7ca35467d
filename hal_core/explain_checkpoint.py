"""Which kernel would serve each layer of a checkpoint, on this machine or another, whole or sharded; reads headers only."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hal_core.errors import ValueDecodeError
from hal_core.explain import Explanation, explain_from
from hal_core.jsonable import JsonValue, dumps, loads, to_json
from hal_core.refusal import Refusal
from hal_core.sharding import Heads, Shard, shard
from hal_core.spec import EmbeddingSpec, LinearSpec, MoESpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hal_core.formats.base import Checkpoint
    from hal_core.machine import Machine
    from hal_core.plan import PlannedOp
    from hal_core.policy import Policy
    from hal_core.registry import BackendRow, RegisteredKernel
    from hal_core.schemes import WeightScheme
    from hal_core.selection import Selection, Transform
    from hal_core.spec import Spec

__all__ = ["CheckpointExplanation", "LayerGroup", "explain_checkpoint", "layer_pattern", "weight_bytes"]

_VERSION = 1


def layer_pattern(name: str) -> str:
    """A module's name with its indices as ``*``, so that equal layers fall together."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that ask for the same thing. refusals: why they cannot be sharded; then there is no explanation.

    shard: how each is cut. file_bytes: of all of them in the files. rank_bytes: what one rank holds of all of them, values, scales
    and zero points by the scheme, with the chosen kernel's padding; None where nothing serves them.
    """

    layers: tuple[str, ...]
    count: int
    modules: tuple[str, ...]
    explanation: Explanation | None
    shard: str
    file_bytes: int
    rank_bytes: int | None = None
    notes: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    def __post_init__(self) -> None:
        if self.count != len(self.modules) or (self.explanation is None) != bool(self.refusals):
            raise ValueDecodeError(f"group {', '.join(self.layers)}", "count, explanation and refusals contradict each other")

    @property
    def selection(self) -> Selection | None:
        return None if self.explanation is None else self.explanation.selection


@dataclass(frozen=True)
class CheckpointExplanation:
    """machine: its devices, in words. tp: number of ranks of tensor parallelism."""

    checkpoint: str
    format: str
    dtype: str
    numerics: str
    policy: str
    tp: int
    machine: str
    groups: tuple[LayerGroup, ...]
    explanation_version: int = _VERSION

    def __post_init__(self) -> None:
        if self.explanation_version != _VERSION:
            found = f"{self.explanation_version}, this hal-core reads {_VERSION}"
            raise ValueDecodeError("explanation_version", found, "write it again with 'hal explain --json'")

    @property
    def served(self) -> bool:
        """Whether every layer has a kernel."""
        return all(group.selection is not None for group in self.groups)

    @classmethod
    def from_json(cls, text: str) -> CheckpointExplanation:
        """Decode the JSON text that :meth:`dumps` wrote."""
        return loads(cls, text)

    def to_json(self) -> JsonValue:
        """Plain JSON types."""
        return to_json(self)

    def dumps(self, indent: int | None = 2) -> str:
        """JSON text."""
        return dumps(self, indent)


def explain_checkpoint(
    checkpoint: Checkpoint, machine: Machine, policy: Policy, kernels: Sequence[RegisteredKernel], rows: Sequence[BackendRow] = (), *,
    dtype: str | None = None, numerics: str = "checkpoint", tp: int = 1, name: str | None = None,
    recast: Mapping[str, str] | None = None,
) -> CheckpointExplanation:  # fmt: skip
    """Every layer with quantized weights, in groups that ask for the same thing.

    Args:
        checkpoint: an opened checkpoint.
        machine: to decide for.
        policy: which kernels the user wants.
        kernels: all registered kernels.
        rows: all backends.
        dtype: activation dtype word; None for the checkpoint's.
        numerics: a word such as ``exact`` or ``checkpoint``.
        tp: ranks of tensor parallelism.
        name: what to call the checkpoint; None for its path.
        recast: as for ``hal_core.load``.
    """
    from hal_core.formats.recasting import recast_checkpoint
    from hal_core.plan import checkpoint_dtype, plan_checkpoint

    checkpoint = recast_checkpoint(checkpoint, recast)
    heads, word = Heads.of_config(checkpoint.config), checkpoint_dtype(checkpoint, dtype)
    grouped: dict[tuple[Spec, Shard | Refusal, tuple[Transform, ...]], list[PlannedOp]] = {}
    for planned in plan_checkpoint(checkpoint, word, numerics):
        cut = shard(planned.module, planned.spec, tp, heads)
        if isinstance(cut, Refusal):  # one row for equal layers: the name stands with the group
            cut = Refusal(cut.code, cut.asked.replace(planned.module, layer_pattern(planned.module)), cut.found, cut.fix)
        grouped.setdefault((planned.spec, cut, planned.transforms), []).append(planned)
    groups = tuple(_group(checkpoint, cut, members, (machine, policy, kernels, rows)) for (_, cut, _), members in grouped.items())
    devices = "; ".join(map(str, machine.devices))
    shown = name if name is not None else str(checkpoint.path)
    return CheckpointExplanation(shown, checkpoint.format, word, numerics, str(policy), tp, devices, groups)


def _group(
    checkpoint: Checkpoint, cut: Shard | Refusal, members: Sequence[PlannedOp],
    world: tuple[Machine, Policy, Sequence[RegisteredKernel], Sequence[BackendRow]],
) -> LayerGroup:  # fmt: skip
    modules = tuple(planned.module for planned in members)
    stored = {name for planned in members for _, name in planned.members}
    size = sum(checkpoint.entries[name].nbytes for name in stored)
    layers = tuple(dict.fromkeys(map(layer_pattern, modules)))
    if isinstance(cut, Refusal):
        return LayerGroup(layers, len(modules), modules, None, "refused", size, refusals=(cut,))
    explanation = explain_from(cut.spec, *world)
    if explanation.selection is not None:
        explanation = replace(explanation, selection=members[0].served_by(explanation.selection))
    rank = None if explanation.selection is None else len(modules) * weight_bytes(explanation.selection)
    notes = (*cut.notes, *dict.fromkeys(note for planned in members for note in planned.notes))
    return LayerGroup(layers, len(modules), modules, explanation, cut.rule, size, rank, notes)


def weight_bytes(selection: Selection) -> int:
    """Bytes of one op's weights by their schemes, in the padded sizes of the chosen kernel; scales and minimums count two bytes each."""
    spec, padded = selection.spec, {padding.dim: padding.padded for padding in selection.padding}
    if isinstance(spec, LinearSpec):
        return _matrix_bytes(spec.weights, padded.get("n", spec.n), padded.get("k", spec.k))
    if isinstance(spec, EmbeddingSpec):
        return _matrix_bytes(spec.weights, padded.get("rows", spec.rows), padded.get("dim", spec.dim))
    if isinstance(spec, MoESpec):
        inner, hidden = padded.get("intermediate", spec.intermediate), padded.get("hidden", spec.hidden)
        inward = sum(_matrix_bytes(scheme, inner, hidden) for scheme in (spec.gate, spec.up) if scheme is not None)
        return spec.local * (inward + _matrix_bytes(spec.down, hidden, inner))
    return 0


def _matrix_bytes(scheme: WeightScheme, n: int, k: int) -> int:
    values = n * -(-k * scheme.bits // 8)
    if not scheme.quantized:
        return values
    g = scheme.granularity
    if g.block is not None:
        scales = -(-n // g.block[0]) * -(-k // g.block[1])
    else:
        scales = n * (1 if g.group is None else -(-k // g.group)) if g.kind.value != "tensor" else 1
    each = 2 + {"none": 0, "integer": 1, "minimum": 2}[scheme.zero.value]
    if g.superblock is None:
        return values + scales * each
    # Integer factors of one byte for each group, floats for each superblock.
    return values + scales * (each // 2) + n * -(-k // g.superblock) * each
