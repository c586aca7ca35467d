"""A canonical tensor kept as buffers, so that it moves with ``.to`` and is saved with the module.

Codes of 2, 3, 5, 6 and 7 bits, a byte each in canonical form, are held as a bit stream: memory stays near the checkpoint's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from hal_core.canonical import QuantizedTensor
from hal_core.errors import ShapeError
from hal_core.fields import join_fields, split_fields
from hal_core.schemes import ZeroKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["CanonicalWeight"]

#: float32 bytes dequantized at a time: bounds the reference's extra memory without changing a value.
_BLOCK_BYTES = 32 << 20


class CanonicalWeight(nn.Module):
    """Holds one :class:`QuantizedTensor`; ``tensor()`` gives it back, over the same storage where its codes fill their bytes."""

    def __init__(self, weight: QuantizedTensor) -> None:
        super().__init__()
        self.scheme, self.shape = weight.scheme, weight.shape
        self.streamed = self.scheme.dtype.startswith("int") and self.scheme.bits not in (4, 8)
        for name, tensor in weight.tensors().items():
            self.register_buffer(name, self._held(name, tensor.detach()))

    def _held(self, name: str, tensor: Tensor) -> Tensor:
        """A canonical field as it is kept."""
        if name != "values" or not self.streamed:
            return tensor
        # signed codes are cut to two's complement of their width
        return join_fields(tensor.view(torch.uint8) & ((1 << self.scheme.bits) - 1), self.scheme.bits)

    def _canonical(self, outline: QuantizedTensor, values: Tensor) -> QuantizedTensor:
        """``outline`` with the codes of a stream."""
        codes = split_fields(values, self.scheme.bits, self.shape[-1])
        if self.scheme.zero is ZeroKind.NONE:
            sign = 1 << (self.scheme.bits - 1)
            codes = codes.bitwise_xor_(sign).view(torch.int8).sub_(sign)
        return replace(outline, values=codes)

    def _outline(self) -> QuantizedTensor:
        """The canonical tensor; with a stand-in of one element for codes that are a stream."""
        held = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        if self.streamed:
            kind = torch.int8 if self.scheme.zero is ZeroKind.NONE else torch.uint8
            held["values"] = torch.empty(1, dtype=kind, device=held["values"].device).expand(self.shape)
        return QuantizedTensor(self.scheme, self.shape, **held)

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
        """All of it, in canonical form."""
        outline = self._outline()
        return self._canonical(outline, self.get_buffer("values")) if self.streamed else outline

    def expert(self, index: int) -> QuantizedTensor:
        """One matrix of a stack."""
        part = self._outline().expert(index)
        return self._canonical(part, self.get_buffer("values")[index]) if self.streamed else part

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Rows ``start:stop`` of a matrix; in a two-dimensional scale grid ``start`` is the first of a block."""
        part = self._outline().rows(start, stop)
        return self._canonical(part, self.get_buffer("values")[start:stop]) if self.streamed else part

    def gather_rows(self, ids: Tensor) -> QuantizedTensor:
        """Rows ``ids [M]`` of such a matrix, copied."""
        part = self._outline().gather_rows(ids)
        return self._canonical(part, self.get_buffer("values")[ids]) if self.streamed else part

    def input_numbers(self, index: int | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Static scale and zero point of the inputs, ``[]``, where the weight has them; of one matrix of a stack."""
        found = (self._buffers.get("input_scale"), self._buffers.get("input_zero"))
        return found if index is None else (None if found[0] is None else found[0][index], None if found[1] is None else found[1][index])

    def update(self, weight: QuantizedTensor) -> None:
        """Copy another weight of the same scheme and shape into the same storage."""
        if (weight.scheme, weight.shape) != (self.scheme, self.shape):
            raise ShapeError(
                "update of a prepared weight", f"{weight.scheme} {list(weight.shape)}, prepared {self.scheme} {list(self.shape)}",
                "prepare a new op for another scheme or shape",
            )  # fmt: skip
        for name, tensor in weight.tensors().items():
            self.get_buffer(name).copy_(self._held(name, tensor))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Row slices of a matrix ``[N, K]`` with their float32 weights, a bounded amount at a time."""
        n, k = self.shape[-2:]
        block = self.scheme.granularity.block
        whole = 1 if block is None else block[0]  # rows of one block share their scales
        step = max(1, _BLOCK_BYTES // (4 * k) // whole) * whole
        for start in range(0, n, step):
            stop = min(start + step, n)
            part = self.tensor() if step >= n else self.rows(start, stop)
            yield slice(start, stop), part.dequantize()

    def multiply(self, x: Tensor) -> Tensor:
        """``x [M, K] float32`` times the dequantized weight transposed: ``[M, N] float32``."""
        out = torch.empty(x.shape[0], self.shape[-2], dtype=torch.float32, device=x.device)
        for rows, weight in self.blocks():
            out[:, rows] = x @ weight.T
        return out
