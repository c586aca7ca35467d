"""Tile sizes by architecture and number of rows: plain tables, so that every entry can be compiled ahead of time and tested."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

__all__ = ["Tile", "all_tiles", "linear_tile", "moe_tile"]

T = TypeVar("T")


@dataclass(frozen=True)
class Tile:
    """bm: rows of activations. bn: outputs. split: parts of K that are summed afterwards. bk: columns of a step (float weights only).

    extra: rows beyond bm that are multiplied beside them (integer experts only): sizes of Triton's products are powers of two.
    weights: scales are applied to the weights instead of to the sums (grouped integer weights with bfloat16 activations only).
    options: of AMD's compiler, by name.
    """

    bm: int
    bn: int
    warps: int
    stages: int
    split: int = 1
    bk: int = 64
    weights: bool = False
    extra: int = 0
    options: tuple[tuple[str, int], ...] = ()

    @property
    def rows(self) -> int:
        """Of one tile."""
        return self.bm + self.extra


#: (most rows of an expert on average, tile of gate and up, tile of down) for packed integer weights. Those of sm_90 were measured on
#: an H200 (benchmarks/results), the others follow from what is known of the instructions.
_MOE: dict[str, tuple[tuple[float, Tile, Tile], ...]] = {
    "sm_90": (
        (10, Tile(16, 64, 4, 3), Tile(16, 128, 4, 3)),
        (24, Tile(32, 128, 4, 3), Tile(32, 64, 4, 3)),
        (40, Tile(32, 64, 4, 4), Tile(32, 64, 4, 4)),
        (52, Tile(64, 64, 4, 4), Tile(32, 128, 4, 3, weights=True)),
        (76, Tile(64, 128, 8, 3, extra=16), Tile(64, 64, 4, 3, extra=16)),
        (100, Tile(64, 64, 4, 4), Tile(32, 128, 4, 3, weights=True)),
        (160, Tile(64, 64, 4, 4), Tile(128, 128, 4, 3, weights=True)),
        (math.inf, Tile(128, 128, 8, 4, weights=True), Tile(128, 128, 4, 3, weights=True)),
    ),
    "gfx": (
        (12, Tile(16, 64, 4, 2), Tile(16, 64, 4, 2)),
        (48, Tile(32, 64, 4, 2), Tile(32, 64, 4, 2)),
        (math.inf, Tile(64, 64, 4, 2, weights=True), Tile(64, 64, 4, 2, weights=True)),
    ),
    "": (
        (12, Tile(16, 64, 4, 3), Tile(16, 64, 4, 3)),
        (48, Tile(32, 64, 4, 3), Tile(32, 64, 4, 3)),
        (math.inf, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    ),
}
#: (most rows, tiles that fill the chip, tile): K is split until there are so many.
_LINEAR: dict[str, tuple[tuple[float, int, Tile], ...]] = {
    "sm_90": (
        (16, 800, Tile(16, 64, 4, 3)),
        (32, 400, Tile(32, 64, 4, 3)),
        (64, 384, Tile(64, 64, 4, 3)),
        (math.inf, 300, Tile(128, 64, 4, 3)),
    ),
    "gfx": (
        (16, 1216, Tile(16, 64, 4, 2)),
        (32, 608, Tile(32, 64, 4, 2)),
        (math.inf, 304, Tile(64, 64, 4, 2)),
    ),
    "": (
        (16, 800, Tile(16, 64, 4, 3)),
        (32, 400, Tile(32, 64, 4, 3)),
        (math.inf, 300, Tile(64, 64, 4, 3)),
    ),
}
#: As _MOE, for weights that are multiplied as they are.
_FLOAT: dict[str, tuple[tuple[float, Tile, Tile], ...]] = {
    "sm_90": (
        (10, Tile(16, 64, 4, 4, bk=128), Tile(16, 64, 4, 4, bk=128)),
        (24, Tile(32, 64, 4, 3), Tile(32, 64, 4, 3, bk=128)),
        (96, Tile(64, 64, 4, 3), Tile(64, 128, 4, 3)),
        (math.inf, Tile(128, 128, 8, 3), Tile(128, 128, 4, 3)),
    ),
    "gfx": (
        (12, Tile(16, 64, 4, 2), Tile(16, 64, 4, 2)),
        (48, Tile(32, 64, 4, 2), Tile(32, 64, 4, 2)),
        (math.inf, Tile(64, 64, 4, 2), Tile(64, 128, 4, 2)),
    ),
    "": (
        (12, Tile(16, 64, 4, 3), Tile(16, 64, 4, 3)),
        (48, Tile(32, 64, 4, 3), Tile(32, 64, 4, 3)),
        (math.inf, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    ),
}
#: fp8 with block scales needs room for the sums of a block beside those of all of K.
_FP8: dict[str, tuple[tuple[float, Tile, Tile], ...]] = {
    "sm_90": (
        (10, Tile(16, 64, 4, 4, bk=128), Tile(16, 64, 4, 4, bk=128)),
        (24, Tile(32, 64, 4, 4, bk=128), Tile(32, 64, 4, 4, bk=128)),
        (math.inf, Tile(64, 64, 4, 4, bk=128), Tile(64, 128, 8, 4, bk=128)),
    ),
    "gfx": (
        (12, Tile(16, 64, 4, 2, bk=128), Tile(16, 64, 4, 2, bk=128)),
        (48, Tile(32, 64, 4, 2, bk=128), Tile(32, 64, 4, 2, bk=128)),
        (math.inf, Tile(64, 64, 4, 2, bk=128), Tile(64, 64, 4, 2, bk=128)),
    ),
    "": (
        (12, Tile(16, 64, 4, 3, bk=128), Tile(16, 64, 4, 3, bk=128)),
        (math.inf, Tile(32, 64, 4, 3, bk=128), Tile(32, 64, 4, 3, bk=128)),
    ),
}
_TABLES = {"integer": _MOE, "float": _FLOAT, "fp8": _FP8}
#: Units of 16 rows, as batches of few rows want; registers for two waves on each SIMD. kpack, two units' operands from local memory at
#: once, is no option of gfx950 any more. Rows "gfx" of the tables and these are guesses: no AMD GPU has run them.
_AMD_OPTIONS: dict[str, tuple[tuple[str, int], ...]] = {
    **dict.fromkeys(("gfx90a", "gfx942"), (("kpack", 2), ("matrix_instr_nonkdim", 16), ("waves_per_eu", 2))),
    "gfx950": (("matrix_instr_nonkdim", 16), ("waves_per_eu", 2)),
}


def _rows_of(table: dict[str, T], arch: str) -> T:
    return table.get(arch) or table["gfx" if arch.startswith("gfx") else ""]


def _fitted(tile: Tile, arch: str) -> Tile:
    options = _AMD_OPTIONS.get(arch)
    return replace(tile, options=options) if options else tile


def moe_tile(arch: str, rows: float, kind: str = "integer") -> tuple[Tile, Tile]:
    """Tiles of gate/up and of down for that many rows an expert; kind of weights: "integer", "float" or "fp8"."""
    return next((_fitted(up, arch), _fitted(down, arch)) for most, up, down in _rows_of(_TABLES[kind], arch) if rows <= most)


def linear_tile(arch: str, rows: int, n: int, steps: int, kind: str = "integer") -> Tile:
    """Tile of one matrix; K is split where there are too few tiles otherwise, into parts of four steps at least."""
    most, fill, tile = next(row for row in _rows_of(_LINEAR, arch) if rows <= row[0])
    if kind != "integer":
        tile = next(down for top, _, down in _rows_of(_TABLES[kind], arch) if min(rows, most) <= top)
    tiles = -(-rows // tile.bm) * -(-n // tile.bn)
    split = max(1, min(fill // tiles, steps // 4, 8))
    return replace(_fitted(tile, arch), split=1 << (split.bit_length() - 1))


def all_tiles(arch: str) -> dict[str, tuple[tuple[Tile, Tile], ...]]:
    """Every pair of tiles that experts may be given, by kind of weights."""
    pairs = {kind: _rows_of(table, arch) for kind, table in _TABLES.items()}
    return {kind: tuple((_fitted(up, arch), _fitted(down, arch)) for _, up, down in rows) for kind, rows in pairs.items()}
