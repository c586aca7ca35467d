"""The steps of an experts block around a provider's products: sort, activation, weighted sum.

A provider's op is written against :class:`MoESteps`. :class:`TorchSteps` is plain torch, on any device, without a host sync and
so capturable; :mod:`fused_steps` has one Triton launch for each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from hal_core.reference.activations import activate

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.spec import Activation
    from hal_core.triton.launch import Epilogue

__all__ = ["MoESteps", "Quantize", "Route", "Sorted", "TorchSteps"]


@dataclass(frozen=True, eq=False)
class Route:
    """Where tokens go: ``ids int32 [T, k]`` of ``num_experts`` global experts (-1 skips), ``weights float32 [T, k]``.

    expert_map: ``int32 [num_experts]`` to local ids or -1; None where all are local. experts: local ones.
    """

    ids: Tensor
    weights: Tensor
    num_experts: int
    experts: int
    expert_map: Tensor | None = None

    def local(self) -> Tensor:
        """int64 ``[T, k]`` local ids; -1 where the expert lives elsewhere, is skipped, or does not exist."""
        ids = torch.where((self.ids >= 0) & (self.ids < self.num_experts), self.ids, -1).long()
        if self.expert_map is not None:
            ids = torch.where(ids < 0, -1, self.expert_map.long()[ids.clamp(min=0)])
        return torch.where((ids >= 0) & (ids < self.experts), ids, -1)


@dataclass(frozen=True, eq=False)
class Sorted:
    """Rows by expert, each expert's padded to whole blocks.

    ids: int32 ``[places]``, the row (token * top_k + slot) at each place; the number of rows where there is none.
    experts: int32 ``[places / block]``, of each block. padded: int32 ``[1]``, places that are in use.
    """

    ids: Tensor
    experts: Tensor
    padded: Tensor


class Quantize(Protocol):
    """Rows to codes and scales: those given, or the activation of them and of ``gate``."""

    def __call__(self, x: Tensor, gate: Tensor | None = None, epilogue: Epilogue | None = None) -> tuple[Tensor, Tensor | None]: ...


class MoESteps(Protocol):
    """What an experts block needs besides its two products. Nothing waits for the device.

    told: whether every step tells :mod:`hal_core.triton.repeat` what it launches, so that a call may be recorded.
    """

    told: bool

    def sort(self, route: Route, block: int, places: int) -> Sorted:
        """The slots of local experts, in ``places`` places."""

    def bounds(self, counts: Tensor, out: Tensor) -> Tensor:
        """int32 ``[experts + 1]``: where groups of rows of ``counts [experts]`` begin and end, none past the last row of ``out [R, H]``.

        Rows of ``out`` past all groups become zero.
        """

    def activate(self, y: Tensor, activation: Activation, gated: bool) -> Tensor:
        """``[R, 2 I]``, gate before up, or ``[R, I]`` ungated, to ``[R, I]`` in the same dtype, computed in float32."""

    def quantized(self, y: Tensor, activation: Activation, gated: bool, quantize: Quantize) -> tuple[Tensor, Tensor | None]:
        """What :meth:`activate` gives, as codes and scales."""

    def reduce(self, y: Tensor, route: Route, scaling: float, out: Tensor) -> None:
        """``out [T, H] = scaling * sum over slots of weights * y [T * k, H]``, or each slot's part where out is ``[T, k, H]``.

        Slots without a local expert are not read and count as zero.
        """


class TorchSteps:
    """Every step in plain torch."""

    told = False

    def sort(self, route: Route, block: int, places: int) -> Sorted:
        flat, experts, device = route.local().reshape(-1), route.experts, route.ids.device
        rows = flat.numel()
        key = torch.where(flat >= 0, flat, experts)
        order = torch.argsort(key, stable=True)
        counts = torch.zeros(experts + 1, dtype=torch.long, device=device).scatter_add_(0, key, torch.ones_like(key))
        padded = torch.div(counts + block - 1, block, rounding_mode="floor") * block
        starts, first = padded.cumsum(0) - padded, counts.cumsum(0) - counts
        expert = key[order]
        place = starts[expert] + torch.arange(rows, device=device) - first[expert]
        # one more place takes the rows that have no expert
        place = torch.where(expert < experts, place, places)
        ids = torch.full((places + 1,), rows, dtype=torch.int32, device=device).scatter_(0, place, order.to(torch.int32))
        ends = padded[:experts].cumsum(0)
        blocks = torch.arange(0, places, block, device=device)
        of_block = torch.searchsorted(ends, blocks, right=True).clamp_(max=experts - 1)
        return Sorted(ids[:places], of_block.to(torch.int32), ends[-1:].to(torch.int32))

    def bounds(self, counts: Tensor, out: Tensor) -> Tensor:
        rows = out.shape[0]
        ends = counts.long().clamp(0, rows).cumsum(0).clamp(max=rows)
        out.masked_fill_((torch.arange(rows, device=out.device) >= ends[-1])[:, None], 0)
        return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)

    def activate(self, y: Tensor, activation: Activation, gated: bool) -> Tensor:
        gate, up = y.float().chunk(2, dim=-1) if gated else (None, y.float())
        return activate(activation, up, gate).to(y.dtype)

    def quantized(self, y: Tensor, activation: Activation, gated: bool, quantize: Quantize) -> tuple[Tensor, Tensor | None]:
        return quantize(self.activate(y, activation, gated))

    def reduce(self, y: Tensor, route: Route, scaling: float, out: Tensor) -> None:
        slots = y.view(*route.ids.shape, -1).float()
        inside = (route.local() >= 0).unsqueeze(-1)
        # not a product with zero: what was never written may be NaN
        slots = torch.where(inside, slots * (route.weights.float() * scaling).unsqueeze(-1), 0.0)
        out.copy_(slots.sum(dim=1) if out.dim() == 2 else slots)
