"""AWQ GEMM's words in canonical order, in plain torch.

The nibbles of a word, lowest first, hold columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hal_core.turn import turn

__all__ = ["COLUMNS", "NIBBLES", "pair_rows"]

#: Column of the eight held by each nibble of a word, and where each column's nibble is.
COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
#: Bytes of words in work at a time: about a core's second-level cache.
_CHUNK = 1 << 20


def pair_rows(qweight: Tensor) -> Tensor:
    """Words ``[K, N/8]`` to canonical nibble pairs uint8 ``[N, ceil(K/2)]``.

    Some columns of words at a time: what is in work stays in the processor's cache.
    """
    k, words = qweight.shape
    if k % 2:
        qweight = pad(qweight, (0, 0, 0, 1))
    half = (k + 1) // 2
    out = torch.empty(words, 2, 2, 2, half, dtype=torch.uint8)
    step = max(16, _CHUNK // (8 * half))
    for start in range(0, words, step):
        _pair_words(qweight.view(half, 2, words)[..., start : start + step], out[start : start + step])
    return out.view(words * 8, half)


def _pair_words(rows: Tensor, out: Tensor) -> None:
    """int32 ``[K/2, 2, W]`` to ``out`` uint8 ``[W, 2, 2, 2, K/2]``: the eight columns of each word, each a row of nibble pairs.

    Two rows exchange nibbles, so that each byte holds one column of both; then the bytes are turned, in blocks of rows.
    """
    half, _, words = rows.shape
    even, odd = rows[:, 0], rows[:, 1]
    pairs = torch.empty(2, half, words, dtype=torch.int32)
    moved = (even >> 4).bitwise_xor_(odd).bitwise_and_(0x0F0F0F0F)
    torch.bitwise_xor(odd, moved, out=pairs[1])
    torch.bitwise_xor(even, moved.bitwise_left_shift_(4), out=pairs[0])
    blocks = next(count for count in (8, 4, 2, 1) if half % count == 0)
    turned = turn(pairs.view(torch.uint8).view(2 * blocks, half // blocks, 4 * words))
    # of the 8 nibbles, the lowest bit of the index chose the row of `pairs`, the upper two the byte: see COLUMNS
    columns = turned.view(2, blocks, words, 2, 2, half // blocks).permute(2, 4, 0, 3, 1, 5)
    out.view(words, 2, 2, 2, blocks, half // blocks).copy_(columns)
