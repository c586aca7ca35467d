"""Checks of what an op is called with: shapes, dtypes and devices, all known without waiting for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hal_core.errors import ShapeError
from hal_core.ops import Routed
from hal_core.weight_checks import refuse_gradients

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.spec import MoESpec

__all__ = ["check_out", "check_routing", "check_rows", "on_cuda"]


def on_cuda(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on their CUDA device, or on the current one where they come from the host."""
    return {name: tensor if tensor.is_cuda else tensor.to("cuda") for name, tensor in tensors.items()}


def check_rows(asked: str, x: Any, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``x [.., K]`` as contiguous rows ``[M, K]``; raises where it is not of this width, dtype and device."""
    if not isinstance(x, torch.Tensor):
        raise ShapeError(f"{asked} input", f"a {type(x).__name__}", "this kernel takes unquantized activations")
    if x.dim() < 1 or x.shape[-1] != k or x.dtype != dtype or x.device != device:
        found = f"x is {x.dtype} {list(x.shape)} on {x.device}"
        raise ShapeError(f"{asked} input", found, f"give {dtype} [.., {k}] on {device}")
    if x.requires_grad:
        refuse_gradients(asked, x)
    if x.dim() == 2 and x.is_contiguous():
        return x
    return x.reshape(-1, k).contiguous()


def check_out(asked: str, out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``out``, or new memory; raises where it does not fit the result."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device or not out.is_contiguous():
        found = f"out is {out.dtype} {list(out.shape)} on {out.device}{'' if out.is_contiguous() else ', not contiguous'}"
        raise ShapeError(f"{asked} output", found, f"give contiguous {dtype} {list(shape)} on {device}")
    return out


def check_routing(asked: str, spec: MoESpec, x: Any, routing: Any, expert_map: Tensor | None) -> Routed:
    """The routing with contiguous int32 ids; raises where shapes, dtypes or devices do not agree.

    Ids themselves are on the device: those out of range are left out by the steps.
    """
    if not isinstance(routing, Routed) or not isinstance(x, torch.Tensor):
        found = f"{type(x).__name__} with {type(routing).__name__}"
        raise ShapeError(asked, found, "give a tensor and Routed(topk_ids, topk_weights)")
    ids, weights = routing.topk_ids, routing.topk_weights
    if x.dim() != 2 or tuple(ids.shape) != (x.shape[0], spec.top_k) or ids.shape != weights.shape:
        found = f"x {list(x.shape)}, topk_ids {list(ids.shape)}, topk_weights {list(weights.shape)}"
        raise ShapeError(f"{asked} input", found, f"give x [T, {spec.hidden}], ids and weights [T, {spec.top_k}]")
    if ids.dtype not in {torch.int32, torch.int64} or not weights.is_floating_point():
        raise ShapeError(f"{asked} routing", f"topk_ids {ids.dtype}, topk_weights {weights.dtype}", "give int32 ids and float32 weights")
    if ids.device != x.device or weights.device != x.device:
        raise ShapeError(f"{asked} routing", f"on {ids.device} and {weights.device}, x on {x.device}", "keep all on one device")
    if (expert_map is not None) != spec.expert_map or (expert_map is not None and tuple(expert_map.shape) != (spec.num_experts,)):
        found = "missing" if expert_map is None else f"shape {list(expert_map.shape)}"
        raise ShapeError(f"{asked} expert_map", found, f"the spec says expert_map={spec.expert_map} for {spec.num_experts} experts")
    if expert_map is None and spec.local != spec.num_experts:
        raise ShapeError(asked, f"{spec.local} of {spec.num_experts} experts without an expert_map", "give the map of local ids")
    return Routed(ids.to(torch.int32).contiguous(), weights.float().contiguous())
