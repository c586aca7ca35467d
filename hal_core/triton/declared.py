"""What the shared Triton kernels serve, as backends declare it. Importing this imports no Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hal_core.kernel import LinearEpilogue, LinearKernel, MoEEpilogue, MoEKernel, SchemeSet, ShapeLimit
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.refusal import Refusal
from hal_core.schemes import GranularityKind, ZeroKind
from hal_core.selection import widened
from hal_core.spec import ACTIVATIONS

if TYPE_CHECKING:
    from torch import nn

    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.machine import Machine
    from hal_core.schemes import WeightScheme
    from hal_core.selection import Padding
    from hal_core.spec import LinearSpec, MoESpec

__all__ = [
    "BF16",
    "BLOCKS",
    "BOUND",
    "EXPERTS_BOUND",
    "FP8_BOUND",
    "FP8_EXPERTS_BOUND",
    "FP8_EXPERTS_LIMITS",
    "FP8_GROUPS",
    "FP8_TOKENS",
    "FP16",
    "ROWS",
    "LinearTritonBase",
    "MoETritonBase",
]

HALVES = ("bf16", "fp16")
OUTPUTS = ("bf16", "fp16", "fp32")
NO_ZERO = (ZeroKind.NONE,)
INTEGERS = SchemeSet(
    dtypes=("int4", "int8"),
    granularities=(GranularityKind.TENSOR, GranularityKind.CHANNEL, GranularityKind.GROUP),
    zeros=tuple(ZeroKind),
    act_order=True,
    group_multiple=32,  # a plane of a step, which is multiplied by one scale
)
BLOCKS = SchemeSet(("fp8_e4m3",), (GranularityKind.BLOCK,), NO_ZERO, act_order=False)
ROWS = SchemeSet(("fp8_e4m3",), (GranularityKind.CHANNEL, GranularityKind.TENSOR), NO_ZERO, act_order=False)
BF16 = SchemeSet(("bf16",), (GranularityKind.CHANNEL,), NO_ZERO, act_order=False)
FP16 = SchemeSet(("fp16",), (GranularityKind.CHANNEL,), NO_ZERO, act_order=False)
#: Sums in float32, in an order that depends on sizes alone, but on the number of rows too.
EXACT = Numerics(deterministic=True)
FP8_GROUPS = Numerics((ActivationQuant("fp8_e4m3", "g128"),), deterministic=True)
FP8_TOKENS = Numerics((ActivationQuant("fp8_e4m3", "token"),), deterministic=True)
#: bf16 rounds by 1.7e-3 in the L2 sense: the output, and, with many rows, the scaled weights; of experts also what lies between two
#: products.
BOUND, EXPERTS_BOUND = 6e-3, 1.2e-2
#: e4m3 rounds activations by up to 2**-4: 2.1e-2 in the L2 sense at the middle of many problems, and 3.6e-2 through experts, which
#: round twice. The bounds are for the worst row of small ones, whose terms cancel.
FP8_BOUND, FP8_EXPERTS_BOUND = 1e-1, 1.5e-1
#: Rows and columns of the blocks of fp8 weights that are served.
BLOCK = (128, 128)
EPILOGUE = MoEEpilogue(
    activations=ACTIVATIONS, alpha=True, limit=True, gated=True, ungated=True, bias=True, mixed_schemes=False, expert_map=True,
    expert_parallel=True, router_weight_on_input=True, routed_scaling=True, shared_experts=False, lora=False,
)  # fmt: skip
#: Of fewer hidden numbers an activation may leave nearly nothing, and such a row is then made of what e4m3 rounds.
FP8_EXPERTS_LIMITS = (ShapeLimit("intermediate", least=32),)
#: Outputs and columns are padded to whole tiles and steps.
_TILE = 64


def _block_refusals(schemes: tuple[WeightScheme, ...]) -> tuple[Refusal, ...]:
    """A block is compared as a tuple: a configuration may hold it as a list, which is equal to none."""
    found = {str(s.granularity) for s in schemes if s.granularity.block is not None and tuple(s.granularity.block) != BLOCK}
    wanted = f"serves blocks of {BLOCK[0]}x{BLOCK[1]}"
    return tuple(Refusal("scheme.granularity", f"scales per {grain}", wanted, "use another kernel") for grain in sorted(found))


class LinearTritonBase(LinearKernel):
    """int4 and int8 weights, exact activations. A backend adds ``devices`` and ``architectures``."""

    name = "linear_triton"
    isa = ()
    schemes = INTEGERS
    numerics = EXACT
    dtypes = HALVES
    out_dtypes = OUTPUTS
    epilogue = LinearEpilogue(bias=True, lora=False)
    limits = ()
    m_range = (1, None)
    layout = "triton.steps16"
    error_bound = BOUND
    priority = 200

    def refusals(self, spec: LinearSpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *_block_refusals((spec.weights,)))

    def padding(self, spec: LinearSpec) -> tuple[Padding, ...]:
        if not spec.weights.dtype.startswith("int"):
            return ()
        return widened(("n", spec.n, _TILE), ("k", spec.k, 512 // spec.weights.bits))

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> nn.Module:
        from hal_core.triton.modules import TritonLinear

        return TritonLinear(spec, weights)


class MoETritonBase(MoEKernel):
    """A block of int4 or int8 experts, exact activations. A backend adds ``devices`` and ``architectures``."""

    name = "moe_triton"
    isa = ()
    schemes = INTEGERS
    numerics = EXACT
    dtypes = HALVES
    out_dtypes = OUTPUTS
    routing = ("routed",)
    epilogue = EPILOGUE
    limits = ()
    m_range = (1, None)
    layout = "triton.steps16"
    error_bound = EXPERTS_BOUND
    priority = 200

    def refusals(self, spec: MoESpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *_block_refusals(spec.schemes))

    def computes(self, spec: MoESpec) -> Numerics:
        return replace(self.numerics, operand=spec.dtype)  # the hidden numbers are rounded to it

    def padding(self, spec: MoESpec) -> tuple[Padding, ...]:
        if not spec.up.dtype.startswith("int"):
            return ()
        step = 512 // spec.up.bits
        return widened(("hidden", spec.hidden, step), ("intermediate", spec.intermediate, step))

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> nn.Module:
        from hal_core.triton.modules import TritonExperts

        return TritonExperts(spec, weights)
