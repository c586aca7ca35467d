"""What ops over other libraries' functions share: buffers that keep their types, and checks that need no device.

Everything here is known without waiting for a device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn

from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError, UnfitWeightsError
from hal_core.ops import Grouped, Routed
from hal_core.weight_checks import refuse_gradients

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.spec import MoESpec

__all__ = [
    "FixedBuffers",
    "MatrixView",
    "Numbered",
    "NumberedOp",
    "check_grouped",
    "check_out",
    "check_routing",
    "check_routing_form",
    "check_rows",
    "rounded_scales",
]

T = TypeVar("T")

#: Half a unit in the last place of a normal number.
_ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
#: What ids come in.
_INTEGERS = frozenset({torch.int32, torch.int64})


class Numbered(WeakValueDictionary[int, T]):
    """Ops by the number that stands for them in a compiled graph, which holds no object; those that nobody else holds are gone."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()

    def enrol(self, op: T) -> int:
        """A number of the op's own."""
        number = next(self._numbers)
        self[number] = op
        return number


class NumberedOp(nn.Module):
    """An op that a compiled graph finds by its ``number`` among ``numbers``; a copy gets a number of its own."""

    numbers: ClassVar[Numbered[Any]]
    number: int

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.enrol()

    def enrol(self) -> None:
        self.number = self.numbers.enrol(self)


@dataclass(frozen=True, eq=False)
class MatrixView:
    """Packed weights as kernels read them. perm: the input that each column takes."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    mins: Tensor | None
    perm: Tensor | None
    bias: Tensor | None
    n: int
    k: int
    group: int


class FixedBuffers(nn.Module):
    """Base of modules with packed buffers, bound to the device that they were prepared on.

    ``model.to(dtype)`` casts floating buffers, and kernels read these by their own dtypes: they stay as they are.

    Raises:
        ShapeError: they were to move to another device; they did not.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> FixedBuffers:
        kept: dict[str, Tensor] = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = {(before.device, after.device) for name, before in kept.items() if (after := self._buffers[name]) is not None}
        for name, before in kept.items():
            after = self._buffers[name]
            if after is not None and (after.dtype, after.device) != (before.dtype, before.device):
                self._buffers[name] = before
        for here, there in moved:
            if here != there:
                raise ShapeError(f"{type(self).__name__} prepared on {here}", f"moved to {there}", "prepare it there")
        return self


def check_rows(asked: str, x: Any, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``x [.., K]`` as contiguous rows ``[M, K]``; raises where it is not of this width, dtype and device."""
    if not isinstance(x, torch.Tensor):
        raise ShapeError(f"{asked} input", f"a {type(x).__name__}", "this kernel takes unquantized activations")
    shape = x.shape
    if not shape or shape[-1] != k or x.dtype != dtype or x.device != device:
        found = f"x is {x.dtype} {list(shape)} on {x.device}"
        raise ShapeError(f"{asked} input", found, f"give {dtype} [.., {k}] on {device}")
    if x.requires_grad:
        refuse_gradients(asked, x)
    if len(shape) == 2 and x.is_contiguous():
        return x
    return x.reshape(-1, k).contiguous()


def check_out(asked: str, out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``out``, or new memory; raises where it does not fit the result."""
    if out is None:
        return torch.empty(*shape, dtype=dtype, device=device)  # sizes one by one are read sooner than a tuple
    if out.shape != shape or out.dtype != dtype or out.device != device or not out.is_contiguous():
        found = f"out is {out.dtype} {list(out.shape)} on {out.device}{'' if out.is_contiguous() else ', not contiguous'}"
        raise ShapeError(f"{asked} output", found, f"give contiguous {dtype} {list(shape)} on {device}")
    return out


def check_routing(asked: str, spec: MoESpec, x: Any, routing: Any, expert_map: Tensor | None) -> Routed:
    """The routing with contiguous int32 ids and float32 weights; as :func:`check_routing_form`."""
    routed = check_routing_form(asked, spec, x, routing, expert_map)
    ids, weights = routed.topk_ids, routed.topk_weights
    if ids.dtype == torch.int32 and weights.dtype == torch.float32 and ids.is_contiguous() and weights.is_contiguous():
        return routed  # nothing to make
    return Routed(routed.topk_ids.to(torch.int32).contiguous(), routed.topk_weights.float().contiguous())


def check_grouped(asked: str, spec: MoESpec, x: Any, routing: Any, expert_map: Tensor | None) -> Tensor:
    """Contiguous sizes ``[local experts]`` of the groups that rows of ``x`` are sorted into; raises where it is no such routing.

    The sizes themselves are on the device: what is wrong there is reported by the steps.
    """
    if not isinstance(routing, Grouped) or not isinstance(x, torch.Tensor) or x.dim() != 2:
        found = f"{type(x).__name__} with {type(routing).__name__}"
        raise ShapeError(asked, found, "give rows [R, H] and Grouped(num_tokens_per_expert), as the spec's routing says")
    counts = routing.num_tokens_per_expert
    if not isinstance(counts, torch.Tensor):
        raise ShapeError(f"{asked} routing", f"num_tokens_per_expert is a {type(counts).__name__}", "give a tensor")
    if counts.dtype not in _INTEGERS or counts.device != x.device or tuple(counts.shape) != (spec.local,):
        found = f"num_tokens_per_expert {counts.dtype} {list(counts.shape)} on {counts.device}"
        raise ShapeError(f"{asked} routing", found, f"give int32 [{spec.local}] on {x.device}")
    if expert_map is not None:
        raise ShapeError(f"{asked} expert_map", f"shape {list(expert_map.shape)}", "give none: rows are sorted by local expert already")
    return counts.contiguous()


def check_routing_form(asked: str, spec: MoESpec, x: Any, routing: Any, expert_map: Tensor | None) -> Routed:
    """The routing as it was given; raises where shapes, dtypes or devices do not agree.

    Ids themselves are on the device: those out of range are left out by the steps.
    """
    if not isinstance(routing, Routed) or not isinstance(x, torch.Tensor):
        found = f"{type(x).__name__} with {type(routing).__name__}"
        raise ShapeError(asked, found, "give a tensor and Routed(topk_ids, topk_weights)")
    ids: Any = routing.topk_ids
    weights: Any = routing.topk_weights
    device, shape = x.device, x.shape
    if not isinstance(ids, torch.Tensor) or not isinstance(weights, torch.Tensor):
        found = f"topk_ids is a {type(ids).__name__}, topk_weights a {type(weights).__name__}"
        raise ShapeError(f"{asked} routing", found, "give tensors")
    if len(shape) != 2 or not ids.shape == weights.shape == (shape[0], spec.top_k):
        found = f"x {list(shape)}, topk_ids {list(ids.shape)}, topk_weights {list(weights.shape)}"
        raise ShapeError(f"{asked} input", found, f"give x [T, {spec.hidden}], ids and weights [T, {spec.top_k}]")
    if ids.dtype not in _INTEGERS or not weights.is_floating_point():
        raise ShapeError(f"{asked} routing", f"topk_ids {ids.dtype}, topk_weights {weights.dtype}", "give int32 ids and float32 weights")
    if ids.device != device or weights.device != device:
        raise ShapeError(f"{asked} routing", f"on {ids.device} and {weights.device}, x on {device}", "keep all on one device")
    if expert_map is not None and (expert_map.dtype not in _INTEGERS or expert_map.device != device):
        raise ShapeError(f"{asked} expert_map", f"{expert_map.dtype} on {expert_map.device}", f"give int32 local ids on {device}")
    if (expert_map is not None) != spec.expert_map or (expert_map is not None and tuple(expert_map.shape) != (spec.num_experts,)):
        found = "missing" if expert_map is None else f"shape {list(expert_map.shape)}"
        raise ShapeError(f"{asked} expert_map", found, f"the spec says expert_map={spec.expert_map} for {spec.num_experts} experts")
    if expert_map is None and spec.local != spec.num_experts:
        raise ShapeError(asked, f"{spec.local} of {spec.num_experts} experts without an expert_map", "give the map of local ids")
    return routing


def rounded_scales(asked: str, scales: Tensor, dtype: str) -> Tensor:
    """Float scales in ``dtype``, each within half a unit of its last place.

    Raises:
        UnfitWeightsError: scales that are no floats, or that ``dtype`` holds only as zero, infinity, or with more than a rounding's error.
    """
    if not scales.is_floating_point():
        raise UnfitWeightsError(asked, f"scales are {scales.dtype}", "convert them to float32, or use another kernel")
    kind = torch_dtype(dtype)
    cast = scales.to(kind)
    if scales.dtype == kind:
        return cast
    wrong = (cast.double() - scales.double()).abs() > scales.double().abs() * _ROUNDING[kind]
    if bool(wrong.any() | ~torch.isfinite(cast).all()):
        found = f"{int(wrong.sum())} scales of {scales.dtype} are outside the range of {dtype}"
        raise UnfitWeightsError(asked, found, "run the model in another dtype, or use another kernel")
    return cast
