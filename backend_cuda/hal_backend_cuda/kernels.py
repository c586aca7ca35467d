"""This backend's own kernels: Triton's, and torch's products where they are better. Listing them imports no Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hal_core.kernel import LinearEpilogue, LinearKernel, MoEEpilogue, MoEKernel, SchemeSet, ShapeLimit
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.refusal import Refusal
from hal_core.schemes import GranularityKind, ZeroKind
from hal_core.selection import Padding
from hal_core.spec import ACTIVATIONS

if TYPE_CHECKING:
    from torch import nn

    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.machine import Machine
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["KERNELS"]

_ALL = ("sm_80", "sm_89", "sm_90", "sm_100")
#: The first tensor cores that multiply e4m3.
_FP8 = ("sm_89", "sm_90", "sm_100")
_HALVES = ("bf16", "fp16")
_OUTPUTS = ("bf16", "fp16", "fp32")
_NO_ZERO = (ZeroKind.NONE,)
_INTEGERS = SchemeSet(
    dtypes=("int4", "int8"),
    granularities=(GranularityKind.TENSOR, GranularityKind.CHANNEL, GranularityKind.GROUP),
    zeros=tuple(ZeroKind),
    act_order=True,
    group_multiple=32,  # a plane of a step, which is multiplied by one scale
)
_BLOCKS = SchemeSet(("fp8_e4m3",), (GranularityKind.BLOCK,), _NO_ZERO, act_order=False)
_ROWS = SchemeSet(("fp8_e4m3",), (GranularityKind.CHANNEL, GranularityKind.TENSOR), _NO_ZERO, act_order=False)
_BF16 = SchemeSet(("bf16",), (GranularityKind.CHANNEL,), _NO_ZERO, act_order=False)
_FP16 = SchemeSet(("fp16",), (GranularityKind.CHANNEL,), _NO_ZERO, act_order=False)
#: Sums in float32, in an order that depends on sizes alone, but on the number of rows too.
_EXACT = Numerics(deterministic=True)
_FP8_GROUPS = Numerics((ActivationQuant("fp8_e4m3", "g128"),), deterministic=True)
_FP8_TOKENS = Numerics((ActivationQuant("fp8_e4m3", "token"),), deterministic=True)
#: bf16 rounds by 1.7e-3 in the L2 sense: the output, what lies between two products, and, with many rows, the scaled weights.
_BOUND = 6e-3
#: e4m3 rounds activations by up to 2**-4: 2.1e-2 in the L2 sense at the middle of many problems, and 3.6e-2 through experts, which
#: round twice. The bounds are for the worst row of small ones, whose terms cancel.
_FP8_BOUND, _FP8_EXPERTS_BOUND = 1e-1, 1.5e-1
#: Rows and columns of the blocks of fp8 weights that are served.
_BLOCK = (128, 128)
_EPILOGUE = MoEEpilogue(
    activations=ACTIVATIONS, alpha=True, limit=True, gated=True, ungated=True, bias=True, mixed_schemes=False, expert_map=True,
    expert_parallel=True, router_weight_on_input=True, routed_scaling=True, shared_experts=False, lora=False,
)  # fmt: skip
#: Outputs and columns are padded to whole tiles and steps.
_TILE = 64


def _block_refusals(schemes: tuple[Any, ...]) -> tuple[Refusal, ...]:
    """A block is compared as a tuple: a configuration may hold it as a list, which is equal to none."""
    found = {str(s.granularity) for s in schemes if s.granularity.block is not None and tuple(s.granularity.block) != _BLOCK}
    wanted = f"serves blocks of {_BLOCK[0]}x{_BLOCK[1]}"
    return tuple(Refusal("scheme.granularity", f"scales per {grain}", wanted, "use another kernel") for grain in sorted(found))


def _padded(*dims: tuple[str, int, int]) -> tuple[Padding, ...]:
    """The dimensions that the layout widens, of ``(name, size, multiple)``."""
    return tuple(Padding(name, size, -(-size // multiple) * multiple) for name, size, multiple in dims if size % multiple)


class LinearTriton(LinearKernel):
    """int4 and int8 weights, exact activations."""

    name = "linear_triton"
    devices = ("cuda",)
    isa = ()
    architectures = _ALL
    schemes = _INTEGERS
    numerics = _EXACT
    dtypes = _HALVES
    out_dtypes = _OUTPUTS
    epilogue = LinearEpilogue(bias=True, lora=False)
    limits = ()
    m_range = (1, None)
    layout = "triton.steps16"
    error_bound = _BOUND
    priority = 200

    def refusals(self, spec: LinearSpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *_block_refusals((spec.weights,)))

    def padding(self, spec: LinearSpec) -> tuple[Padding, ...]:
        if not spec.weights.dtype.startswith("int"):
            return ()
        return _padded(("n", spec.n, _TILE), ("k", spec.k, 512 // spec.weights.bits))

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> nn.Module:
        from hal_core.triton.modules import TritonLinear

        return TritonLinear(spec, weights)


class LinearFP8Triton(LinearTriton):
    """e4m3 weights with a scale for every block of 128 by 128, activations quantized to e4m3 in groups of 128."""

    name = "linear_fp8_triton"
    architectures = _FP8
    schemes = _BLOCKS
    numerics = _FP8_GROUPS
    limits = (ShapeLimit("n", least=16),)  # fewer outputs leave nothing to average rounding over
    layout = "triton.rows"
    error_bound = _FP8_BOUND


class LinearFP8RowsTriton(LinearTriton):
    """e4m3 weights with a scale for every output, activations quantized to e4m3 with a scale for every token."""

    name = "linear_fp8_rows_triton"
    architectures = _FP8
    schemes = _ROWS
    numerics = _FP8_TOKENS
    limits = (ShapeLimit("n", least=16),)
    layout = "triton.rows"
    error_bound = _FP8_BOUND


class LinearScaledMM(LinearFP8RowsTriton):
    """The same by torch's scaled product."""

    name = "linear_scaled_mm"
    architectures = ("sm_90", "sm_100")  # older ones take one scale for all rows only
    out_dtypes = ("bf16",)
    dtypes = ("bf16",)
    limits = (ShapeLimit("n", multiple=16), ShapeLimit("k", multiple=16))
    priority = 250

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> nn.Module:
        from hal_backend_cuda.torch_products import ScaledLinear

        return ScaledLinear(spec, weights)


class MoETriton(MoEKernel):
    """A block of int4 or int8 experts, exact activations."""

    name = "moe_triton"
    devices = ("cuda",)
    isa = ()
    architectures = _ALL
    schemes = _INTEGERS
    numerics = _EXACT
    dtypes = _HALVES
    out_dtypes = _OUTPUTS
    routing = ("routed",)
    epilogue = _EPILOGUE
    limits = ()
    m_range = (1, None)
    layout = "triton.steps16"
    error_bound = _BOUND
    priority = 200

    def refusals(self, spec: MoESpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *_block_refusals(spec.schemes))

    def padding(self, spec: MoESpec) -> tuple[Padding, ...]:
        if not spec.up.dtype.startswith("int"):
            return ()
        step = 512 // spec.up.bits
        return _padded(("hidden", spec.hidden, step), ("intermediate", spec.intermediate, step))

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> nn.Module:
        from hal_core.triton.modules import TritonExperts

        return TritonExperts(spec, weights)


class MoEFP8Triton(MoETriton):
    """e4m3 experts with block scales, activations quantized to e4m3 in groups of 128."""

    name = "moe_fp8_triton"
    architectures = _FP8
    schemes = _BLOCKS
    numerics = _FP8_GROUPS
    layout = "triton.rows"
    error_bound = _FP8_EXPERTS_BOUND


class MoEFP8RowsTriton(MoETriton):
    """e4m3 experts with a scale for every output, activations quantized to e4m3 with a scale for every token."""

    name = "moe_fp8_rows_triton"
    architectures = _FP8
    schemes = _ROWS
    numerics = _FP8_TOKENS
    layout = "triton.rows"
    error_bound = _FP8_EXPERTS_BOUND


class MoEBF16Triton(MoETriton):
    """bfloat16 experts."""

    name = "moe_bf16_triton"
    schemes = _BF16
    dtypes = ("bf16",)
    layout = "triton.rows"


class MoEFP16Triton(MoETriton):
    """float16 experts."""

    name = "moe_fp16_triton"
    schemes = _FP16
    dtypes = ("fp16",)
    layout = "triton.rows"


class MoEGroupedMM(MoEBF16Triton):
    """bfloat16 experts by torch's grouped product at every number of rows."""

    name = "moe_grouped_mm"
    architectures = ("sm_90", "sm_100")  # elsewhere torch loops over experts on the host
    epilogue = MoEEpilogue(
        activations=ACTIVATIONS, alpha=True, limit=True, gated=True, ungated=True, bias=False, mixed_schemes=False, expert_map=True,
        expert_parallel=True, router_weight_on_input=False, routed_scaling=True, shared_experts=False, lora=False,
    )  # fmt: skip
    limits = (ShapeLimit("hidden", multiple=8), ShapeLimit("intermediate", multiple=8))  # rows start at 16 bytes
    priority = 150

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> nn.Module:
        from hal_core.triton.modules import GroupedExperts

        return GroupedExperts(spec, weights)


KERNELS = (
    LinearTriton(),
    LinearFP8Triton(),
    LinearFP8RowsTriton(),
    LinearScaledMM(),
    MoETriton(),
    MoEFP8Triton(),
    MoEFP8RowsTriton(),
    MoEBF16Triton(),
    MoEFP16Triton(),
    MoEGroupedMM(),
)
