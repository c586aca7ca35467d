"""torch's own scaled product as an op: e4m3 weights and activations, a scale for every output and every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.triton.launch import quantize_fp8
from hal_core.triton.modules import TritonLinear
from hal_core.triton.repeat import called, made

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ScaledLinear"]


def _scaled_into(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor) -> None:
    codes, tokens = quantize_fp8(x, None)
    rounded = None if bias is None else made(torch.Tensor.to, bias, torch.bfloat16)
    called(torch._scaled_mm, codes, weight.t(), scale_a=tokens, scale_b=scales[None, :], bias=rounded, out_dtype=out.dtype, out=out)


def _scaled(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    out = _room(x, weight)
    if x.shape[0]:
        _scaled_into(x, weight, scales, bias, out)
    return out


def _room(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16)


_SCALED = torch.library.custom_op(
    "hal_cuda::scaled_linear", _scaled, mutates_args=(), schema="(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor"
)


@_SCALED.register_fake
def _scaled_fake(x, weight, scales, bias):
    return _room(x, weight)


class ScaledLinear(TritonLinear):
    """``y = x @ w.T + bias`` in bfloat16."""

    def traced(self, rows: Tensor) -> Tensor:
        return _SCALED(rows, self.view.weight, self.view.scales, self.view.bias)

    def launched(self, rows: Tensor, out: Tensor) -> None:
        if rows.shape[0]:
            _scaled_into(rows, self.view.weight, self.view.scales, self.view.bias, out)
