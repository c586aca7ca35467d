"""A canonical tensor kept as buffers, so that it moves with ``.to`` and is saved with the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hal_core.canonical import QuantizedTensor
from hal_core.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["CanonicalWeight"]

#: float32 bytes dequantized at a time: bounds the reference's extra memory without changing a value.
_BLOCK_BYTES = 32 << 20


class CanonicalWeight(nn.Module):
    """Holds one :class:`QuantizedTensor`; ``tensor()`` gives it back over the same storage."""

    def __init__(self, weight: QuantizedTensor) -> None:
        super().__init__()
        self.scheme, self.shape = weight.scheme, weight.shape
        for name, tensor in weight.tensors().items():
            self.register_buffer(name, tensor.detach())

    def _apply(self, fn: object, recurse: bool = True) -> CanonicalWeight:
        # Module.to(dtype) must move but never recast what the checkpoint stored: scales would be rounded silently.
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def tensor(self) -> QuantizedTensor:
        held = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        return QuantizedTensor(self.scheme, self.shape, **held)

    def update(self, weight: QuantizedTensor) -> None:
        """Copy another weight of the same scheme and shape into the same storage."""
        if (weight.scheme, weight.shape) != (self.scheme, self.shape):
            raise ShapeError(
                "update of a prepared weight", f"{weight.scheme} {list(weight.shape)}, prepared {self.scheme} {list(self.shape)}",
                "prepare a new op for another scheme or shape",
            )  # fmt: skip
        for name, tensor in weight.tensors().items():
            self.get_buffer(name).copy_(tensor)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Row slices of a matrix ``[N, K]`` with their float32 weights, a bounded amount at a time."""
        weight = self.tensor()
        n, k = weight.shape[-2:]
        step = n if weight.scheme.granularity.block is not None else max(1, _BLOCK_BYTES // (4 * k))
        for start in range(0, n, step):
            stop = min(start + step, n)
            part = weight if step >= n else weight.rows(start, stop)
            yield slice(start, stop), part.dequantize()

    def multiply(self, x: Tensor) -> Tensor:
        """``x [M, K] float32`` times the dequantized weight transposed: ``[M, N] float32``."""
        out = torch.empty(x.shape[0], self.shape[-2], dtype=torch.float32, device=x.device)
        for rows, weight in self.blocks():
            out[:, rows] = x @ weight.T
        return out
