"""Layout ``cpu.tile16``: a bijection between a canonical tensor and what every kernel of this backend reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hal_backend_cpu import _native
from hal_core.canonical import QuantizedTensor, pack_nibbles, unpack_nibbles
from hal_core.errors import ShapeError, UnfitWeightsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["PackedMatrix", "joined"]


class PackedMatrix(nn.Module):
    """One weight ``[.., N, K]`` in tiles of 16 outputs; its packed tensors are buffers.

    With act-order the columns are packed in the order of their groups and ``perm [.., K] int32`` says which input each
    column takes, so that kernels see plain groups.
    """

    def __init__(self, weight: QuantizedTensor) -> None:
        super().__init__()
        self.scheme, self.shape = weight.scheme, weight.shape
        for name, tensor in self._packed(weight).items():
            self.register_buffer(name, tensor)
        self.on_meta = self._buffers["codes"].is_meta
        #: n, k, group and bits, as the native ops take them.
        self.sizes = (self.n, self.k, self.group, self.scheme.bits)

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

    def arguments(self) -> tuple[Tensor | None, ...]:
        """Codes, scales, zeros, mins and permutation, as the native ops take them."""
        # Not by attribute: torch finds a buffer only after a failed look-up, which costs more than the rest of a small call.
        own = self._buffers
        return (own["codes"], own["scales"], own["zeros"], own["mins"], own["perm"])

    def update(self, weight: QuantizedTensor) -> None:
        """Re-lay another weight of the same scheme and shape into the same storage."""
        if (weight.scheme, weight.shape) != (self.scheme, self.shape):
            raise ShapeError(
                "update of a prepared weight", f"{weight.scheme} {list(weight.shape)}, prepared {self.scheme} {list(self.shape)}",
                "prepare a new op for another scheme or shape",
            )  # fmt: skip
        for name, tensor in self._packed(weight).items():
            if tensor is not None:
                if tensor.dtype != getattr(self, name).dtype:
                    found = f"dtype {tensor.dtype}, prepared {getattr(self, name).dtype}"
                    raise ShapeError(f"update of {name}", found, "keep the dtype of scales")
                getattr(self, name).copy_(tensor)

    def _apply(self, fn: object, recurse: bool = True) -> PackedMatrix:
        # Module.to(dtype) must never recast packed scales: the kernels read them in the checkpoint's own dtype.
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, before in kept.items():
            if before is not None and self._buffers[name].dtype != before.dtype:
                self._buffers[name] = before
        self.on_meta = self._buffers["codes"].is_meta
        return self

    def _packed(self, weight: QuantizedTensor) -> dict[str, Tensor | None]:
        values, perm = weight.values, None
        if weight.g_idx is not None:
            perm = _group_order(weight.g_idx, self.group)
            values = _take_columns(values, perm, self.k, weight.scheme.bits)
        lead_rows = (*self.shape[:-1], weight.scales.shape[-1])
        return {
            "codes": _native.pack(values, self.k, weight.scheme.bits),
            # a per-tensor scale is spread over the rows: the kernels know only rows
            "scales": _native.pack_groups(weight.scales.expand(lead_rows)),
            "zeros": None if weight.zeros is None else _native.pack_groups(weight.zeros.expand(lead_rows)),
            "mins": None if weight.mins is None else _native.pack_groups(weight.mins.expand(lead_rows)),
            "perm": perm,
        }

    def unpack(self) -> QuantizedTensor:
        """The canonical tensor that was packed, bit for bit."""
        bits = self.scheme.bits
        signed = bits == 8 and self.scheme.zero.value == "none"
        values = _native.unpack(self.codes, self.n, self.k, bits, signed=signed)
        g_idx = None
        if self.perm is not None:
            inverse = torch.argsort(self.perm.long(), dim=-1).int()
            values = _take_columns(values, inverse, self.k, bits)
            g_idx = (inverse // self.group).int()
        rows = 1 if self.scheme.granularity.kind.value == "tensor" else self.n

        def grid(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else _native.unpack_groups(tensor, self.n)[..., :rows, :]

        return QuantizedTensor(self.scheme, self.shape, values, grid(self.scales), grid(self.zeros), grid(self.mins), g_idx)


def joined(parts: Sequence[PackedMatrix]) -> tuple[Tensor | None, ...] | None:
    """:meth:`PackedMatrix.arguments` of one matrix with the outputs of several; their packed tensors become views of its own.

    None where they do not fit together: they differ in more than their number of outputs, have act-order, or a last tile that is not full.
    """
    first = parts[0]
    if any((p.scheme, p.k) != (first.scheme, first.k) or p.n % _native.TILE or p.perm is not None for p in parts):
        return None
    if any(mine.dtype != theirs.dtype for p in parts for mine, theirs in zip(p.buffers(), first.buffers(), strict=True)):
        return None
    whole_of: dict[str, Tensor] = {}
    for name in [name for name, tensor in first._buffers.items() if tensor is not None]:
        whole = _native.join([p._buffers[name] for p in parts])
        for part, view in zip(parts, whole.split([p.n // _native.TILE for p in parts]), strict=True):
            part._buffers[name] = view
        whole_of[name] = whole
    return tuple(whole_of.get(name) for name in ("codes", "scales", "zeros", "mins", "perm"))


def _group_order(g_idx: Tensor, group: int) -> Tensor:
    """Columns sorted by group; raises unless every group has its full number of columns, the last one the rest."""
    perm = torch.argsort(g_idx, dim=-1, stable=True)
    expected = torch.arange(g_idx.shape[-1], device=g_idx.device) // group
    if not torch.equal(g_idx.gather(-1, perm), expected.expand(g_idx.shape).to(g_idx.dtype)):
        raise UnfitWeightsError("g_idx", f"groups that do not have {group} columns each", "use policy require:reference for it")
    return perm.int()


def _take_columns(values: Tensor, perm: Tensor, k: int, bits: int) -> Tensor:
    """Columns in the order of ``perm [.., K]``; one matrix at a time, since 4-bit codes are widened meanwhile."""
    if values.dim() > 2:
        return torch.stack([_take_columns(v, p, k, bits) for v, p in zip(values, perm, strict=True)])
    if bits != 4:
        return values[:, perm.long()]
    return pack_nibbles(unpack_nibbles(values, k)[:, perm.long()])
