"""Linears of narrow floats and of int8 rows, as kernels. Run on the SYCL device of processors; never ran on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_backend_xpu.declared import OnXpu, device_of
from hal_core.kernel import LinearEpilogue, LinearKernel, SchemeSet, ShapeLimit
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.refusal import Refusal
from hal_core.schemes import GranularityKind, ZeroKind

if TYPE_CHECKING:
    from torch import nn

    from hal_core.kernel import LinearWeights
    from hal_core.spec import LinearSpec

__all__ = ["KERNELS", "LinearFp8", "LinearInt8Rows", "LinearMx"]

_NO_ZERO = (ZeroKind.NONE,)
_GRAINS = (GranularityKind.TENSOR, GranularityKind.CHANNEL, GranularityKind.GROUP, GranularityKind.BLOCK)


class LinearFp8(OnXpu, LinearKernel):
    """e4m3 weights with scales of blocks, groups, columns or one; bf16 rows, unquantized."""

    name = "linear_fp8"
    schemes = SchemeSet(("fp8_e4m3", "mxfp8"), _GRAINS, _NO_ZERO, act_order=False, group_multiple=2)
    #: Sums are in float32, in an order of the sizes alone; few rows and many take other tiles, of the same order.
    numerics = Numerics(deterministic=True)
    dtypes = ("bf16",)
    out_dtypes = ("bf16", "fp16", "fp32")
    epilogue = LinearEpilogue(bias=True, lora=False)
    limits = (ShapeLimit("n", multiple=16), ShapeLimit("k", multiple=32))
    m_range = (1, None)
    layout = "xpu.narrow_words"
    #: Weights are rounded to bf16 together with scales that are no powers of two: 1.1e-3, beside 1.7e-3 of the output.
    error_bound = 6e-3
    priority = 200

    def _scheme_refusals(self, spec: LinearSpec) -> tuple[Refusal, ...]:
        found, block = super()._scheme_refusals(spec), spec.weights.granularity.block
        if block is None or block[1] % 2 == 0:
            return found
        asked = f"scales per {spec.weights.granularity}"
        return (*found, Refusal("scheme.granularity", asked, "two columns of a block are decoded at once", "use another kernel"))

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> nn.Module:
        from hal_backend_xpu.fp8_linear import NarrowLinear

        return NarrowLinear(spec, weights, device_of(weights.weight.values))


class LinearMx(LinearFp8):
    """e2m1 weights, expanded to bf16 in the loop: mxfp4 and nvfp4; bf16 rows, unquantized."""

    name = "linear_mxfp4"
    schemes = SchemeSet(("mxfp4", "nvfp4"), (GranularityKind.GROUP,), _NO_ZERO, act_order=False, group_multiple=2)


class LinearInt8Rows(LinearFp8):
    """W8A8: int8 weights of one scale a column, rows quantized to int8, each with its scale."""

    name = "linear_int8_rows"
    schemes = SchemeSet(("int8",), (GranularityKind.TENSOR, GranularityKind.CHANNEL), _NO_ZERO, act_order=False)
    numerics = Numerics((ActivationQuant("int8", "token"),), deterministic=True, batch_invariant=True)
    dtypes = ("bf16", "fp16", "fp32")
    limits = (ShapeLimit("n", multiple=16), ShapeLimit("k", multiple=64))
    layout = "xpu.int8_words"
    error_bound = 3e-2

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> nn.Module:
        from hal_backend_xpu.fp8_linear import Int8Linear

        return Int8Linear(spec, weights, device_of(weights.weight.values))


KERNELS = (LinearFp8(), LinearMx(), LinearInt8Rows())
