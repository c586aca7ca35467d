"""Bit fields of GGUF blocks: planes of bytes whose fields lie a stride apart, and nibbles in two halves."""

from __future__ import annotations

import torch
from torch import Tensor

from hal_core.fields import split_last
from hal_core.recast import recast

__all__ = ["Parts", "from_planes", "halves", "nibble_halves", "nibble_pairs", "planes", "raw"]

#: Fields of a canonical tensor by name, each ``[N, blocks, elements of a block]``.
Parts = dict[str, Tensor]


def halves(blocks: Tensor, start: int) -> Tensor:
    """The fp16 at a byte offset of every block: ``[.., 1]``."""
    return recast(blocks[..., start : start + 2], torch.float16)


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, along its last dim."""
    return recast(tensor, torch.uint8)


def planes(data: Tensor, width: int, bits: int) -> Tensor:
    """Codes of bytes ``[.., c*width]``: in each run of ``width`` bytes the lowest fields come first, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    return ((split_last(data, -1, 1, width) >> shifts) & ((1 << bits) - 1)).flatten(-3)


def from_planes(codes: Tensor, width: int, bits: int) -> Tensor:
    """Inverse of :func:`planes`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    return (split_last(codes, -1, 8 // bits, width) << shifts).sum(-2, dtype=torch.uint8).flatten(-2)


def nibble_pairs(data: Tensor, width: int) -> Tensor:
    """:func:`planes` of 4 bits, two neighbours to a byte as canonical tensors hold them: ``[.., c*width]`` bytes again.

    Neighbouring elements are neighbouring bytes: as 16-bit words their nibbles pair up in a few whole-word steps.
    """
    words = split_last(recast(data, torch.int16), -1, width // 2)
    low = (words & 15) | ((words >> 4) & 0xF0)
    high = ((words >> 4) & 15) | ((words >> 8) & 0xF0)
    return torch.stack([low.to(torch.uint8), high.to(torch.uint8)], dim=-2).flatten(-3)


def nibble_halves(pairs: Tensor, width: int) -> Tensor:
    """Inverse of :func:`nibble_pairs`."""
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
    return from_planes(codes, width, 4)
