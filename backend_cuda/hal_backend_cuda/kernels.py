"""This backend's own kernels: Triton's, and torch's products where they are better. Listing them imports no Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.kernel import MoEEpilogue, ShapeLimit
from hal_core.spec import ACTIVATIONS
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
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["KERNELS"]

_ALL = ("sm_80", "sm_89", "sm_90", "sm_100")
#: The first tensor cores that multiply e4m3.
_FP8 = ("sm_89", "sm_90", "sm_100")


class LinearTriton(LinearTritonBase):
    """int4 and int8 weights, exact activations."""

    devices = ("cuda",)
    architectures = _ALL


class LinearFP8Triton(LinearTriton):
    """e4m3 weights with a scale for every block of 128 by 128, activations quantized to e4m3 in groups of 128."""

    name = "linear_fp8_triton"
    architectures = _FP8
    schemes = BLOCKS
    numerics = FP8_GROUPS
    limits = (ShapeLimit("n", least=16),)  # fewer outputs leave nothing to average rounding over
    layout = "triton.rows"
    error_bound = FP8_BOUND


class LinearFP8RowsTriton(LinearTriton):
    """e4m3 weights with a scale for every output, activations quantized to e4m3 with a scale for every token."""

    name = "linear_fp8_rows_triton"
    architectures = _FP8
    schemes = ROWS
    numerics = FP8_TOKENS
    limits = (ShapeLimit("n", least=16),)
    layout = "triton.rows"
    error_bound = FP8_BOUND


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


class MoETriton(MoETritonBase):
    """A block of int4 or int8 experts, exact activations."""

    devices = ("cuda",)
    architectures = _ALL


class MoEFP8Triton(MoETriton):
    """e4m3 experts with block scales, activations quantized to e4m3 in groups of 128."""

    name = "moe_fp8_triton"
    architectures = _FP8
    schemes = BLOCKS
    numerics = FP8_GROUPS
    limits = FP8_EXPERTS_LIMITS
    layout = "triton.rows"
    error_bound = FP8_EXPERTS_BOUND


class MoEFP8RowsTriton(MoETriton):
    """e4m3 experts with a scale for every output, activations quantized to e4m3 with a scale for every token."""

    name = "moe_fp8_rows_triton"
    architectures = _FP8
    schemes = ROWS
    numerics = FP8_TOKENS
    limits = FP8_EXPERTS_LIMITS
    layout = "triton.rows"
    error_bound = FP8_EXPERTS_BOUND


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


class MoEGroupedMM(MoEBF16Triton):
    """bfloat16 experts by torch's grouped product at every number of rows."""

    name = "moe_grouped_mm"
    architectures = ("sm_90", "sm_100")  # elsewhere torch loops over experts on the host
    epilogue = MoEEpilogue(
        activations=ACTIVATIONS, alpha=True, limit=True, gated=True, ungated=True, bias=False, mixed_schemes=False, expert_map=True,
        expert_parallel=True, router_weight_on_input=False, routed_scaling=True, shared_experts=False, lora=False,
    )  # fmt: skip
    limits = (ShapeLimit("hidden", multiple=8), ShapeLimit("intermediate", multiple=8))  # rows start at 16 bytes
    rounds_products = True
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
