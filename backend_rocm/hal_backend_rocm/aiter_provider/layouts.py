"""AITER's order of weights, in torch: tiles of 16 rows by 32 columns, in the order in which lanes read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["COLUMNS", "ROWS", "shuffled", "unshuffled"]

#: Rows and columns of a tile.
ROWS, COLUMNS = 16, 32
#: Bytes that a lane reads at once.
_READ = 16


def _tiles(weight: Tensor) -> tuple[int, int, int]:
    n, k = weight.shape[-2:]
    if n % ROWS or k % COLUMNS:
        raise ShapeError("AITER's weight layout", f"[.., {n}, {k}]", f"give multiples of {ROWS} rows and {COLUMNS} columns")
    return n // ROWS, k // COLUMNS, _READ // weight.element_size()


def shuffled(weight: Tensor) -> Tensor:
    """``[.., N, K]`` of bf16, int8 or fp8 in tile order, of the same shape."""
    down, across, read = _tiles(weight)
    tiles = weight.reshape(-1, down, ROWS, across, COLUMNS // read, read)
    return tiles.permute(0, 1, 3, 4, 2, 5).reshape(weight.shape)


def unshuffled(weight: Tensor) -> Tensor:
    """Inverse of :func:`shuffled`."""
    down, across, read = _tiles(weight)
    tiles = weight.reshape(-1, down, across, COLUMNS // read, ROWS, read)
    return tiles.permute(0, 1, 4, 2, 3, 5).reshape(weight.shape)
