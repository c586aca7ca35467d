"""What the kernels serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.kernel import LinearEpilogue, LinearKernel, MoEEpilogue, MoEKernel, SchemeSet
from hal_core.numerics import Numerics
from hal_core.schemes import GranularityKind, ZeroKind

if TYPE_CHECKING:
    from hal_backend_example.ops import ExpertsOp, LinearOp
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["ExampleExperts", "ExampleLinear"]

_SCHEMES = SchemeSet(
    dtypes=("int4", "int8"),
    granularities=(GranularityKind.CHANNEL, GranularityKind.GROUP),
    zeros=(ZeroKind.NONE, ZeroKind.INTEGER),
    act_order=False,
    group_multiple=1,
)
_FLOATS = ("fp32", "bf16", "fp16")
#: What rounding a result to bfloat16 costs; a float32 result is near 1e-6.
_BOUND = 4e-3


class ExampleLinear(LinearKernel):
    """int4 and int8 weights, exact activations."""

    name = "linear"
    devices = ("cpu",)
    isa = ()
    architectures = ()
    schemes = _SCHEMES
    numerics = Numerics(deterministic=True)
    dtypes = _FLOATS
    out_dtypes = _FLOATS
    epilogue = LinearEpilogue(bias=True, lora=False)
    limits = ()
    m_range = (1, None)
    layout = "example.columns"
    error_bound = _BOUND
    priority = 1

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> LinearOp:
        from hal_backend_example.ops import LinearOp

        return LinearOp(spec, weights)


class ExampleExperts(MoEKernel):
    """A gated block of int4 or int8 experts, exact activations."""

    name = "experts"
    devices = ("cpu",)
    isa = ()
    architectures = ()
    schemes = _SCHEMES
    numerics = Numerics(deterministic=True)
    dtypes = _FLOATS
    out_dtypes = _FLOATS
    routing = ("routed",)
    epilogue = MoEEpilogue(
        activations=("silu", "swiglu_oai"), alpha=True, limit=True, gated=True, ungated=False, bias=True, mixed_schemes=True,
        expert_map=True, expert_parallel=True, router_weight_on_input=False, routed_scaling=True, shared_experts=False, lora=False,
    )  # fmt: skip
    limits = ()
    m_range = (1, None)
    layout = "example.columns"
    error_bound = _BOUND
    priority = 1

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> ExpertsOp:
        from hal_backend_example.ops import ExpertsOp

        return ExpertsOp(spec, weights)
