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

    from hal_backend_cuda.providers.steps import MoESteps, Quantize, Route
    from hal_core.spec import Activation
    from hal_core.triton.launch import Epilogue

__all__ = ["TritonSteps", "fastest_steps"]

#: Slots that get a block each without being counted: the experts of one token differ anyway.
_DIRECT = 8


def fastest_steps(device: torch.device, experts: int) -> MoESteps:
    """Steps for so many local experts: Triton's where it is installed and the device is one that it serves, else plain torch."""
    if device.type != "cuda" or util.find_spec("triton") is None:
        return TorchSteps()
    return TritonSteps(device, experts)


def _parts(y: Tensor, activation: Activation, gated: bool) -> tuple[Tensor, Tensor | None, Epilogue]:
    """Up and gate as halves of the rows, and what is done with them."""
    from hal_core.triton.launch import Epilogue

    width = y.shape[1] // (2 if gated else 1)
    gate, up = (y[:, :width], y[:, width:]) if gated else (None, y)
    alpha = SWIGLU_OAI_ALPHA if activation.alpha is None else activation.alpha
    return up, gate, Epilogue(activation.kind, alpha, activation.limit)


class TritonSteps:
    """Fused steps of one op. Its scratch is its own: calls of one op on several streams must not overlap, as for any op here."""

    told = True

    def __init__(self, device: torch.device, experts: int | None = None) -> None:
        self.device = device
        self.flag = device_flag(device)
        # here, and not in a first call that a graph may capture
        self.scratch: dict[int, Tensor] = {} if experts is None else {experts: self._made(experts)}

    def __deepcopy__(self, memo: object) -> TritonSteps:
        """Its own scratch; the flag is the device's."""
        found = TritonSteps(self.device)
        found.scratch = {experts: torch.zeros_like(scratch) for experts, scratch in self.scratch.items()}
        return found

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.flag = device_flag(self.device)  # what was pickled is a copy that nobody looks at

    def _made(self, experts: int) -> Tensor:
        from hal_core.triton.launch import sort_scratch

        return sort_scratch(experts, self.device)

    def sort(self, route: Route, block: int, places: int) -> Sorted:
        from hal_core.triton import launch

        numel = route.ids.numel()
        if numel <= _DIRECT and numel * block <= places:
            found = launch.spread_slots(route.ids, route.expert_map, route.num_experts, route.experts, block, places, self.flag)
        else:
            scratch = self.scratch.get(route.experts)
            if scratch is None:
                scratch = self.scratch[route.experts] = self._made(route.experts)
            found = launch.sort_slots(route.ids, route.expert_map, route.num_experts, route.experts, block, places, self.flag, scratch)
        return Sorted(found.slots, found.tile_expert, found.total)

    def bounds(self, counts: Tensor, out: Tensor) -> Tensor:
        from hal_core.triton import launch

        return launch.group_bounds(counts, out, self.flag)

    def activate(self, y: Tensor, activation: Activation, gated: bool) -> Tensor:
        from hal_core.triton import launch
        from hal_core.triton.repeat import room

        up, gate, epilogue = _parts(y, activation, gated)
        out = room(up.shape, y.dtype, y.device)
        launch.activate(up, gate, out, epilogue)
        return out

    def quantized(self, y: Tensor, activation: Activation, gated: bool, quantize: Quantize) -> tuple[Tensor, Tensor | None]:
        return quantize(*_parts(y, activation, gated))

    def reduce(self, y: Tensor, route: Route, scaling: float, out: Tensor) -> None:
        from hal_core.triton import launch

        launch.weighted_sum(y, out, route.ids, route.weights, route.expert_map, route.num_experts, route.experts, scaling)
