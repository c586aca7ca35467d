"""Experts by torch's grouped product: rows sorted by expert, two or three products, activation and weighted sum between and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.triton import launch, routing
from hal_core.triton.launch import FloatMatrix

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.triton.ops import Experts

__all__ = ["grouped_experts"]


def _product(rows: Tensor, matrix: object, ends: Tensor) -> Tensor:
    assert isinstance(matrix, FloatMatrix)  # what the kernel declares
    return torch._grouped_mm(rows, matrix.weight.transpose(-1, -2), offs=ends)


def grouped_experts(
    x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, experts: Experts, out: Tensor, flag: Tensor
) -> Tensor:
    """As ``ops.moe``, for bfloat16 experts without biases."""
    tokens, hidden = x.shape
    slots, top_k = ids.numel(), ids.shape[1]
    places = torch.empty(slots, dtype=torch.int32, device=x.device)
    route = launch.sorted_by_expert(ids, weights, expert_map, experts.num_experts, experts.local, 128, flag, places)
    order, ends = route.tensors[2], route.tensors[3][: experts.local]
    rows = torch.empty(slots, hidden, dtype=x.dtype, device=x.device)
    width = min(1024, max(64, 1 << (hidden - 1).bit_length()))
    values = {"x_ptr": x, "out_ptr": rows, "slots_ptr": order, "total_ptr": ends[-1:], "H": hidden, "top_k": top_k, "BH": width}
    launch.run(routing.gather_rows, (slots, -(-hidden // width)), values, 4, 1)
    up = _product(rows, experts.up, ends)
    gate = up if experts.gate is None else _product(rows, experts.gate, ends)
    inner = torch.empty_like(up)
    values = {
        "up_ptr": up, "gate_ptr": gate, "out_ptr": inner, "numel": inner.numel(), "alpha": experts.alpha, "limit": experts.limit or 0.0,
        "KIND": experts.kind, "GATED": experts.gate is not None, "LIMIT": experts.limit is not None, "B": 1024,
    }  # fmt: skip
    launch.run(routing.activate_rows, (-(-inner.numel() // 1024),), values, 4, 1)
    y = _product(inner, experts.down, ends)
    values = {
        "y_ptr": y, "out_ptr": out, "places_ptr": places, "weights_ptr": weights, "H": hidden, "scaling": experts.scaling, "TOP_K": top_k,
        "REDUCE": out.dim() == 2, "BH": width,
    }  # fmt: skip
    launch.run(routing.placed_sum, (tokens, -(-hidden // width)), values, 4, 1)
    return out
