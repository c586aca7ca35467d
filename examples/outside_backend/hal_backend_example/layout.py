"""Layout ``example.columns``: one input column after another, so that outputs lie side by side; unsigned codes and a zero point each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hal_core.canonical import QuantizedTensor
from hal_core.errors import ShapeError
from hal_core.schemes import ZeroKind

__all__ = ["Columns", "expand"]


class Columns(nn.Module):
    """One canonical weight ``[.., N, K]``, packed; its tensors are buffers.

    codes: uint8 ``[.., K, N]``, or two codes a byte ``[.., ceil(K/2), N]`` for int4. scales ``[.., G, N]`` in the checkpoint's dtype.
    zeros: uint8 ``[.., G, N]``.
    """

    def __init__(self, weight: QuantizedTensor) -> None:
        super().__init__()
        self.scheme, self.shape = weight.scheme, weight.shape
        for name, tensor in self.pack(weight).items():
            self.register_buffer(name, tensor)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.scheme.granularity.group or self.shape[-1]

    def arguments(self) -> list[Tensor]:
        """As the torch ops take them."""
        return [self.codes, self.scales, self.zeros]

    def pack(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        bits, signed = self.scheme.bits, self.scheme.zero is ZeroKind.NONE
        values = weight.values.view(torch.uint8)
        if signed:  # two's complement to offset binary: the sign bit turns over
            values = values ^ (0x88 if bits == 4 else 0x80)
        zeros = torch.full(weight.scales.shape, 1 << (bits - 1), dtype=torch.uint8) if signed else weight.zeros
        return {name: t.transpose(-1, -2).contiguous() for name, t in (("codes", values), ("scales", weight.scales), ("zeros", zeros))}

    def unpack(self) -> QuantizedTensor:
        """The canonical weight that was packed, bit for bit."""
        values, scales, zeros = (t.transpose(-1, -2).contiguous() for t in self.arguments())
        if self.scheme.zero is ZeroKind.INTEGER:
            return QuantizedTensor(self.scheme, self.shape, values, scales, zeros)
        if self.scheme.bits == 4:
            return QuantizedTensor(self.scheme, self.shape, values ^ 0x88, scales)
        return QuantizedTensor(self.scheme, self.shape, (values ^ 0x80).view(torch.int8), scales)

    def update(self, weight: QuantizedTensor) -> None:
        """Another weight of the same scheme and shape into the same storage."""
        packed = self.pack(weight)
        for name, tensor in packed.items():
            held = getattr(self, name)
            if tensor.dtype != held.dtype or tensor.shape != held.shape:
                raise ShapeError(f"update of {name}", f"{tensor.dtype} {list(tensor.shape)}", f"give {held.dtype} {list(held.shape)}")
            held.copy_(tensor)

    def _apply(self, fn: object, recurse: bool = True) -> Columns:
        # model.to(bfloat16) moves packed tensors and must not round their scales
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, before in kept.items():
            if self._buffers[name].dtype != before.dtype:
                self._buffers[name] = before
        return self


def expand(parts: list[Tensor], k: int, group: int, bits: int) -> Tensor:
    """float32 ``[.., K, N]`` of packed tensors."""
    codes, scales, zeros = parts
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-2).flatten(-3, -2)[..., :k, :]
    columns = torch.arange(k) // group
    return (codes.float() - zeros.float()[..., columns, :]) * scales.float()[..., columns, :]
