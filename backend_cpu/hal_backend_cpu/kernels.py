"""The kernels as the registry sees them: one class per op and instruction set level, all over one layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hal_backend_cpu.constants import LAYOUT, TILE
from hal_core.kernel import EmbeddingKernel, LinearEpilogue, LinearKernel, MoEEpilogue, MoEKernel, SchemeSet
from hal_core.numerics import Numerics
from hal_core.refusal import Refusal
from hal_core.schemes import GranularityKind, ZeroKind
from hal_core.selection import widened
from hal_core.spec import ACTIVATIONS

if TYPE_CHECKING:
    from hal_backend_cpu.ops import CpuEmbedding, CpuLinear, CpuMoE
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.machine import Machine
    from hal_core.schemes import WeightScheme
    from hal_core.selection import Padding
    from hal_core.spec import EmbeddingSpec, LinearSpec, MoESpec

__all__ = ["KERNELS"]

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX512_BF16 = (*_AVX512, "avx512_bf16")
_FLOATS = ("fp32", "bf16", "fp16")
_INTEGERS = SchemeSet(
    dtypes=("int4", "int8"),
    granularities=(GranularityKind.TENSOR, GranularityKind.CHANNEL, GranularityKind.GROUP),
    zeros=tuple(ZeroKind),
    act_order=True,
    group_multiple=8,  # one 32-bit word of a column holds eight 4-bit codes, which must share a scale
)
_INT4 = replace(_INTEGERS, dtypes=("int4",))
#: Operands are widened to float32 exactly (the bf16 level splits them into exact bf16 parts) and summed in float32, in an
#: order that depends on K alone.
_EXACT = Numerics(deterministic=True, batch_invariant=True)
#: bf16 output rounds to 8 significand bits: 2**-9 at most, about 1.7e-3 in the L2 sense; float32 output is near 1e-6.
_BOUND = 4e-3


#: Twice the rate of AVX-512 where the processor starts a bf16 dot product every cycle.
_FAST_BF16 = 300
#: Intel's cores start one every second cycle, and two float32 multiply-adds each: the plain level is faster there.
_SLOW_BF16 = 150


def _bf16_rank(machine: Machine) -> int:
    intel = any(device.kind == "cpu" and device.vendor == "intel" for device in machine.devices)
    return _SLOW_BF16 if intel else _FAST_BF16


def _word(scheme: WeightScheme) -> int:
    return 32 // scheme.bits


def _same_dtype(spec: LinearSpec | MoESpec) -> tuple[Refusal, ...]:
    if spec.output == spec.dtype:
        return ()
    return (Refusal("dtype.output", f"{spec.output} from {spec.dtype}", "writes the dtype of its input", f"ask for {spec.dtype} output"),)


class LinearAVX512(LinearKernel):
    """int4 and int8 weights, exact activations, AVX-512."""

    name = "linear_avx512"
    devices = ("cpu",)
    isa = _AVX512
    _level = "avx512"  # the native ops' word for it
    architectures = ()
    schemes = _INTEGERS
    numerics = _EXACT
    dtypes = _FLOATS
    out_dtypes = _FLOATS
    epilogue = LinearEpilogue(bias=True, lora=False)
    limits = ()
    m_range = (1, None)
    layout = LAYOUT
    error_bound = _BOUND
    priority = 200

    def refusals(self, spec: LinearSpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *_same_dtype(spec))

    def padding(self, spec: LinearSpec) -> tuple[Padding, ...]:
        return widened(("n", spec.n, TILE), ("k", spec.k, _word(spec.weights)))

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> CpuLinear:
        from hal_backend_cpu.ops import CpuLinear

        return CpuLinear(spec, weights, self._level)


class LinearAVX512BF16(LinearAVX512):
    """int4 weights, exact activations in bf16 parts, AVX-512 BF16."""

    name = "linear_avx512bf16"
    isa = _AVX512_BF16
    _level = "avx512bf16"
    schemes = _INT4
    priority = _FAST_BF16

    def rank(self, spec: LinearSpec, machine: Machine) -> int:
        return _bf16_rank(machine)


class LinearAVX2(LinearAVX512):
    """int4 and int8 weights, exact activations, AVX2."""

    name = "linear_avx2"
    isa = _AVX2
    _level = "avx2"
    priority = 100


class EmbeddingAVX512(EmbeddingKernel):
    """Rows of an int4 or int8 table, and the head that is tied to it, AVX-512."""

    name = "embedding_avx512"
    devices = ("cpu",)
    isa = _AVX512
    _level = "avx512"  # the native ops' word for it
    architectures = ()
    schemes = _INTEGERS
    numerics = _EXACT
    dtypes = _FLOATS
    out_dtypes = _FLOATS
    tied_head = True
    limits = ()
    m_range = (1, None)
    layout = LAYOUT
    error_bound = _BOUND
    priority = 200

    def padding(self, spec: EmbeddingSpec) -> tuple[Padding, ...]:
        return widened(("rows", spec.rows, TILE), ("dim", spec.dim, _word(spec.weights)))

    def prepare(self, spec: EmbeddingSpec, weights: LinearWeights) -> CpuEmbedding:
        from hal_backend_cpu.ops import CpuEmbedding

        return CpuEmbedding(spec, weights, self._level)


class EmbeddingAVX512BF16(EmbeddingAVX512):
    """Rows of an int4 table, and the head that is tied to it, AVX-512 BF16."""

    name = "embedding_avx512bf16"
    isa = _AVX512_BF16
    _level = "avx512bf16"
    schemes = _INT4
    priority = _FAST_BF16

    def rank(self, spec: EmbeddingSpec, machine: Machine) -> int:
        return _bf16_rank(machine)


class EmbeddingAVX2(EmbeddingAVX512):
    """Rows of an int4 or int8 table, and the head that is tied to it, AVX2."""

    name = "embedding_avx2"
    isa = _AVX2
    _level = "avx2"
    priority = 100


class MoEAVX512(MoEKernel):
    """A block of int4 or int8 experts, exact activations, AVX-512."""

    name = "moe_avx512"
    devices = ("cpu",)
    isa = _AVX512
    _level = "avx512"  # the native ops' word for it
    architectures = ()
    schemes = _INTEGERS
    numerics = _EXACT
    dtypes = _FLOATS
    out_dtypes = _FLOATS
    routing = ("routed",)
    epilogue = MoEEpilogue(
        activations=ACTIVATIONS, alpha=True, limit=True, gated=True, ungated=True, bias=True, mixed_schemes=True, expert_map=True,
        expert_parallel=True, router_weight_on_input=True, routed_scaling=True, shared_experts=False, lora=False,
    )  # fmt: skip
    limits = ()
    m_range = (1, None)
    layout = LAYOUT
    error_bound = _BOUND
    priority = 200

    def refusals(self, spec: MoESpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *_same_dtype(spec))

    def padding(self, spec: MoESpec) -> tuple[Padding, ...]:
        # each matrix is widened where it has outputs (tiles) and inputs (words); the tile covers both
        return widened(("hidden", spec.hidden, TILE), ("intermediate", spec.intermediate, TILE))

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> CpuMoE:
        from hal_backend_cpu.ops import CpuMoE

        return CpuMoE(spec, weights, self._level)


class MoEAVX512BF16(MoEAVX512):
    """A block of experts, int4 or some of it int8, exact activations in bf16 parts, AVX-512 BF16."""

    name = "moe_avx512bf16"
    isa = _AVX512_BF16
    _level = "avx512bf16"
    priority = _FAST_BF16

    def rank(self, spec: MoESpec, machine: Machine) -> int:
        return _bf16_rank(machine)

    def refusals(self, spec: MoESpec, machine: Machine) -> tuple[Refusal, ...]:
        out = super().refusals(spec, machine)
        if any(scheme.dtype == "int4" for scheme in spec.schemes):
            return out
        return (*out, Refusal("scheme.dtype", "experts without int4", "only int4 gains from bf16 dot products", "use cpu.moe_avx512"))


class MoEAVX2(MoEAVX512):
    """A block of int4 or int8 experts, exact activations, AVX2."""

    name = "moe_avx2"
    isa = _AVX2
    _level = "avx2"
    priority = 100


KERNELS = (
    LinearAVX512BF16(),
    LinearAVX512(),
    LinearAVX2(),
    EmbeddingAVX512BF16(),
    EmbeddingAVX512(),
    EmbeddingAVX2(),
    MoEAVX512BF16(),
    MoEAVX512(),
    MoEAVX2(),
)
