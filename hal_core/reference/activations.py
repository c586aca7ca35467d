"""Activation functions of experts, as the models that use them define them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.spec import Activation

__all__ = ["SWIGLU_OAI_ALPHA", "activate"]

#: The sigmoid's slope in gpt-oss, used when the checkpoint gives none.
SWIGLU_OAI_ALPHA = 1.702


def activate(activation: Activation, up: Tensor, gate: Tensor | None) -> Tensor:
    """``act(gate) * up``, or ``act(up)`` when ungated; ``limit`` clamps gate from above and up on both sides first."""
    if activation.limit is not None:
        up = up.clamp(-activation.limit, activation.limit)
        gate = gate.clamp(max=activation.limit) if gate is not None else None
    if gate is None:
        return _plain(activation, up)
    if activation.kind == "swiglu_oai":
        alpha = SWIGLU_OAI_ALPHA if activation.alpha is None else activation.alpha
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    return _plain(activation, gate) * up


def _plain(activation: Activation, x: Tensor) -> Tensor:
    kind = activation.kind
    if kind == "silu":
        return functional.silu(x)
    if kind == "relu2":
        return functional.relu(x).square()
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
