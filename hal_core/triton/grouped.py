"""Experts by torch's grouped product: rows sorted by expert, two or three products, activation and weighted sum between and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.triton import launch, routing
from hal_core.triton.launch import FloatMatrix
from hal_core.triton.repeat import made, room

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.triton.ops import Experts

__all__ = ["grouped_experts"]

#: Rows that each expert's share is rounded up to.
_TILE = 8


def _product(rows: Tensor, matrix: object, ends: Tensor) -> Tensor:
    assert isinstance(matrix, FloatMatrix)  # what the kernel declares
    return made(torch._grouped_mm, rows, matrix.weight.transpose(-1, -2), offs=ends)


def grouped_experts(
    x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, experts: Experts, out: Tensor, flag: Tensor
) -> Tensor:
    """As ``ops.moe``, for bfloat16 experts without biases."""
    tokens, hidden = x.shape
    slots, top_k = ids.numel(), ids.shape[1]
    places = min(slots, -(-slots // _TILE) + min(experts.local, slots)) * _TILE
    scratch = launch.sort_scratch(experts.local, x.device) if experts.scratch is None else experts.scratch
    order = launch.sort_slots(ids, expert_map, experts.num_experts, experts.local, _TILE, places, flag, scratch, placed=True)
    assert order.ends is not None
    assert order.places is not None
    rows, ends = room((places, hidden), x.dtype, x.device), order.ends[: experts.local]
    width = min(1024, max(64, 1 << (hidden - 1).bit_length()))
    values = {
        "x_ptr": x, "out_ptr": rows, "slots_ptr": order.slots, "total_ptr": order.total, "numel": slots, "H": hidden, "top_k": top_k,
        "BH": width,
    }  # fmt: skip
    launch.run(routing.gather_rows, (places, -(-hidden // width)), values, 4, 1)
    up = _product(rows, experts.up, ends)
    gate = None if experts.gate is None else _product(rows, experts.gate, ends)
    inner = room(up.shape, up.dtype, up.device)
    launch.activate(up, gate, inner, launch.Epilogue(experts.kind, experts.alpha, experts.limit))
    y = _product(inner, experts.down, ends)
    launch.weighted_sum(y, out, order.places.view(tokens, top_k), weights, None, 0, 0, experts.scaling, placed=True)
    return out
