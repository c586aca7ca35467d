"""Routing in plain torch, for libraries that know no skipped slot and check no ids. Nothing here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hal_core.check import device_flag

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ByExpert", "by_expert", "flag_wrong_ids", "whole_slots"]


def flag_wrong_ids(ids: Tensor, num_experts: int) -> None:
    """Leave the first id outside ``[-1, num_experts)`` where ``hal.check()`` finds it."""
    flat = ids.reshape(-1)
    if not flat.numel():
        return
    wrong = (flat < -1) | (flat >= num_experts)
    slot = wrong.to(torch.uint8).argmax()
    report = ((slot + 1) << 32) | (flat[slot].long() & 0xFFFFFFFF)
    flag = device_flag(ids.device)
    fresh = wrong.any() & (flag[0] == 0)
    flag.copy_(torch.where(fresh, torch.stack([report, torch.full_like(report, ids.shape[-1])]), flag))


def whole_slots(ids: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """int32 ids and float32 weights in which a slot that goes nowhere is expert 0 with a weight of 0."""
    skipped = (ids < 0) | (ids >= num_experts)
    return torch.where(skipped, 0, ids).to(torch.int32).contiguous(), torch.where(skipped, 0.0, weights.float()).contiguous()


@dataclass(frozen=True, eq=False)
class ByExpert:
    """Slots in the order of their experts. order ``[T * k]``: slot of each row. counts ``int32 [E]``: rows of each expert."""

    order: Tensor
    counts: Tensor
    top_k: int

    def rows(self, x: Tensor) -> Tensor:
        """``x [T, K]`` as ``[T * k, K]``."""
        return x[self.order // self.top_k]

    def summed(self, y: Tensor, weights: Tensor, reduce: bool) -> Tensor:
        """Rows back in the order of slots, weighted: float32 ``[T, k, N]``, or their sum ``[T, N]``."""
        slots = torch.empty_like(y)
        slots[self.order] = y
        scaled = slots.view(*weights.shape, -1).float() * weights[..., None]
        return scaled.sum(1) if reduce else scaled


def by_expert(ids: Tensor, num_experts: int) -> ByExpert:
    """The order in which an expert's rows lie together; ids are those of :func:`whole_slots`."""
    flat = ids.reshape(-1).long()
    counts = torch.zeros(num_experts, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return ByExpert(flat.argsort(stable=True), counts, ids.shape[-1])
