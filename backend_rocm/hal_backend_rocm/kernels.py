"""This backend's own kernels, over the Triton sources that it shares with the CUDA backend. Listing them imports no Triton.

Compiled for every target and interpreted on the host; no AMD GPU has run them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hal_backend_rocm.targets import TARGETS, target_refusals, torch_refusals
from hal_core.kernel import LinearEpilogue, LinearKernel, MoEEpilogue, MoEKernel, SchemeSet, ShapeLimit
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.refusal import Refusal
from hal_core.schemes import GranularityKind, WeightScheme, ZeroKind
from hal_core.selection import Padding
from hal_core.spec import ACTIVATIONS

if TYPE_CHECKING:
    from torch import nn

    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.machine import Machine
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["KERNELS"]

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
#: Sums in float32, in an order that depends on sizes alone, but on the number of rows too.
_EXACT = Numerics(deterministic=True)
_FP8_GROUPS = Numerics((ActivationQuant("fp8_e4m3", "g128"),), deterministic=True)
_FP8_TOKENS = Numerics((ActivationQuant("fp8_e4m3", "token"),), deterministic=True)
#: As of the CUDA backend's kernels, whose arithmetic is the same: bf16 rounds by 1.7e-3 in the L2 sense, e4m3 by 2.1e-2 and through
#: experts by 3.6e-2 at the middle of many problems. The bounds are for the worst row of small ones, whose terms cancel.
_BOUND, _FP8_BOUND, _FP8_EXPERTS_BOUND = 6e-3, 1e-1, 1.5e-1
#: Rows and columns of the blocks of fp8 weights that are served.
_BLOCK = (128, 128)
#: Outputs and columns are padded to whole tiles and steps.
_TILE = 64
_EPILOGUE = MoEEpilogue(
    activations=ACTIVATIONS, alpha=True, limit=True, gated=True, ungated=True, bias=True, mixed_schemes=False, expert_map=True,
    expert_parallel=True, router_weight_on_input=True, routed_scaling=True, shared_experts=False, lora=False,
)  # fmt: skip


def _block_refusals(schemes: tuple[WeightScheme, ...]) -> tuple[Refusal, ...]:
    """A block is compared as a tuple: a configuration may hold it as a list, which is equal to none."""
    found = {str(s.granularity) for s in schemes if s.granularity.block is not None and tuple(s.granularity.block) != _BLOCK}
    wanted = f"serves blocks of {_BLOCK[0]}x{_BLOCK[1]}"
    return tuple(Refusal("scheme.granularity", f"scales per {grain}", wanted, "use another kernel") for grain in sorted(found))


def _padded(*dims: tuple[str, int, int]) -> tuple[Padding, ...]:
    """The dimensions that the layout widens, of ``(name, size, multiple)``."""
    return tuple(Padding(name, size, -(-size // multiple) * multiple) for name, size, multiple in dims if size % multiple)


class _OnTargets:
    """What kernels of both kinds share. _operand: the type that is multiplied, which decides what targets serve; "own" for activations'."""

    devices = ("rocm",)
    isa = ()
    m_range = (1, None)
    priority = 200
    _operand: ClassVar[str] = "own"

    def _device_refusals(self, machine: Machine) -> tuple[Refusal, ...]:
        found: tuple[Refusal, ...] = super()._device_refusals(machine)  # type: ignore[misc]
        if any(reason.code == "device.arch" for reason in found):
            multiplied = "bf16" if self._operand == "own" else self._operand
            found = (*(reason for reason in found if reason.code != "device.arch"), *target_refusals(machine, multiplied))
        return (*found, *torch_refusals(machine))


class LinearTriton(_OnTargets, LinearKernel):
    """int4 and int8 weights, exact activations."""

    name = "linear_triton"
    architectures = TARGETS
    schemes = _INTEGERS
    numerics = _EXACT
    dtypes = _HALVES
    out_dtypes = _OUTPUTS
    epilogue = LinearEpilogue(bias=True, lora=False)
    limits = ()
    layout = "triton.steps16"
    error_bound = _BOUND

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
    architectures = ("gfx950",)
    _operand = "e4m3fn"
    schemes = _BLOCKS
    numerics = _FP8_GROUPS
    limits = (ShapeLimit("n", least=16),)  # fewer outputs leave nothing to average rounding over
    layout = "triton.rows"
    error_bound = _FP8_BOUND


class LinearFP8RowsTriton(LinearFP8Triton):
    """e4m3 weights with a scale for every output, activations quantized to e4m3 with a scale for every token."""

    name = "linear_fp8_rows_triton"
    schemes = _ROWS
    numerics = _FP8_TOKENS


class _Fnuz:
    """The same numbers in e4m3fnuz: codes as they are, scales doubled."""

    architectures = ("gfx942",)
    _operand = "e4m3fnuz"
    layout = "triton.rows_fnuz"


class LinearFP8FnuzTriton(_Fnuz, LinearFP8Triton):
    """``linear_fp8_triton`` for gfx942."""

    name = "linear_fp8_fnuz_triton"

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> nn.Module:
        from hal_backend_rocm.fnuz import FnuzLinear

        return FnuzLinear(spec, weights)


class LinearFP8RowsFnuzTriton(LinearFP8FnuzTriton):
    """``linear_fp8_rows_triton`` for gfx942."""

    name = "linear_fp8_rows_fnuz_triton"
    schemes = _ROWS
    numerics = _FP8_TOKENS


class MoETriton(_OnTargets, MoEKernel):
    """A block of int4 or int8 experts, exact activations."""

    name = "moe_triton"
    architectures = TARGETS
    schemes = _INTEGERS
    numerics = _EXACT
    dtypes = _HALVES
    out_dtypes = _OUTPUTS
    routing = ("routed",)
    epilogue = _EPILOGUE
    limits = ()
    layout = "triton.steps16"
    error_bound = _BOUND

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


class MoEBF16Triton(MoETriton):
    """bfloat16 experts."""

    name = "moe_bf16_triton"
    schemes = SchemeSet(("bf16",), (GranularityKind.CHANNEL,), _NO_ZERO, act_order=False)
    dtypes = ("bf16",)
    layout = "triton.rows"


class MoEFP16Triton(MoETriton):
    """float16 experts."""

    name = "moe_fp16_triton"
    schemes = SchemeSet(("fp16",), (GranularityKind.CHANNEL,), _NO_ZERO, act_order=False)
    dtypes = ("fp16",)
    layout = "triton.rows"


class MoEFP8Triton(MoETriton):
    """e4m3 experts with block scales, activations quantized to e4m3 in groups of 128."""

    name = "moe_fp8_triton"
    architectures = ("gfx950",)
    _operand = "e4m3fn"
    schemes = _BLOCKS
    numerics = _FP8_GROUPS
    layout = "triton.rows"
    error_bound = _FP8_EXPERTS_BOUND


class MoEFP8RowsTriton(MoEFP8Triton):
    """e4m3 experts with a scale for every output, activations quantized to e4m3 with a scale for every token."""

    name = "moe_fp8_rows_triton"
    schemes = _ROWS
    numerics = _FP8_TOKENS


class MoEFP8FnuzTriton(_Fnuz, MoEFP8Triton):
    """``moe_fp8_triton`` for gfx942."""

    name = "moe_fp8_fnuz_triton"

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> nn.Module:
        from hal_backend_rocm.fnuz import FnuzExperts

        return FnuzExperts(spec, weights)


class MoEFP8RowsFnuzTriton(MoEFP8FnuzTriton):
    """``moe_fp8_rows_triton`` for gfx942."""

    name = "moe_fp8_rows_fnuz_triton"
    schemes = _ROWS
    numerics = _FP8_TOKENS


KERNELS: tuple[Any, ...] = (
    LinearTriton(),
    LinearFP8Triton(),
    LinearFP8RowsTriton(),
    LinearFP8FnuzTriton(),
    LinearFP8RowsFnuzTriton(),
    MoETriton(),
    MoEBF16Triton(),
    MoEFP16Triton(),
    MoEFP8Triton(),
    MoEFP8RowsTriton(),
    MoEFP8FnuzTriton(),
    MoEFP8RowsFnuzTriton(),
)
