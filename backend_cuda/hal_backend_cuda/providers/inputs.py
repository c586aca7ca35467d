"""Where the tensors of a CUDA op lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["on_cuda"]


def on_cuda(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on their CUDA device, or on the current one where they come from the host."""
    return {name: tensor if tensor.is_cuda else tensor.to("cuda") for name, tensor in tensors.items()}
