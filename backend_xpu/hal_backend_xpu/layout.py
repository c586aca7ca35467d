"""Layout ``xpu.words``: four-bit weights in 32-bit words of eight consecutive columns, neighbouring outputs side by side.

``codes int32 [.., K/8, N]``: a lane that stands for an output reads one word, its neighbours the next ones. Codes are stored as 0..15 (a
signed one plus 8), the first in the lowest bits. Scales, zeros and minima are ``[.., groups, N]`` in their own dtype. Nothing is padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.canonical import QuantizedTensor, pack_nibbles, unpack_nibbles
from hal_core.schemes import Granularity, WeightScheme, ZeroKind
from hal_core.transforms import GroupToChannel
from hal_core.triton.layout import StepMatrix

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FLOATS", "LAYOUT", "WordMatrix", "int8_rows", "pack_bytes"]

LAYOUT = "xpu.words"
#: Floats as the kernels number them.
FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class WordMatrix(StepMatrix):
    """One weight ``[.., N, K]``; with act-order in the order of the groups, and ``perm [.., K]`` says which input each column takes."""

    def _words(self, values: Tensor, perm: Tensor | None) -> Tensor:
        lead = self.shape[:-2]
        words = torch.empty(*lead, self.k // 8, self.n, dtype=torch.int32, device=values.device)
        flat, orders = words.view(-1, self.k // 8, self.n), None if perm is None else perm.view(-1, self.k)
        for index, matrix in enumerate(values.reshape(-1, *values.shape[-2:])):
            fields = self._fields(matrix)
            ordered = fields if orders is None else fields[:, orders[index].long()]
            flat[index] = pack_nibbles(ordered).view(torch.int32).t()
        return words

    def _unpacked(self, words: Tensor) -> Tensor:
        return unpack_nibbles(words.transpose(-1, -2).contiguous().view(torch.uint8), self.k)

    def _spread(self, grid: Tensor) -> Tensor:
        return grid.expand(*self.shape[:-1], grid.shape[-1]).transpose(-1, -2).contiguous()


def pack_bytes(values: Tensor) -> Tensor:
    """int8 ``[.., N, K]`` to words of four consecutive columns, ``int32 [.., K/4, N]``: the B operand of an int8 product."""
    return values.contiguous().view(torch.int32).transpose(-1, -2).contiguous()


def int8_rows(codes: Tensor, scales: Tensor, zeros: Tensor | None, k: int, group: int) -> tuple[Tensor, Tensor]:
    """Packed four-bit experts ``[E, K/8, N]`` folded into int8 ones: words ``int32 [E, K/4, N]`` and float32 scales ``[E, N]``.

    Raises:
        UnfitWeightsError: this would change a weight by more than the transform's bound.
    """
    experts, _, n = codes.shape
    scheme = WeightScheme("int4", Granularity.groups(group), ZeroKind.NONE if zeros is None else ZeroKind.INTEGER)
    words = torch.empty(experts, k // 4, n, dtype=torch.int32, device=codes.device)
    rows = torch.empty(experts, n, dtype=torch.float32, device=codes.device)
    for index in range(experts):
        nibbles = codes[index].t().contiguous().view(torch.uint8)
        own_zeros = None if zeros is None else zeros[index].t().contiguous()
        values = nibbles ^ 0x88 if zeros is None else nibbles
        weight = GroupToChannel().apply(QuantizedTensor(scheme, (n, k), values, scales[index].t().contiguous(), own_zeros))
        assert weight.scales is not None  # the transform gives one a row
        words[index], rows[index] = pack_bytes(weight.values), weight.scales.squeeze(-1)
    return words, rows
