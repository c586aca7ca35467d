"""Layout ``triton.rows``: weights that matrix units take as they are, ``[.., N, K]`` as in the canonical tensor, scales as float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hal_core.canonical import QuantizedTensor
from hal_core.codes import effective_scales
from hal_core.errors import ShapeError
from hal_core.schemes import GranularityKind

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LAYOUT", "RowMatrix", "block_of"]

LAYOUT = "triton.rows"


def block_of(block: object) -> tuple[int, int] | None:
    """A block's shape as a pair of numbers, whatever sequence a configuration holds it in; None for none."""
    if block is None:
        return None
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ShapeError("weight block", f"{block!r}", "give two positive numbers, rows and columns")
    return block[0], block[1]


class RowMatrix(nn.Module):
    """One weight ``[.., N, K]`` of bfloat16, float16 or e4m3; its tensors are buffers.

    Scales are float32, exact for every dtype that files hold: ``[.., N]`` for channel and tensor scales, or the grid of blocks.
    """

    def __init__(self, weight: QuantizedTensor) -> None:
        super().__init__()
        self.scheme, self.shape, self.block = weight.scheme, weight.shape, block_of(weight.scheme.granularity.block)
        self.stored = None if weight.scales is None else weight.scales.dtype
        for name, tensor in self._packed(weight).items():
            self.register_buffer(name, tensor)

    def _packed(self, weight: QuantizedTensor) -> dict[str, Tensor | None]:
        values = weight.values.contiguous()
        if weight.scales is None:
            return {"weight": values, "scales": None}
        scales = effective_scales(weight.scales, None).float()
        if self.block is None:
            scales = scales.expand(*self.shape[:-1], 1).squeeze(-1)
        return {"weight": values, "scales": scales.contiguous()}

    def unpack(self) -> QuantizedTensor:
        """The canonical tensor that was packed, bit for bit."""
        held = self._buffers["scales"]
        if held is None or self.stored is None:
            return QuantizedTensor(self.scheme, self.shape, self.get_buffer("weight"))
        if self.block is None:
            rows = 1 if self.scheme.granularity.kind is GranularityKind.TENSOR else self.shape[-2]
            held = held[..., :rows].unsqueeze(-1)
        if self.stored is torch.uint8:  # E8M0: a power of two as its exponent, 255 for NaN
            scales = torch.where(held.isnan(), 255, torch.frexp(held)[1] + 126).to(torch.uint8)
        else:
            scales = held.to(self.stored)
        return QuantizedTensor(self.scheme, self.shape, self.get_buffer("weight"), scales)

    def update(self, weight: QuantizedTensor) -> None:
        """Copy another weight of the same scheme and shape into the same storage."""
        if (weight.scheme, weight.shape) != (self.scheme, self.shape):
            found = f"{weight.scheme} {list(weight.shape)}, prepared {self.scheme} {list(self.shape)}"
            raise ShapeError("update of a prepared weight", found, "prepare a new op for another scheme or shape")
        for name, tensor in self._packed(weight).items():
            if tensor is not None:
                self.get_buffer(name).copy_(tensor)

    def _apply(self, fn: object, recurse: bool = True) -> RowMatrix:
        # Module.to(dtype) must never recast what the checkpoint stored.
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self
