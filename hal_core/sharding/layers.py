"""A rank's ops: planned layers of a checkpoint read whole, cut for the rank, and described as the rank's kernels must serve them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hal_core.canonical import QuantizedTensor, stack
from hal_core.errors import FormatError, ShapeError
from hal_core.fused_experts import fused_weights
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.numerics import numerics_from_word
from hal_core.sharding.cuts import Cut, cut_weight, join_rows
from hal_core.spec import EmbeddingSpec, LinearSpec, MoESpec
from hal_core.widen import widen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hal_core.formats.base import Checkpoint
    from hal_core.plan import PlannedOp

__all__ = ["ExpertsShare", "RowsPart", "linear_spec", "rank_embedding", "rank_experts", "rank_linears"]


@dataclass(frozen=True)
class RowsPart:
    """Rows of a planned linear that are part of a rank's layer; several make up a fused one (q, k and v)."""

    planned: PlannedOp
    rows: Cut


@dataclass(frozen=True)
class ExpertsShare:
    """What of a block a rank holds: global ids in the order of its local ones, and a part of the intermediate size.

    adds_bias: whether this rank adds the bias of down, which the sum over ranks must hold once.
    """

    experts: tuple[int, ...]
    inner: Cut
    adds_bias: bool = True


def rank_linears(
    checkpoint: Checkpoint, parts: Sequence[RowsPart], columns: Cut, numerics: str, bias: Tensor | None
) -> list[tuple[LinearSpec, LinearWeights]]:
    """The ops whose outputs, side by side, are the layer's: one where the parts can be joined, else one for each.

    Args:
        checkpoint: where the parts are read.
        parts: in the order of the layer's outputs; their specs give dtype and activation scheme.
        columns: of K, the same for all parts.
        numerics: a word of :func:`hal_core.numerics.numerics_from_word`.
        bias: of the whole layer on this rank, or None.

    Raises:
        FormatError: a tensor that cannot be read. ShapeError: a cut that cannot be served; names the layer and the legal degrees.
    """
    weights = [_read(checkpoint, part.planned.module, part.planned.names("weight")[0], part.rows, columns) for part in parts]
    activations = {linear_spec(part.planned).activations for part in parts}
    joined = join_rows(weights) if len(activations) == 1 else None
    specs, out, start = [linear_spec(part.planned) for part in parts], [], 0
    for spec, weight in zip(specs, weights, strict=True) if joined is None else [(specs[0], joined)]:
        n, k = weight.shape
        request = numerics_from_word(numerics, spec.activations, weight.scheme.granularity.group)
        own = None if bias is None else bias[start : start + n].clone()
        rank_spec = replace(spec, n=n, k=k, weights=weight.scheme, numerics=request, bias=own is not None)
        out.append((rank_spec, LinearWeights(weight, own)))
        start += n
    return out


def linear_spec(planned: PlannedOp) -> LinearSpec:
    """The spec of a planned linear.

    Raises:
        ShapeError: it is none.
    """
    if not isinstance(planned.spec, LinearSpec):
        raise ShapeError(f"layer {planned.module}", f"a linear in the engine, {planned.spec.op} in the checkpoint", "check the model type")
    return planned.spec


def _read(checkpoint: Checkpoint, where: str, name: str, rows: Cut, columns: Cut) -> QuantizedTensor:
    entry = checkpoint.entries[name]
    whole = checkpoint.read(name) if entry.quantized else QuantizedTensor(entry.scheme, entry.shape, checkpoint.load(name))
    return cut_weight(where, whole, rows, columns)


def rank_embedding(checkpoint: Checkpoint, planned: PlannedOp, rows: Cut, numerics: str) -> tuple[EmbeddingSpec, LinearWeights]:
    """The rows of a table that a rank holds.

    Raises:
        FormatError, ShapeError: as :func:`rank_linears`.
    """
    if not isinstance(planned.spec, EmbeddingSpec):
        raise ShapeError(
            f"layer {planned.module}", f"an embedding in the engine, {planned.spec.op} in the checkpoint", "check the model type"
        )
    weight = _read(checkpoint, planned.module, planned.names("weight")[0], rows, Cut.all_of(planned.spec.dim))
    request = numerics_from_word(numerics, None, weight.scheme.granularity.group)
    return replace(planned.spec, rows=rows.size, weights=weight.scheme, numerics=request), LinearWeights(weight)


def rank_experts(
    checkpoint: Checkpoint, planned: PlannedOp, share: ExpertsShare, numerics: str, dtype: torch.dtype
) -> tuple[MoESpec, MoEWeights]:
    """A rank's experts, stacked in the order of its local ids.

    Args:
        checkpoint: where they are read, one matrix at a time.
        planned: the block.
        share: what the rank holds of it.
        numerics: a word of :func:`hal_core.numerics.numerics_from_word`.
        dtype: of biases.

    Raises:
        FormatError, ShapeError: as :func:`rank_linears`.
    """
    spec = planned.spec
    if not isinstance(spec, MoESpec):
        raise ShapeError(f"layer {planned.module}", f"experts in the engine, {spec.op} in the checkpoint", "check the model type")
    if max(share.experts, default=-1) >= spec.num_experts or not share.experts:
        found = f"the rank is to hold experts {share.experts[:4]}.. of {spec.num_experts}"
        raise ShapeError(f"layer {planned.module}", found, "use an expert parallel size of at most the number of experts")
    weights = (_fused if planned.names("gate_up") else _separate)(checkpoint, planned, share, dtype)
    gate = None if weights.gate is None else weights.gate.scheme
    request = numerics_from_word(numerics, spec.activations, weights.up.scheme.granularity.group)
    local = len(share.experts)
    rank_spec = replace(
        spec, intermediate=share.inner.size, gate=gate, up=weights.up.scheme, down=weights.down.scheme, numerics=request,
        local_experts=None if local == spec.num_experts else local, expert_map=local != spec.num_experts,
    )  # fmt: skip
    return rank_spec, weights


def _separate(checkpoint: Checkpoint, planned: PlannedOp, share: ExpertsShare, dtype: torch.dtype) -> MoEWeights:
    spec = planned.spec
    assert isinstance(spec, MoESpec)  # rank_experts has looked
    matrices = {}
    for role, scheme in (("gate", spec.gate), ("up", spec.up), ("down", spec.down)):
        names = planned.names(role)
        if scheme is None:
            continue
        rows, columns = _sides(role, share.inner, spec.hidden)
        whole = (widen(checkpoint.read(names[expert]), scheme) for expert in share.experts)
        matrices[role] = stack((cut_weight(f"{planned.module} {role}", each, rows, columns) for each in whole), len(share.experts))
    return MoEWeights(**matrices)


def _sides(role: str, inner: Cut, hidden: int) -> tuple[Cut, Cut]:
    return (Cut.all_of(hidden), inner) if role == "down" else (inner, Cut.all_of(hidden))


def _fused(checkpoint: Checkpoint, planned: PlannedOp, share: ExpertsShare, dtype: torch.dtype) -> MoEWeights:
    def load(name: str) -> Tensor:
        bias = checkpoint.load(name).to(dtype)
        if not bool(bias.isfinite().all()):
            raise FormatError(f"parameter {name}", f"not finite in {dtype}", "the file is damaged, or the model must run in another dtype")
        return bias

    spec = planned.spec
    assert isinstance(spec, MoESpec)  # rank_experts has looked
    whole = fused_weights(planned.names, checkpoint.read, load)
    ids, inner = list(share.experts), share.inner

    def part(role: str, weight: QuantizedTensor) -> QuantizedTensor:
        sides = _sides(role, inner, spec.hidden)
        return stack((cut_weight(f"{planned.module} {role}", weight.expert(expert), *sides) for expert in ids), len(ids))

    def biases(bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias[ids, inner.start : inner.stop].contiguous()

    down = None if whole.down_bias is None else whole.down_bias[ids] * int(share.adds_bias)
    return MoEWeights(
        up=part("up", whole.up), down=part("down", whole.down), gate=None if whole.gate is None else part("gate", whole.gate),
        gate_bias=biases(whole.gate_bias), up_bias=biases(whole.up_bias), down_bias=down,
    )  # fmt: skip
