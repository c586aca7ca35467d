"""torch's own scaled product as an op: e4m3 weights and activations, a scale for every output and every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.triton.launch import quantize_fp8
from hal_core.triton.modules import TritonLinear

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ScaledLinear"]


def _scaled(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    codes, tokens = quantize_fp8(x, None)
    return torch._scaled_mm(codes, weight.t(), scale_a=tokens, scale_b=scales[None, :], bias=bias, out_dtype=torch.bfloat16)


_SCALED = torch.library.custom_op(
    "hal_cuda::scaled_linear", _scaled, mutates_args=(), schema="(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor"
)


@_SCALED.register_fake
def _scaled_fake(x, weight, scales, bias):
    return x.new_empty(x.shape[0], weight.shape[0])


class ScaledLinear(TritonLinear):
    """``y = x @ w.T + bias`` in bfloat16."""

    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        rows, shape = self.checked(x)
        if not rows.shape[0]:
            return self.room(out, shape)
        product = _SCALED if torch.compiler.is_compiling() else _scaled
        bias = None if self.view.bias is None else self.view.bias.to(torch.bfloat16)
        y = product(rows, self.view.weight, self.view.scales, bias).view(shape)
        return y if out is None else self.room(out, shape).copy_(y)
