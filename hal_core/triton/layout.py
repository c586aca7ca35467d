"""Layout ``triton.steps16``: a bijection between a canonical integer weight and what ``integer_gemm`` reads.

K is cut into steps of sixteen 32-bit words: 128 codes of 4 bits, 64 of 8. A step of one output is contiguous, and so are the steps of
neighbouring outputs: ``codes int32 [.., steps, n_pad, 16]``. Inside a step, plane ``j`` holds columns ``32 j`` to ``32 j + 31``, and
word ``c`` holds columns ``2 c`` and ``2 c + 1`` of each plane, at bits ``b j`` and ``16 + b j``. 4-bit codes are stored as 0..15 (a
signed one plus 8), 8-bit ones in two's complement (an unsigned one less 128). Scales, zeros and minima are ``[.., groups, n_pad]``
in their own dtype. What pads has codes of zero and scales of zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hal_core.canonical import QuantizedTensor, pack_nibbles, unpack_nibbles
from hal_core.errors import ShapeError, UnfitWeightsError
from hal_core.schemes import GranularityKind, ZeroKind

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LAYOUT", "N_MULTIPLE", "StepMatrix", "group_order", "pack_steps", "step_size", "unpack_steps"]

LAYOUT = "triton.steps16"
#: Outputs are padded to whole tiles of the narrowest width.
N_MULTIPLE = 64
_WORDS, _PLANE = 16, 32


def step_size(bits: int) -> int:
    """Columns of one step."""
    return _WORDS * 32 // bits


def pack_steps(codes: Tensor, bits: int) -> Tensor:
    """uint8 fields ``[.., N, K]`` of ``bits`` bits to int32 ``[.., steps, n_pad, 16]``."""
    n, k = codes.shape[-2:]
    step, n_pad = step_size(bits), -(-n // N_MULTIPLE) * N_MULTIPLE
    steps = -(-k // step)
    padded = torch.nn.functional.pad(codes, (0, steps * step - k, 0, n_pad - n))
    # [.., N, steps, plane, word, half]: each becomes 16 bits of a word
    fields = padded.view(*codes.shape[:-2], n_pad, steps, 16 // bits, _WORDS, 2)
    halves = torch.zeros(fields.shape[:-3] + fields.shape[-2:], dtype=torch.int32, device=codes.device)
    for plane in range(16 // bits):
        halves |= fields[..., plane, :, :].int() << (bits * plane)
    words = halves[..., 0] | (halves[..., 1] << 16)
    return words.transpose(-2, -3).contiguous()


def unpack_steps(words: Tensor, n: int, k: int, bits: int) -> Tensor:
    """Inverse of :func:`pack_steps`: uint8 ``[.., n, k]``."""
    rows = words.transpose(-2, -3)[..., :n, :, :]
    shifts = torch.tensor([[bits * plane, 16 + bits * plane] for plane in range(16 // bits)], device=words.device, dtype=torch.int32)
    fields = (rows[..., None, :, None] >> shifts[:, None, :]) & ((1 << bits) - 1)
    return fields.to(torch.uint8).reshape(*rows.shape[:-2], -1)[..., :k].contiguous()


def group_order(g_idx: Tensor, group: int) -> Tensor:
    """Columns sorted by group, int32 ``[.., K]``.

    Raises:
        UnfitWeightsError: a group has not its full number of columns (the last one: the rest).
    """
    order = torch.argsort(g_idx, dim=-1, stable=True)
    expected = torch.arange(g_idx.shape[-1], device=g_idx.device) // group
    if not torch.equal(g_idx.gather(-1, order), expected.expand(g_idx.shape).to(g_idx.dtype)):
        raise UnfitWeightsError("g_idx", f"groups that do not have {group} columns each", "use policy require:reference for it")
    return order.int()


def _columns(codes: Tensor, order: Tensor) -> Tensor:
    return codes.gather(-1, order.long().unsqueeze(-2).expand(codes.shape))


class StepMatrix(nn.Module):
    """One weight ``[.., N, K]`` of 4 or 8 bits; its packed tensors are buffers.

    With act-order the columns are packed in the order of their groups, and ``perm [.., K] int32`` says which input each takes.
    """

    def __init__(self, weight: QuantizedTensor) -> None:
        super().__init__()
        self.scheme, self.shape = weight.scheme, weight.shape
        for name, tensor in self._packed(weight).items():
            self.register_buffer(name, tensor)

    @property
    def n(self) -> int:
        return self.shape[-2]

    @property
    def k(self) -> int:
        return self.shape[-1]

    @property
    def group(self) -> int:
        """Columns of one scale; all of them for channel and tensor scales."""
        return min(self.scheme.granularity.group or self.k, self.k)

    @property
    def grouped(self) -> bool:
        """Whether a row has several scales."""
        return self.scheme.granularity.kind is GranularityKind.GROUP and self.group < self.k

    def _packed(self, weight: QuantizedTensor) -> dict[str, Tensor | None]:
        if weight.scales is None:
            raise ShapeError(f"{weight.scheme} weight", "has no scales", "give a canonical quantized weight")
        perm = None if weight.g_idx is None else group_order(weight.g_idx, self.group)
        grids = {"scales": weight.scales, "zeros": weight.zeros, "mins": weight.mins}
        packed = {name: None if grid is None else self._spread(grid) for name, grid in grids.items()}
        return {"codes": self._words(weight.values, perm), **packed, "perm": perm}

    def _words(self, values: Tensor, perm: Tensor | None) -> Tensor:
        """Packed codes, one matrix after another: unpacked ones take several times their memory."""
        lead, bits = self.shape[:-2], self.scheme.bits
        steps, n_pad = -(-self.k // step_size(bits)), -(-self.n // N_MULTIPLE) * N_MULTIPLE
        words = torch.empty(*lead, steps, n_pad, _WORDS, dtype=torch.int32, device=values.device)
        flat, orders = words.view(-1, steps, n_pad, _WORDS), None if perm is None else perm.view(-1, self.k)
        for index, matrix in enumerate(values.reshape(-1, *values.shape[-2:])):
            fields = self._fields(matrix)
            flat[index] = pack_steps(fields if orders is None else _columns(fields, orders[index]), bits)
        return words

    def _fields(self, values: Tensor) -> Tensor:
        """Codes of one matrix as the layout stores them, uint8 ``[N, K]``."""
        if self.scheme.bits == 4:
            nibbles = unpack_nibbles(values, self.k)
            return nibbles ^ 8 if self.scheme.zero is ZeroKind.NONE else nibbles
        fields = values.view(torch.uint8)
        return fields if self.scheme.zero is ZeroKind.NONE else fields ^ 128

    def _spread(self, grid: Tensor) -> Tensor:
        """``[.., N or 1, G]`` to ``[.., G, n_pad]``: a scale of the whole tensor stands at every output."""
        rows = grid.expand(*self.shape[:-1], grid.shape[-1]).transpose(-1, -2)
        return torch.nn.functional.pad(rows, (0, -self.n % N_MULTIPLE)).contiguous()

    def unpack(self) -> QuantizedTensor:
        """The canonical tensor that was packed, bit for bit."""
        codes = self._unpacked(self.get_buffer("codes"))
        perm, g_idx = self._buffers["perm"], None
        if perm is not None:
            inverse = torch.argsort(perm.long(), dim=-1)
            codes, g_idx = _columns(codes, inverse), (inverse // self.group).int()
        values = self._values(codes)
        rows = 1 if self.scheme.granularity.kind is GranularityKind.TENSOR else self.n

        def grid(name: str) -> Tensor | None:
            held = self._buffers[name]
            # a clone, so that strides are plain also where a dimension is one
            return None if held is None else held[..., :rows].transpose(-1, -2).clone(memory_format=torch.contiguous_format)

        return QuantizedTensor(self.scheme, self.shape, values, grid("scales"), grid("zeros"), grid("mins"), g_idx)

    def _unpacked(self, words: Tensor) -> Tensor:
        """Codes as the layout stores them, uint8 ``[.., N, K]``."""
        return unpack_steps(words, self.n, self.k, self.scheme.bits)

    def _values(self, fields: Tensor) -> Tensor:
        """Inverse of :meth:`_fields`."""
        signed = self.scheme.zero is ZeroKind.NONE
        if self.scheme.bits == 4:
            return pack_nibbles(fields ^ 8 if signed else fields)
        return fields.view(torch.int8) if signed else fields ^ 128

    def update(self, weight: QuantizedTensor) -> None:
        """Re-lay another weight of the same scheme and shape into the same storage."""
        if (weight.scheme, weight.shape) != (self.scheme, self.shape):
            found = f"{weight.scheme} {list(weight.shape)}, prepared {self.scheme} {list(self.shape)}"
            raise ShapeError("update of a prepared weight", found, "prepare a new op for another scheme or shape")
        for name, tensor in self._packed(weight).items():
            if tensor is not None:
                self.get_buffer(name).copy_(tensor)

    def _apply(self, fn: object, recurse: bool = True) -> StepMatrix:
        # Module.to(dtype) must never recast packed scales: the kernels read them in the checkpoint's own dtype.
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self
