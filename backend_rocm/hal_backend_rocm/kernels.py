"""This backend's own kernels, over the Triton sources that it shares with the CUDA backend. Listing them imports no Triton.

Compiled for every target and interpreted on the host; no AMD GPU has run them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hal_backend_rocm.targets import TARGETS, target_refusals, torch_refusals
from hal_core.kernel import ShapeLimit
from hal_core.triton.declared import (
    BF16,
    BLOCKS,
    FP8_BOUND,
    FP8_EXPERTS_BOUND,
    FP8_EXPERTS_LIMITS,
    FP8_GROUPS,
    FP8_TOKENS,
    FP16,
    ROWS,
    LinearTritonBase,
    MoETritonBase,
)

if TYPE_CHECKING:
    from torch import nn

    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.machine import Machine
    from hal_core.refusal import Refusal
    from hal_core.selection import Transform
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["KERNELS"]


class _OnTargets:
    """What kernels of both kinds share. _operand: the type that is multiplied, which decides what targets serve; "own" for activations'."""

    devices = ("rocm",)
    _operand: ClassVar[str] = "own"

    def _device_refusals(self, machine: Machine) -> tuple[Refusal, ...]:
        found: tuple[Refusal, ...] = super()._device_refusals(machine)  # type: ignore[misc]
        if any(reason.code == "device.arch" for reason in found):
            multiplied = "bf16" if self._operand == "own" else self._operand
            found = (*(reason for reason in found if reason.code != "device.arch"), *target_refusals(machine, multiplied))
        return (*found, *torch_refusals(machine))

    def lacks(self, machine: Machine) -> tuple[Refusal, ...]:
        return torch_refusals(machine)


class LinearTriton(_OnTargets, LinearTritonBase):
    """int4 and int8 weights, exact activations."""

    architectures = TARGETS


class LinearFP8Triton(LinearTriton):
    """e4m3 weights with a scale for every block of 128 by 128, activations quantized to e4m3 in groups of 128."""

    name = "linear_fp8_triton"
    architectures = ("gfx950",)
    _operand = "e4m3fn"
    schemes = BLOCKS
    numerics = FP8_GROUPS
    limits = (ShapeLimit("n", least=16),)  # fewer outputs leave nothing to average rounding over
    layout = "triton.rows"
    error_bound = FP8_BOUND


class LinearFP8RowsTriton(LinearFP8Triton):
    """e4m3 weights with a scale for every output, activations quantized to e4m3 with a scale for every token."""

    name = "linear_fp8_rows_triton"
    schemes = ROWS
    numerics = FP8_TOKENS


class _Fnuz:
    """The same numbers in e4m3fnuz: codes as they are, scales doubled."""

    architectures = ("gfx942",)
    _operand = "e4m3fnuz"
    layout = "triton.rows_fnuz"

    def transforms(self, spec: LinearSpec | MoESpec) -> tuple[Transform, ...]:
        from hal_core.transforms import Fnuz

        return (Fnuz().record,)


class LinearFP8FnuzTriton(_Fnuz, LinearFP8Triton):
    """``linear_fp8_triton`` for gfx942."""

    name = "linear_fp8_fnuz_triton"

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> nn.Module:
        from hal_backend_rocm.fnuz import FnuzLinear

        return FnuzLinear(spec, weights)


class LinearFP8RowsFnuzTriton(LinearFP8FnuzTriton):
    """``linear_fp8_rows_triton`` for gfx942."""

    name = "linear_fp8_rows_fnuz_triton"
    schemes = ROWS
    numerics = FP8_TOKENS


class MoETriton(_OnTargets, MoETritonBase):
    """A block of int4 or int8 experts, exact activations."""

    architectures = TARGETS


class MoEBF16Triton(MoETriton):
    """bfloat16 experts."""

    name = "moe_bf16_triton"
    schemes = BF16
    dtypes = ("bf16",)
    layout = "triton.rows"


class MoEFP16Triton(MoETriton):
    """float16 experts."""

    name = "moe_fp16_triton"
    schemes = FP16
    dtypes = ("fp16",)
    layout = "triton.rows"


class MoEFP8Triton(MoETriton):
    """e4m3 experts with block scales, activations quantized to e4m3 in groups of 128."""

    name = "moe_fp8_triton"
    architectures = ("gfx950",)
    _operand = "e4m3fn"
    schemes = BLOCKS
    numerics = FP8_GROUPS
    limits = FP8_EXPERTS_LIMITS
    layout = "triton.rows"
    error_bound = FP8_EXPERTS_BOUND


class MoEFP8RowsTriton(MoEFP8Triton):
    """e4m3 experts with a scale for every output, activations quantized to e4m3 with a scale for every token."""

    name = "moe_fp8_rows_triton"
    schemes = ROWS
    numerics = FP8_TOKENS


class MoEFP8FnuzTriton(_Fnuz, MoEFP8Triton):
    """``moe_fp8_triton`` for gfx942."""

    name = "moe_fp8_fnuz_triton"

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> nn.Module:
        from hal_backend_rocm.fnuz import FnuzExperts

        return FnuzExperts(spec, weights)


class MoEFP8RowsFnuzTriton(MoEFP8FnuzTriton):
    """``moe_fp8_rows_triton`` for gfx942."""

    name = "moe_fp8_rows_fnuz_triton"
    schemes = ROWS
    numerics = FP8_TOKENS


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
