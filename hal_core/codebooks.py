"""What the codes of a 4-bit table type stand for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["CODEBOOKS", "codebook"]

#: Value of each code 0..15. e2m1 (OCP MX): the top bit is the sign. iq4_nl: ggml's table of integers.
CODEBOOKS: dict[str, tuple[float, ...]] = {
    "mxfp4": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    "nvfp4": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    "iq4_nl": (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
}


@functools.cache
def codebook(dtype: str, device: torch.device) -> Tensor:
    """float32 ``[16]`` of an element type; not to be written to."""
    return torch.tensor(CODEBOOKS[dtype], dtype=torch.float32, device=device)
