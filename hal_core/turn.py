"""Transposed copies of matrices of bytes and of 32-bit words, at the speed of the memory.

torch copies a transposed matrix an element at a time. Its channel shuffle of one pixel is the same permutation, and has a
vectorized kernel for bytes and for float32: three times as fast. Nothing is computed, so the words may be anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["turn"]

_KERNELS = {torch.uint8: torch.uint8, torch.int32: torch.float32, torch.float32: torch.float32}


def turn(matrices: Tensor) -> Tensor:
    """``[.., R, C]`` to a contiguous ``[.., C, R]`` in fresh memory."""
    *lead, rows, columns = matrices.shape
    kind = _KERNELS.get(matrices.dtype)
    if kind is None or min(*lead, rows - 1, columns - 1) < 1 or not matrices.is_contiguous() or matrices.device.type != "cpu":
        return matrices.mT.clone(memory_format=torch.contiguous_format)
    # channels last, so that the channels of each pixel lie side by side as its matrix does
    pixels = matrices.view(kind).view(1, -1, 1, rows * columns).permute(0, 3, 1, 2)
    return torch.channel_shuffle(pixels, rows).permute(0, 2, 3, 1).reshape(*lead, columns, rows).view(matrices.dtype)
