"""The steps as Triton launches: one for a sort of few slots, two for many, one for the activation, one for the weighted sum."""

from __future__ import annotations

from importlib import util
from typing import TYPE_CHECKING

import torch

from hal_backend_cuda.providers.steps import Sorted, TorchSteps
from hal_core.check import device_flag
from hal_core.reference.activations import SWIGLU_OAI_ALPHA

if TYPE_CHECKING:
    from torch import Tensor

    from hal_backend_cuda.providers.steps import MoESteps, Route
    from hal_core.spec import Activation

__all__ = ["TritonSteps", "fastest_steps"]

#: Slots that get a block each without being counted: the experts of one token differ anyway.
_DIRECT = 8
#: Slots that one program sorts.
_ONE = 1024
#: Slots of one program where several count.
_SHARE = 256


def fastest_steps(device: torch.device, experts: int) -> MoESteps:
    """Steps for so many local experts: Triton's where it is installed and the device is one that it serves, else plain torch."""
    if device.type != "cuda" or util.find_spec("triton") is None:
        return TorchSteps()
    return TritonSteps(device, experts)


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _lanes(experts: int) -> int:
    """Entries of an array that holds a number for each expert."""
    return _power(max(experts, 16))


class TritonSteps:
    """Fused steps of one op. Its scratch is its own: calls of one op on several streams must not overlap, as for any op here."""

    def __init__(self, device: torch.device, experts: int | None = None) -> None:
        self.device = device
        self.flag = device_flag(device)
        self.scratch: dict[int, Tensor] = {}
        if experts is not None:
            # here, and not in a first call that a graph may capture
            self._scratch(_lanes(experts), device)

    def __deepcopy__(self, memo: object) -> TritonSteps:
        """Its own scratch; the flag is the device's."""
        found = TritonSteps(self.device)
        found.scratch = {lanes: torch.zeros_like(scratch) for lanes, scratch in self.scratch.items()}
        return found

    def sort(self, route: Route, block: int, places: int) -> Sorted:
        from hal_backend_cuda.providers import step_kernels

        numel, device = route.ids.numel(), route.ids.device
        ids = torch.empty(places, dtype=torch.int32, device=device)
        experts = torch.empty(places // block, dtype=torch.int32, device=device)
        padded = torch.empty(1, dtype=torch.int32, device=device)
        mapped, place = route.expert_map is not None, route.expert_map if route.expert_map is not None else route.ids
        top_k = route.ids.shape[1]
        if numel <= _DIRECT and numel * block <= places:
            step_kernels.direct_slots[(1,)](
                route.ids, place, self.flag, ids, experts, padded, numel, route.num_experts, route.experts, top_k,
                HAS_MAP=mapped, P=_power(numel), BM=block, BM2=_power(block),
            )  # fmt: skip
            return Sorted(ids, experts, padded)
        lanes = _lanes(route.experts)
        scratch = self._scratch(lanes, device)
        sizes = (numel, route.num_experts, route.experts, top_k)
        settings = {"HAS_MAP": mapped, "BM": block, "E": lanes, "FILL": min(32, block & -block)}
        if numel <= _ONE:
            p = _power(max(numel, 32))
            step_kernels.sort_slots[(1,)](
                route.ids, place, self.flag, scratch, ids, experts, padded, *sizes, P=p, num_warps=min(16, max(4, p // 32)), **settings
            )
            return Sorted(ids, experts, padded)
        grid = (-(-numel // _SHARE),)
        starts, ranks = (torch.empty(size, dtype=torch.int32, device=device) for size in (lanes, numel))
        step_kernels.count_slots[grid](
            route.ids, place, self.flag, scratch, starts, ranks, ids, experts, padded, *sizes, P=_SHARE, num_warps=8, **settings
        )
        step_kernels.scatter_slots[grid](
            route.ids, place, starts, ranks, ids, numel, route.num_experts, route.experts, HAS_MAP=mapped, P=_SHARE
        )
        return Sorted(ids, experts, padded)

    def _scratch(self, lanes: int, device: torch.device) -> Tensor:
        if lanes not in self.scratch:
            self.scratch[lanes] = torch.zeros(lanes + 1, dtype=torch.int32, device=device)
        return self.scratch[lanes]

    def activate(self, y: Tensor, activation: Activation, gated: bool) -> Tensor:
        from hal_backend_cuda.providers import step_kernels

        rows, width = y.shape[0], y.shape[1] // (2 if gated else 1)
        out = torch.empty(rows, width, dtype=y.dtype, device=y.device)
        tall, wide = (1, 256) if rows <= 64 else (4, 256)
        alpha = SWIGLU_OAI_ALPHA if activation.alpha is None else activation.alpha
        limit = 0.0 if activation.limit is None else activation.limit
        step_kernels.activate_rows[(-(-rows // tall), -(-width // wide))](
            y, out, rows, width, float(alpha), float(limit), KIND=activation.kind, GATED=gated, LIMIT=activation.limit is not None,
            BR=tall, BI=wide, num_warps=1 if tall == 1 else 4,
        )  # fmt: skip
        return out

    def reduce(self, y: Tensor, route: Route, scaling: float, out: Tensor) -> None:
        from hal_backend_cuda.providers import step_kernels

        tokens, top_k = route.ids.shape
        width = y.shape[1]
        block = 256 if tokens <= 256 else min(1024, _power(width))
        step_kernels.weighted_sum[(tokens, -(-width // block))](
            y, out, route.ids, route.weights, route.expert_map if route.expert_map is not None else route.ids, width,
            route.num_experts, route.experts, float(scaling), TOP_K=top_k, SUM=out.dim() == 2, HAS_MAP=route.expert_map is not None,
            BH=block, num_warps=max(1, block // 256),
        )  # fmt: skip
