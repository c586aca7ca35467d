"""Tensors seen as elements of another size, whatever their strides and wherever they begin."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["recast"]


def recast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of a tensor as elements of another size, along its last dim.

    A contiguous tensor may have any stride in a dimension of one, or of nothing, and begin at any byte: torch's own view refuses these.
    """
    if not tensor.numel():
        return tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] * tensor.itemsize // dtype.itemsize, dtype=dtype)
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1 or flat.storage_offset() * flat.itemsize % dtype.itemsize:
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    return flat.view(dtype).view(*tensor.shape[:-1], -1)
