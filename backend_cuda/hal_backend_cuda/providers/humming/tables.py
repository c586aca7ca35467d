"""Humming's launch tables: which tile serves how many rows, joined so that both products of experts share one sort of the rows."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockTable", "Row", "distinct", "joined"]

#: Rows above the first number, up to and with the second; the tile's settings in Humming's words.
Row = tuple[int, int, "dict[str, Any]"]


@dataclass(frozen=True)
class BlockTable:
    """Rows of a sort's block, by the number of rows of a product. ends: last number of each interval, rising."""

    ends: tuple[int, ...]
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> BlockTable:
        return cls(tuple(high for _, high, _ in rows), tuple(int(tile["block_shape"][0]) for _, _, tile in rows))

    def block(self, rows: int) -> int:
        """The block that serves ``rows``."""
        return self.blocks[min(bisect.bisect_left(self.ends, rows), len(self.blocks) - 1)]

    def capacity(self, rows: int, experts: int) -> int:
        """Places that a sort of ``rows`` can fill: every expert that is hit may leave a block nearly empty."""
        block = self.block(rows)
        places = rows + min(experts, rows) * (block - 1)
        return -(-places // block) * block


def joined(first: Sequence[Row], second: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Both tables over common intervals, each with the same block in both.

    The first product's block holds. Where the second's own tile has another one, its nearest tile with that block serves; if it
    has none, the first takes its nearest tile with the second's block.
    """
    ends = sorted({high for _, high, _ in (*first, *second)})
    left: list[Row] = []
    right: list[Row] = []
    low = 0
    for high in ends:
        one, two = _serving(first, high), _serving(second, high)
        match = _nearest(second, _block(one), high)
        if match is None:
            found = _nearest(first, _block(two), high)
            if found is None:
                raise ValueError(f"no block of rows is in both tables at {high} rows")
            one, match = found, two
        left.append((low, high, one))
        right.append((low, high, match))
        low = high
    return _merged(left, right)


def distinct(rows: Sequence[Row]) -> int:
    """How many different tiles a table has."""
    return len({repr(sorted(tile.items())) for _, _, tile in rows})


def _block(tile: dict[str, Any]) -> int:
    return int(tile["block_shape"][0])


def _serving(rows: Sequence[Row], count: int) -> dict[str, Any]:
    return next((tile for low, high, tile in rows if low < count <= high), rows[-1][2])


def _nearest(rows: Sequence[Row], block: int, count: int) -> dict[str, Any] | None:
    fitting = [(max(low + 1 - count, count - high, 0), tile) for low, high, tile in rows if _block(tile) == block]
    return min(fitting, key=lambda pair: pair[0])[1] if fitting else None


def _merged(left: list[Row], right: list[Row]) -> tuple[list[Row], list[Row]]:
    """Neighbours with equal tiles in both tables as one interval: fewer rows to search at a launch."""
    out: tuple[list[Row], list[Row]] = ([], [])
    for one, two in zip(left, right, strict=True):
        if out[0] and (out[0][-1][2], out[1][-1][2]) == (one[2], two[2]):
            out[0][-1], out[1][-1] = (out[0][-1][0], *one[1:]), (out[1][-1][0], *two[1:])
        else:
            out[0].append(one)
            out[1].append(two)
    return out
