"""The ops that kernels prepare: modules whose packed tensors are buffers and whose ``apply`` is the hot path."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from hal_core.decoder import DecoderParts, FusedLayer
    from hal_core.selection import Selection

__all__ = ["Batched", "Grouped", "MoEExperts", "Op", "QuantEmbedding", "QuantLinear", "QuantizedActivation", "Routed"]


@dataclass(frozen=True, eq=False)
class Routed:
    """Tokens with their experts: ``topk_ids [T, k] int32`` (-1 skips) and ``topk_weights [T, k] fp32``."""

    topk_ids: Tensor
    topk_weights: Tensor


@dataclass(frozen=True, eq=False)
class Grouped:
    """Rows already sorted by expert: ``num_tokens_per_expert [E] int32`` on the device."""

    num_tokens_per_expert: Tensor


@dataclass(frozen=True, eq=False)
class Batched:
    """Padded rows per expert, ``x [E, max, H]``, with ``counts [E] int32``."""

    counts: Tensor


@dataclass(frozen=True, eq=False)
class QuantizedActivation:
    """Activations quantized by the caller: codes, scales and over what one scale holds."""

    values: Tensor
    scales: Tensor
    granularity: str


class Op(nn.Module):
    """What every op carries: the selection that made it (set by ``hal.prepare``).

    ``apply`` computes. torch's own ``nn.Module.apply(fn)`` walks modules with a function; a model that
    holds ops must survive it, so an ``apply`` given a callable does that instead.
    """

    selection: Selection | None = None
    #: Whether ``compute`` follows ``selection.intervals`` where several kernels share the layout.
    serves_intervals = False

    @abstractmethod
    def update(self, weights: Any) -> None:
        """Re-lay new weights in place: same addresses, equal bit for bit to a fresh ``prepare``."""


class QuantLinear(Op):
    """A prepared quantized linear."""

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """``x [.., K]`` to ``[.., N]``; ``out`` receives the result when given."""
        if callable(x):
            return super().apply(x)  # type: ignore[return-value]
        return self.compute(x, out)

    @abstractmethod
    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """What ``apply`` does; implemented by backends."""

    def forward(self, x: Tensor) -> Tensor:
        return self.apply(x)

    @classmethod
    def fuse(cls, parts: DecoderParts) -> FusedLayer | None:
        """A whole decoder layer over linears of this class; None where its backend has none for these."""
        return None


class QuantEmbedding(Op):
    """A prepared quantized embedding; with a tied head also a linear over the same packed weights."""

    @abstractmethod
    def lookup(self, ids: Tensor) -> Tensor:
        """``ids [..] int64`` to rows ``[.., dim]``; an id out of range raises."""

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """The tied head: ``x [.., dim]`` to ``[.., rows]``."""
        if callable(x):
            return super().apply(x)  # type: ignore[return-value]
        return self.compute(x, out)

    @abstractmethod
    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """What ``apply`` does; implemented by backends."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.lookup(ids)


class MoEExperts(Op):
    """A prepared block of experts."""

    def apply(  # type: ignore[override]
        self,
        x: Tensor | QuantizedActivation,
        routing: Routed | Grouped | Batched,
        *,
        expert_map: Tensor | None = None,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
        reduce: bool = True,
    ) -> Tensor:
        """``x [T, H]`` to ``[T, H]``, or ``[T, k, H]`` unreduced. ``expert_map [E_global] int32`` gives local ids or -1.

        Raises:
            HalError: an id outside ``[-1, num_experts)``; the message gives token, slot and id.
        """
        if callable(x):
            return super().apply(x)  # type: ignore[unreachable]
        return self.compute(x, routing, expert_map, out, workspace, reduce)

    @abstractmethod
    def compute(
        self,
        x: Tensor | QuantizedActivation,
        routing: Routed | Grouped | Batched,
        expert_map: Tensor | None,
        out: Tensor | None,
        workspace: Tensor | None,
        reduce: bool,
    ) -> Tensor:
        """What ``apply`` does; implemented by backends."""

    @abstractmethod
    def workspace_size(self, max_tokens: int) -> int:
        """Bytes of scratch that ``apply`` can use for ``max_tokens`` rows; 0 when it needs none from the caller."""

    def forward(self, x: Tensor, routing: Routed) -> Tensor:
        return self.apply(x, routing)
