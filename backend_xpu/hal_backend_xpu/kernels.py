"""This backend's own kernels of four-bit weights, as the registry sees them. Listing them loads no native code.

They ran on processors, with the tiles of the GPUs; no Intel GPU has run them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hal_backend_xpu.declared import OnXpu
from hal_core.kernel import LinearEpilogue, LinearKernel, MoEEpilogue, MoEKernel, SchemeSet, ShapeLimit
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.refusal import Refusal
from hal_core.schemes import GranularityKind, ZeroKind
from hal_core.spec import ACTIVATIONS
from hal_core.transforms import GroupToChannel

if TYPE_CHECKING:
    from torch import nn

    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.machine import Machine
    from hal_core.schemes import WeightScheme
    from hal_core.selection import Transform
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["KERNELS"]

_HALVES = ("bf16", "fp16")
_OUTPUTS = ("bf16", "fp16", "fp32")
_INT4 = SchemeSet(
    dtypes=("int4",),
    granularities=(GranularityKind.TENSOR, GranularityKind.CHANNEL, GranularityKind.GROUP),
    zeros=tuple(ZeroKind),
    act_order=True,
    group_multiple=8,  # one 32-bit word of a column holds eight codes, which must share a scale
)
#: Sums in float32, in an order that depends on sizes alone, but on the number of rows too: many are multiplied with weights that are
#: widened and rounded to the type of the rows.
_EXACT = Numerics(operand="bf16", deterministic=True)
_RESCALED = GroupToChannel()
#: Few rows keep the weights as they are and their activations exact.
_INT8 = Numerics((ActivationQuant("int8", "token"),), weights="rescaled", deterministic=True)
#: bf16 rounds by 1.7e-3 in the L2 sense: the output, what lies between two products, and, with many rows, the scaled weights; twice in
#: a row in experts, where minima may cancel.
_BOUND, _EXPERTS_BOUND = 6e-3, 1.2e-2
#: Of experts with int8 activations, where minima that cancel magnify a step, and of folding groups.
_INT8_BOUND = 0.17
#: A tile's columns, and the widest step over K (64 bytes of int8).
_N, _K = 16, 64


def _group_refusals(schemes: tuple[tuple[WeightScheme, int], ...]) -> tuple[Refusal, ...]:
    """Groups that do not divide K."""
    sizes = {(scheme.granularity.group, k) for scheme, k in schemes if scheme.granularity.group is not None}
    return tuple(
        Refusal("shape.multiple", f"K={k}", f"needs a multiple of the group, {group}", "shard otherwise, or use another kernel")
        for group, k in sorted(sizes)
        if k % group
    )


class LinearInt4(OnXpu, LinearKernel):
    """int4 weights with groups, zero points or minima, exact activations."""

    name = "linear_int4"
    schemes = _INT4
    numerics = _EXACT
    dtypes = _HALVES
    out_dtypes = _OUTPUTS
    epilogue = LinearEpilogue(bias=True, lora=False)
    limits = (ShapeLimit("n", multiple=_N), ShapeLimit("k", multiple=_K))
    m_range = (1, None)
    layout = "xpu.words"
    error_bound = _BOUND
    priority = 200

    def computes(self, spec: LinearSpec) -> Numerics:
        return replace(self.numerics, operand=spec.dtype)

    def refusals(self, spec: LinearSpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *_group_refusals(((spec.weights, spec.k),)))

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> nn.Module:
        from hal_backend_xpu.ops import Int4Linear

        return Int4Linear(spec, weights)


class MoEInt4(OnXpu, MoEKernel):
    """A block of int4 experts, exact activations."""

    name = "moe_int4"
    schemes = replace(_INT4, act_order=False)
    numerics = _EXACT
    dtypes = _HALVES
    out_dtypes = _OUTPUTS
    routing = ("routed",)
    epilogue = MoEEpilogue(
        activations=ACTIVATIONS, alpha=True, limit=True, gated=True, ungated=True, bias=True, mixed_schemes=False, expert_map=True,
        expert_parallel=True, router_weight_on_input=True, routed_scaling=True, shared_experts=False, lora=False,
    )  # fmt: skip
    limits = (ShapeLimit("hidden", multiple=_K), ShapeLimit("intermediate", multiple=_K))  # each is K of one product and N of another
    m_range = (1, None)
    layout = "xpu.words"
    error_bound = _EXPERTS_BOUND
    priority = 200

    def computes(self, spec: MoESpec) -> Numerics:
        return self.numerics if self.numerics.operand == "own" else replace(self.numerics, operand=spec.dtype)

    def refusals(self, spec: MoESpec, machine: Machine) -> tuple[Refusal, ...]:
        wide = tuple((scheme, spec.hidden) for scheme in (spec.gate, spec.up) if scheme is not None)
        return (*super().refusals(spec, machine), *_group_refusals((*wide, (spec.down, spec.intermediate))))

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> nn.Module:
        from hal_backend_xpu.ops import Int4Experts

        return Int4Experts(spec, weights)


class MoEInt4Int8(MoEInt4):
    """A block of int4 experts: long inputs in int8, a scale a token, with weights folded into one int8 scale a row; short ones exact."""

    name = "moe_int4_int8"
    schemes = replace(_INT4, granularities=(GranularityKind.GROUP,), zeros=(ZeroKind.NONE, ZeroKind.INTEGER), act_order=False)
    numerics = _INT8
    error_bound = _INT8_BOUND
    layout = "xpu.words_int8"
    priority = 400

    def transforms(self, spec: MoESpec) -> tuple[Transform, ...]:
        return (_RESCALED.record,)

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> nn.Module:
        from hal_backend_xpu.ops import Int4Experts

        return Int4Experts(spec, weights, rescaled=True)


KERNELS: tuple[Any, ...] = (LinearInt4(), MoEInt4(), MoEInt4Int8())
