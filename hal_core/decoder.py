"""A decoder layer as one prepared thing: what it is made of, and what a backend makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.ops import QuantLinear

__all__ = ["DecoderParts", "FusedLayer"]


@dataclass(frozen=True, eq=False)
class DecoderParts:
    """A layer that adds attention to its input and then a gated MLP, each behind an RMS norm.

    q, k, v, o, gate, up, down: prepared linears; they stay the model's own. input_norm, post_norm: weights ``[hidden]``; q_norm, k_norm:
    weights ``[head_dim]`` of norms before the rotary embedding, or None. eps: of all norms. scale: of the logits. activation: a name of
    :data:`hal_core.spec.ACTIVATIONS`, applied to the gate.
    """

    q: QuantLinear
    k: QuantLinear
    v: QuantLinear
    o: QuantLinear
    gate: QuantLinear
    up: QuantLinear
    down: QuantLinear
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    activation: str

    @property
    def linears(self) -> tuple[QuantLinear, ...]:
        return (self.q, self.k, self.v, self.o, self.gate, self.up, self.down)


class FusedLayer(Protocol):
    """The layer's whole forward, causal and without gradients."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, held: int) -> Tensor:
        """``x [B, T, hidden]`` to the same shape, contiguous like all that is given, and all of one dtype.

        Args:
            x: what enters.
            cos: ``[B or 1, T, head_dim]``.
            sin: the same.
            keys: a cache ``[B, kv_heads, room, head_dim]``, of which tokens ``held`` to ``held + T`` are written.
            values: the same.
            held: tokens that are there.

        Raises:
            ShapeError: a tensor does not fit; nothing is written.
        """
