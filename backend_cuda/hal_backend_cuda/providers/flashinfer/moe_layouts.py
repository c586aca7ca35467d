"""Orders of rows and bytes that FlashInfer's blocks of experts read, as plain torch, each with its inverse.

Halves: the first product's rows are up first, then gate. ``shuffled`` and ``gated`` are orders of rows, ``blocked`` of columns,
``interleaved`` of scales. The functions of FlashInfer that run without a GPU give the same bytes; the tests compare.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hal_core.recast import recast

__all__ = [
    "blocked",
    "deinterleaved",
    "first_rows",
    "gated_order",
    "interleaved",
    "inverse",
    "padded_halves",
    "padded_to",
    "shuffle_order",
    "unblocked",
    "up",
]

#: Rows and scale columns of one tile of interleaved scales.
_ROWS, _COLUMNS = 128, 4


def up(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def shuffle_order(rows: int, tile: int) -> Tensor:
    """int64 ``[rows]``: which row comes at each place, so that a thread's accumulators lie together.

    In every 16 rows (32 where ``tile`` is a multiple of 128), row ``8 a + b`` of the result is row ``a + (size / 8) b``.
    """
    size = 32 if tile % 128 == 0 else 16
    if rows % size:
        raise ValueError(f"{rows} rows are not a multiple of {size}")
    inside = torch.arange(size).view(8, size // 8).T.reshape(-1)
    return (torch.arange(0, rows, size).unsqueeze(1) + inside).reshape(-1)


def gated_order(rows: int) -> Tensor:
    """int64 ``[rows]``: the two halves row by row in turn."""
    if rows % 2:
        raise ValueError(f"{rows} rows have no halves")
    return torch.arange(rows).view(2, -1).T.reshape(-1)


def first_rows(rows: int, tile: int, *, gated: bool) -> Tensor:
    """int64 ``[rows]``: the order of the first product's rows, of its weights and of its scales."""
    order = shuffle_order(rows, tile)
    return gated_order(rows)[order] if gated else order


def inverse(order: Tensor) -> Tensor:
    """The order that undoes one."""
    return torch.argsort(order)


def blocked(matrix: Tensor, columns: int) -> Tensor:
    """``[.., M, K]`` to ``[.., K / columns, M, columns]``."""
    *lead, m, k = matrix.shape
    if k % columns:
        raise ValueError(f"{k} columns are not a multiple of {columns}")
    return matrix.reshape(*lead, m, k // columns, columns).transpose(-3, -2).contiguous()


def unblocked(matrix: Tensor) -> Tensor:
    """Inverse of :func:`blocked`."""
    *lead, blocks, m, columns = matrix.shape
    return matrix.transpose(-3, -2).reshape(*lead, m, blocks * columns)


def interleaved(scales: Tensor) -> Tensor:
    """Scales ``[.., N, G]`` in tiles of 128 rows and 4 columns, padded with zeros: ``[.., N', G']``, N' and G' rounded up.

    In a tile the scale of row r, column c is at ``(r % 32) * 16 + (r // 32) * 4 + c``; tiles follow each other along G first.
    """
    *lead, n, g = scales.shape
    tall, wide = up(n, _ROWS), up(g, _COLUMNS)
    data = functional.pad(_movable(scales), (0, wide - g, 0, tall - n))
    tiles = data.reshape(*lead, tall // _ROWS, 4, 32, wide // _COLUMNS, _COLUMNS)
    return recast(_turned(tiles).reshape(*lead, tall, wide), scales.dtype)


def deinterleaved(scales: Tensor, n: int, g: int) -> Tensor:
    """Inverse of :func:`interleaved` for scales that were ``[.., n, g]``."""
    *lead, tall, wide = scales.shape
    tiles = _movable(scales).reshape(*lead, tall // _ROWS, wide // _COLUMNS, 32, 4, _COLUMNS)
    return recast(_turned(tiles).reshape(*lead, tall, wide)[..., :n, :g].contiguous(), scales.dtype)


def _movable(scales: Tensor) -> Tensor:
    """Bytes for element types that torch does not pad or move."""
    return recast(scales.contiguous(), torch.uint8) if scales.itemsize == 1 else scales


def _turned(tiles: Tensor) -> Tensor:
    """The three middle ones of the last five dims in opposite order; its own inverse up to shapes."""
    count = tiles.dim() - 5
    return tiles.permute(*range(count + 1), count + 3, count + 2, count + 1, count + 4).contiguous()


def padded_to(tensor: Tensor, rows: int, columns: int, value: float) -> Tensor:
    """``[.., n, k]`` widened to ``[.., rows, columns]`` with ``value``, in any element type."""
    n, k = tensor.shape[-2:]
    if (n, k) == (rows, columns):
        return tensor
    fill = torch.tensor([value]).to(tensor.dtype)
    plain = _movable(tensor)
    out = torch.full((*tensor.shape[:-2], rows, columns), _movable(fill).item(), dtype=plain.dtype, device=tensor.device)
    out[..., :n, :k] = plain
    return recast(out, tensor.dtype)


def padded_halves(halves: list[Tensor], rows: int, columns: int, value: float) -> Tensor:
    """Each half widened by itself, one below the other: a half's rows never move into the other's."""
    return torch.cat([padded_to(half, rows, columns, value) for half in halves], dim=-2)
