"""The canonical quantized tensor: the one form between every checkpoint format and every kernel layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hal_core.codebooks import CODEBOOKS, codebook
from hal_core.codes import effective_scales
from hal_core.errors import ShapeError
from hal_core.recast import recast
from hal_core.schemes import GranularityKind, WeightScheme, ZeroKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

__all__ = ["QuantizedTensor", "pack_nibbles", "stack", "unpack_nibbles"]

#: Tensors with a row for each row of N.
_ROW_TENSORS = ("values", "scales", "zeros", "mins", "sub_scales", "sub_mins")
_TENSORS = ("values", "scales", "zeros", "mins", "g_idx", "global_scale", "sub_scales", "sub_mins", "input_scale", "input_zero")
_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FP8 = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
    "mxfp8": torch.float8_e4m3fn,
}


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two 4-bit codes per byte along the last dim, even index in the low nibble; ``[.., K]`` to ``[.., ceil(K/2)]``."""
    codes = codes.to(torch.uint8) & 15
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor, k: int) -> Tensor:
    """Inverse of :func:`pack_nibbles`: uint8 codes ``[.., k]``."""
    # one 16-bit word for each byte, its low byte the even code: contiguous writes instead of strided ones
    words = packed.to(torch.int16)
    return recast((words & 15) | ((words & 0xF0) << 4), torch.uint8)[..., :k]


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Logical weight ``[..., N, K]`` (out, in; leading dims are experts).

    values: 4-bit ``uint8 [.., N, ceil(K/2)]`` (even k low; two's complement when the zero kind is none, else codes 0..15);
        other ints one code per byte (``int8`` when signed, ``uint8`` otherwise); fp8 tensors; or the float weight itself.
    scales: file dtype, ``[..,1,1]``, ``[..,N,1]``, ``[..,N,G]`` or ``[..,ceil(N/n),ceil(K/k)]``; may be negative. Of float
        elements, uint8 scales are E8M0: 2 to the power of (byte - 127).
    zeros: ``uint8 [.., N, G]``, the true zero point. mins: float ``[.., N, G]``. g_idx: ``int32 [.., K]``, group of each k.
    With superblocks ``scales`` and ``mins`` have one column for each of them, and each group multiplies its own factors on:
    sub_scales ``int8 [.., N, G]``, and sub_mins ``uint8 [.., N, G]`` where the zero kind is minimum.
    global_scale: ``[..]``, multiplies the scales (nvfp4 only); float64 where the file stores its reciprocal.
    input_scale, input_zero: ``[..]``, of statically quantized inputs, ``x = (q - input_zero) * input_scale``.
    """

    scheme: WeightScheme
    shape: tuple[int, ...]
    values: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    mins: Tensor | None = None
    g_idx: Tensor | None = None
    global_scale: Tensor | None = None
    sub_scales: Tensor | None = None
    sub_mins: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero: Tensor | None = None

    def __post_init__(self) -> None:
        n, k = self.shape[-2:]
        lead = self.shape[:-2]
        packed_k = (k + 1) // 2 if self.scheme.bits == 4 else k
        self._expect("values", self.values, (*lead, n, packed_k))
        if not self.scheme.quantized:
            if self.values.dtype != _FLOATS[self.scheme.dtype] or self.scales is not None:
                raise ShapeError(f"{self.scheme} tensor", f"values are {self.values.dtype} with scales {self.scales is not None}")
            return
        if self.values.dtype != self._storage():
            raise ShapeError(f"{self.scheme} values", f"dtype {self.values.dtype}, expected {self._storage()}")
        grid = (*lead, *self.grid)
        if self.scales is None:
            raise ShapeError(f"{self.scheme} tensor", "has no scales")
        self._expect("scales", self.scales, grid)
        for name, tensor, kind in (("zeros", self.zeros, ZeroKind.INTEGER), ("mins", self.mins, ZeroKind.MINIMUM)):
            if (tensor is not None) != (self.scheme.zero is kind):
                raise ShapeError(f"{self.scheme} tensor", f"{name} {'given' if tensor is not None else 'missing'}")
            if tensor is not None:
                self._expect(name, tensor, grid)
        if (self.g_idx is not None) != self.scheme.act_order:
            raise ShapeError(f"{self.scheme} tensor", f"g_idx {'given' if self.g_idx is not None else 'missing'}")
        if self.g_idx is not None:
            self._expect("g_idx", self.g_idx, (*lead, k))
        self._check_levels()
        self._check_whole()

    def _check_whole(self) -> None:
        """Numbers that each matrix has one of."""
        for name in ("global_scale", "input_scale", "input_zero"):
            tensor = getattr(self, name)
            if tensor is not None:
                self._expect(name, tensor, self.shape[:-2])
        if self.global_scale is not None and self.scheme.dtype != "nvfp4":
            raise ShapeError(f"{self.scheme} tensor", "global_scale given", "only nvfp4 has one")

    def _check_levels(self) -> None:
        """The integer factors of groups are there exactly with superblocks."""
        g = self.scheme.granularity
        for name, tensor, kind in (("sub_scales", self.sub_scales, torch.int8), ("sub_mins", self.sub_mins, torch.uint8)):
            wanted = g.superblock is not None and (kind is torch.int8 or self.scheme.zero is ZeroKind.MINIMUM)
            if (tensor is not None) != wanted:
                raise ShapeError(f"{self.scheme} tensor", f"{name} {'given' if tensor is not None else 'missing'}")
            if tensor is not None and g.group is not None:
                self._expect(name, tensor, (*self.shape[:-1], -(-self.shape[-1] // g.group)))
                if tensor.dtype != kind:
                    raise ShapeError(f"{self.scheme} {name}", f"dtype {tensor.dtype}, expected {kind}")

    def _storage(self) -> torch.dtype:
        if self.scheme.dtype in _FP8:
            return _FP8[self.scheme.dtype]
        signed = self.scheme.zero is ZeroKind.NONE and self.scheme.dtype.startswith("int") and self.scheme.bits != 4
        return torch.int8 if signed else torch.uint8

    def _expect(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise ShapeError(f"{self.scheme} {name} of a weight {list(self.shape)}", f"shape {list(tensor.shape)}, expected {list(shape)}")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of ``scales`` for one matrix."""
        n, k = self.shape[-2:]
        g = self.scheme.granularity
        if g.group is not None:
            return n, -(-k // (g.superblock or g.group))
        if g.block is not None:
            return -(-n // g.block[0]), -(-k // g.block[1])
        return (n, 1) if g.kind is GranularityKind.CHANNEL else (1, 1)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by field name."""
        named = {name: getattr(self, name) for name in _TENSORS}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _with(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QuantizedTensor:
        return QuantizedTensor(self.scheme, shape, **{**self.tensors(), **tensors})

    def expert(self, index: int) -> QuantizedTensor:
        """One matrix of a stack: ``[E, N, K]`` to ``[N, K]``; a view."""
        return self._with({name: tensor[index] for name, tensor in self.tensors().items()}, self.shape[1:])

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Rows ``start:stop`` of N as a view; with block granularity ``start`` is the first row of a block."""
        block = self.scheme.granularity.block
        if block is not None and self.scales is not None:
            if start % block[0]:
                raise ShapeError("row slice", f"row {start} is inside a block of {block[0]}", "start where a block starts")
            stop = min(stop, self.shape[-2])
            grid = self.scales[..., start // block[0] : -(-stop // block[0]), :]
            cut = {"values": self.values[..., start:stop, :], "scales": grid}
            return self._with(cut, (*self.shape[:-2], stop - start, self.shape[-1]))
        parts = {name: t[..., start:stop, :] for name, t in self.tensors().items() if name in _ROW_TENSORS and t.shape[-2] > 1}
        count = len(range(*slice(start, stop).indices(self.shape[-2])))
        if self.shape[-2] == 1:
            return self
        return self._with(parts, (*self.shape[:-2], count, self.shape[-1]))

    def gather_rows(self, ids: Tensor) -> QuantizedTensor:
        """Rows ``ids [M]`` of a matrix, copied; not for block granularity."""
        if self.scheme.granularity.block is not None:
            raise ShapeError("row gather", f"{self.scheme} has a two-dimensional scale grid", "dequantize the whole matrix")
        parts = {name: t for name, t in self.tensors().items() if name in _ROW_TENSORS}
        # a per-tensor scale has one row for all of N and stays as it is, also where N is one
        whole = self.scheme.granularity.kind is GranularityKind.TENSOR
        parts = {name: t if whole and name != "values" else t[ids] for name, t in parts.items()}
        return self._with(parts, (ids.numel(), self.shape[-1]))

    def codes(self) -> Tensor:
        """Integer codes ``[.., N, K]`` (int16, sign-extended when signed), or float values, unscaled."""
        k = self.shape[-1]
        if self.scheme.dtype in CODEBOOKS:
            return codebook(self.scheme.dtype, self.device)[unpack_nibbles(self.values, k).int()]
        if self.scheme.bits == 4 and self.scheme.dtype.startswith("int"):
            codes = unpack_nibbles(self.values, k)
            return ((codes ^ 8).to(torch.int16) - 8) if self.scheme.zero is ZeroKind.NONE else codes.to(torch.int16)
        return self.values.to(torch.int16) if self.scheme.dtype.startswith("int") else self.values

    def dequantize(self) -> Tensor:
        """float32 ``[.., N, K]``: ``(q - zero) * scale`` or ``q * scale + min``, each operation rounded to float32."""
        if not self.scheme.quantized:
            return self.values.float()
        codes = self.codes()
        if self.zeros is not None:
            codes = codes - self._spread(self.zeros).to(torch.int16)
        assert self.scales is not None  # __post_init__ holds it for every quantized scheme
        scales = effective_scales(self.scales, self.global_scale)
        weight = codes.float().mul_(self._spread(self._levelled(scales, self.sub_scales)))
        if self.mins is not None:
            weight += self._spread(self._levelled(self.mins, self.sub_mins))
        return weight

    def _levelled(self, coarse: Tensor, fine: Tensor | None) -> Tensor:
        """float32 scales or minima of each group; with superblocks ``coarse`` times the group's own factor."""
        g = self.scheme.granularity
        if fine is None or g.superblock is None or g.group is None:
            return coarse.float()
        return coarse.float().repeat_interleave(g.superblock // g.group, dim=-1)[..., : fine.shape[-1]].mul_(fine.float())

    def _spread(self, grid: Tensor) -> Tensor:
        """A scale-grid tensor at every element: ``[.., N, G]`` to something that broadcasts with ``[.., N, K]``."""
        n, k = self.shape[-2:]
        if self.g_idx is not None:
            index = self.g_idx.long().unsqueeze(-2).expand(*grid.shape[:-1], k)
            return grid.gather(-1, index)
        g = self.scheme.granularity
        if g.group is not None:
            return grid.repeat_interleave(g.group, dim=-1)[..., :k]
        if g.block is not None:
            return grid.repeat_interleave(g.block[0], dim=-2)[..., :n, :].repeat_interleave(g.block[1], dim=-1)[..., :k]
        return grid


def stack(tensors: Iterable[QuantizedTensor], count: int) -> QuantizedTensor:
    """``count`` experts of one scheme and shape as ``[count, N, K]``; takes one at a time, so it never holds two copies of all.

    Raises:
        ShapeError: another number given, or a scheme or shape differs; the message gives the index.
    """
    first: QuantizedTensor | None = None
    parts: dict[str, Tensor] = {}
    index = -1
    for index, tensor in enumerate(tensors):
        if first is None:
            first = tensor
            parts = {name: torch.empty(count, *t.shape, dtype=t.dtype, device=t.device) for name, t in tensor.tensors().items()}
        if index >= count or (tensor.scheme, tensor.shape) != (first.scheme, first.shape):
            raise ShapeError(
                f"expert {index} of a stack of {count}", f"{tensor.scheme} {list(tensor.shape)} beside {first.scheme} {list(first.shape)}",
                "experts of one matrix must share scheme and shape",
            )  # fmt: skip
        if tensor.tensors().keys() != parts.keys():
            odd = ", ".join(sorted(tensor.tensors().keys() ^ parts.keys()))
            raise ShapeError(f"expert {index} of a stack of {count}", f"only some of the experts have {odd}", "complete the checkpoint")
        for name, t in tensor.tensors().items():
            parts[name][index].copy_(t)
    if first is None or index + 1 != count:
        raise ShapeError("stack of experts", f"{index + 1} given, {count} expected")
    return first._with(parts, (count, *first.shape))
