"""AITER's orders of weights and scales, in torch; each with its inverse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.canonical import pack_nibbles, unpack_nibbles
from hal_core.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "COLUMNS", "ROWS", "int4_words", "interleaved", "packed_int4", "scale_tiles", "separated", "shuffled", "unpacked_int4", "unshuffled",
    "unshuffled_scales",
]  # fmt: skip

#: Rows and columns of a tile.
ROWS, COLUMNS = 16, 32
#: Bytes that a lane reads at once.
_READ = 16
#: Rows and groups of a tile of E8M0 scales.
_SCALE_ROWS, _SCALE_GROUPS = 32, 8
#: Of eight int4 codes of a word, from its lowest bits up: those of even places before those of odd ones.
_EVENS_FIRST = (0, 2, 4, 6, 1, 3, 5, 7)


def _tiles(weight: Tensor) -> tuple[int, int]:
    n, k = weight.shape[-2:]
    if n % ROWS or k % COLUMNS:
        raise ShapeError("AITER's weight layout", f"[.., {n}, {k}]", f"give multiples of {ROWS} rows and {COLUMNS} columns")
    return n // ROWS, k // COLUMNS


def shuffled(weight: Tensor, read: int | None = None) -> Tensor:
    """``[.., N, K]`` in tiles of 16 rows by 32 columns, in the order in which lanes read them; of the same shape.

    read: elements that a lane reads at once; None for those of 16 bytes.
    """
    (down, across), read = _tiles(weight), read or _READ // weight.element_size()
    tiles = weight.reshape(-1, down, ROWS, across, COLUMNS // read, read)
    return tiles.permute(0, 1, 3, 4, 2, 5).reshape(weight.shape)


def unshuffled(weight: Tensor, read: int | None = None) -> Tensor:
    """Inverse of :func:`shuffled`."""
    (down, across), read = _tiles(weight), read or _READ // weight.element_size()
    tiles = weight.reshape(-1, down, across, COLUMNS // read, ROWS, read)
    return tiles.permute(0, 1, 4, 2, 3, 5).reshape(weight.shape)


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Two ``[.., N, K]`` as one ``[.., 2 N, K]``: 16 rows of the first, 16 of the second, and so on."""
    rows = gate.shape[-2]
    if rows % ROWS or gate.shape != up.shape:
        found = f"{list(gate.shape)} and {list(up.shape)}"
        raise ShapeError("AITER's interleaved gate and up", found, f"give equal shapes, of a multiple of {ROWS} rows")
    striped = [part.unflatten(-2, (rows // ROWS, 1, ROWS)) for part in (gate, up)]
    return torch.cat(striped, dim=-3).flatten(-4, -2)


def separated(both: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of :func:`interleaved`."""
    striped = both.unflatten(-2, (-1, 2, ROWS))
    return striped[..., 0, :, :].flatten(-3, -2), striped[..., 1, :, :].flatten(-3, -2)


def scale_tiles(scales: Tensor) -> Tensor:
    """E8M0 bytes ``[.., N, G]`` in tiles of 32 rows by 8 groups, two by two of each in one word; ``[.. N, G]``, two-dimensional."""
    flat = scales.reshape(-1, scales.shape[-1])
    _check_scales(flat)
    tiles = flat.view(len(flat) // _SCALE_ROWS, 2, ROWS, flat.shape[1] // _SCALE_GROUPS, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).reshape(flat.shape)


def unshuffled_scales(tiles: Tensor) -> Tensor:
    """Inverse of :func:`scale_tiles`, two-dimensional."""
    _check_scales(tiles)
    read = tiles.view(len(tiles) // _SCALE_ROWS, tiles.shape[1] // _SCALE_GROUPS, 4, ROWS, 2, 2)
    return read.permute(0, 5, 3, 1, 4, 2).reshape(tiles.shape)


def _check_scales(flat: Tensor) -> None:
    if flat.dim() != 2 or flat.shape[0] % _SCALE_ROWS or flat.shape[1] % _SCALE_GROUPS:
        fix = f"give multiples of {_SCALE_ROWS} rows and {_SCALE_GROUPS} groups"
        raise ShapeError("AITER's layout of E8M0 scales", f"{list(flat.shape)}", fix)


def int4_words(codes: Tensor) -> Tensor:
    """Signed int4 codes ``[.., K]``, one a byte, as uint8 ``[.., K / 2]``: eight in a word, those of even places in its low half."""
    order = torch.tensor(_EVENS_FIRST, device=codes.device)
    return pack_nibbles(codes.unflatten(-1, (-1, len(_EVENS_FIRST)))[..., order].flatten(-2))


def packed_int4(weight: Tensor) -> Tensor:
    """Canonical int4 ``uint8 [.., N, K / 2]`` as AITER's ``uint32 [.., N, K / 8]``: tiles of which a lane reads 32 codes at once."""
    codes = unpack_nibbles(weight, 2 * weight.shape[-1])
    return int4_words(shuffled(codes, COLUMNS)).view(torch.uint32)


def unpacked_int4(words: Tensor) -> Tensor:
    """Inverse of :func:`packed_int4`."""
    codes = unpack_nibbles(words.view(torch.uint8), 8 * words.shape[-1])
    order = torch.tensor(_EVENS_FIRST, device=codes.device).argsort()
    return pack_nibbles(unshuffled(codes.unflatten(-1, (-1, len(_EVENS_FIRST)))[..., order].flatten(-2), COLUMNS))
