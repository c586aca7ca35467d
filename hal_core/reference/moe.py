"""The reference experts block: one expert after another, float32."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError
from hal_core.kernel import MoEEpilogue, MoEKernel, MoEWeights
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.ops import MoEExperts, Routed
from hal_core.reference.activations import activate
from hal_core.reference.inputs import check_inputs, input_quantizer, input_refusals
from hal_core.reference.schemes import EVERY_SCHEME, OUTPUT_ROUNDING
from hal_core.reference.weights import CanonicalWeight
from hal_core.spec import ACTIVATIONS
from hal_core.weight_checks import check_moe_weights, check_same_kind, kinds_of

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.machine import Machine
    from hal_core.ops import Batched, Grouped, QuantizedActivation
    from hal_core.refusal import Refusal
    from hal_core.spec import MoESpec

__all__ = ["ReferenceMoE", "ReferenceMoEOp", "check_routed"]


def _valid_map(spec: MoESpec, expert_map: Tensor) -> bool:
    return tuple(expert_map.shape) == (spec.num_experts,) and -1 <= int(expert_map.min()) <= int(expert_map.max()) < spec.local


def check_routed(spec: MoESpec, x: Tensor, routing: object, expert_map: Tensor | None) -> Routed:
    """Raise unless shapes agree and every id is -1 or a global expert; returns the routing.

    Costs a host sync, so only backends on the host call it.
    """
    if not isinstance(routing, Routed):
        raise ShapeError("experts routing", type(routing).__name__, "this kernel takes Routed(topk_ids, topk_weights)")
    ids, weights = routing.topk_ids, routing.topk_weights
    if tuple(x.shape) != (ids.shape[0], spec.hidden) or tuple(ids.shape) != (x.shape[0], spec.top_k) or ids.shape != weights.shape:
        found = f"x {list(x.shape)}, topk_ids {list(ids.shape)}, topk_weights {list(weights.shape)}"
        raise ShapeError("experts input", found, f"give x [T, {spec.hidden}], ids and weights [T, {spec.top_k}]")
    if ids.dtype not in (torch.int32, torch.int64) or not weights.is_floating_point():
        raise ShapeError("experts routing", f"topk_ids {ids.dtype}, topk_weights {weights.dtype}", "give int32 ids and float32 weights")
    if (expert_map is not None) != spec.expert_map:
        found = "given" if expert_map is not None else "missing"
        raise ShapeError("experts expert_map", found, f"the spec says expert_map={spec.expert_map}")
    wrong = (ids < -1) | (ids >= spec.num_experts)
    if bool(wrong.any()):
        token, slot = (int(i) for i in wrong.nonzero()[0])
        found = f"{int(ids[token, slot])} at token {token}, slot {slot}"
        raise ShapeError("topk id", found, f"ids run from 0 to {spec.num_experts - 1}, -1 skips")
    if expert_map is not None and not _valid_map(spec, expert_map):
        found = f"shape {list(expert_map.shape)}, ids {expert_map.flatten()[:8].tolist()}.."
        raise ShapeError("expert_map", found, f"give [{spec.num_experts}] local ids from -1 to {spec.local - 1}")
    return routing


class ReferenceMoEOp(MoEExperts):
    """``sum over slots of weight * down(act(gate(x)), up(x))``, every step in float32, rounded once."""

    def __init__(self, spec: MoESpec, weights: MoEWeights) -> None:
        super().__init__()
        check_moe_weights(spec, weights)
        self.spec, self.kinds = spec, kinds_of(weights)
        self.quantizer = input_quantizer(spec)
        names = [name for name in ("gate", "up", "down") if getattr(weights, name) is not None]
        self.matrices = torch.nn.ModuleDict({name: CanonicalWeight(getattr(weights, name)) for name in names})
        for name in names:
            check_inputs(self.quantizer, getattr(weights, name), name)
        for name in ("gate_bias", "up_bias", "down_bias"):
            self.register_buffer(name, getattr(weights, name))

    def compute(
        self,
        x: Tensor | QuantizedActivation,
        routing: Routed | Grouped | Batched,
        expert_map: Tensor | None,
        out: Tensor | None,
        workspace: Tensor | None,
        reduce: bool,
    ) -> Tensor:
        if not isinstance(x, torch.Tensor):
            raise ShapeError("experts input", type(x).__name__, "this kernel takes unquantized activations")
        if not x.is_floating_point():
            raise ShapeError("experts input", f"x of {x.dtype}", "give a float tensor")
        routed = check_routed(self.spec, x, routing, expert_map)
        slots = self._slots(x.float(), routed, expert_map)
        y = slots.sum(dim=1) * self.spec.routed_scaling if reduce else slots * self.spec.routed_scaling
        y = y.to(torch_dtype(self.spec.out_dtype) if self.spec.out_dtype else x.dtype)
        if out is None:
            return y
        if out.shape != y.shape or out.dtype != y.dtype:
            raise ShapeError("experts out", f"{out.dtype} {list(out.shape)}", f"give {y.dtype} {list(y.shape)}")
        return out.copy_(y)

    def _slots(self, x: Tensor, routing: Routed, expert_map: Tensor | None) -> Tensor:
        """Weighted expert outputs ``[T, k, H] float32``; zeros where a slot is skipped or its expert lives elsewhere."""
        ids, weights = routing.topk_ids.long(), routing.topk_weights.float()
        if expert_map is not None:
            ids = torch.where(ids < 0, ids, expert_map.long()[ids.clamp(min=0)])
        elif self.spec.local != self.spec.num_experts:
            found = f"{self.spec.local} of {self.spec.num_experts} experts without an expert_map"
            raise ShapeError("experts", found, "give the map of local ids")
        slots = x.new_zeros(*ids.shape, self.spec.hidden)
        for expert in torch.unique(ids[ids >= 0]).tolist():
            token, slot = torch.where(ids == expert)
            rows, weight = x[token], weights[token, slot, None]
            rows = self._expert(int(expert), rows * weight if self.spec.router_weight_on_input else rows)
            slots[token, slot] = rows if self.spec.router_weight_on_input else rows * weight
        return slots

    def _expert(self, index: int, rows: Tensor) -> Tensor:
        up = self._matrix("up", index, rows)
        gate = self._matrix("gate", index, rows) if "gate" in self.matrices else None
        return self._matrix("down", index, activate(self.spec.activation, up, gate))

    def _matrix(self, name: str, index: int, rows: Tensor) -> Tensor:
        weight: CanonicalWeight = self.matrices[name]  # type: ignore[assignment]
        if self.quantizer is not None and rows.numel():
            rows = self.quantizer(rows, *weight.input_numbers(index))
        y = rows @ weight.expert(index).dequantize().T
        bias = getattr(self, f"{name}_bias")
        return y if bias is None else y + bias[index].float()

    def workspace_size(self, max_tokens: int) -> int:
        return 0

    def update(self, weights: MoEWeights) -> None:
        check_moe_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        for name in self.matrices:
            self.matrices[name].update(getattr(weights, name))  # type: ignore[operator]
        for name in ("gate_bias", "up_bias", "down_bias"):
            if getattr(self, name) is not None:
                getattr(self, name).copy_(getattr(weights, name))


class ReferenceMoE(MoEKernel):
    """Every scheme, every activation; the definition that other kernels are measured against."""

    name = "moe"
    devices = ("any",)
    isa = ()
    architectures = ()
    schemes = EVERY_SCHEME
    numerics = Numerics(deterministic=True)
    dtypes = ("fp32", "bf16", "fp16")
    out_dtypes = ("fp32", "bf16", "fp16")
    routing = ("routed",)
    epilogue = MoEEpilogue(
        activations=ACTIVATIONS, alpha=True, limit=True, gated=True, ungated=True, bias=True, mixed_schemes=True, expert_map=True,
        expert_parallel=True, router_weight_on_input=True, routed_scaling=True, shared_experts=False, lora=False,
    )  # fmt: skip
    limits = ()
    m_range = (1, None)
    layout = "canonical"
    error_bound = OUTPUT_ROUNDING
    priority = 0

    def refusals(self, spec: MoESpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *input_refusals(spec))

    def computes(self, spec: MoESpec) -> Numerics:
        quantizer = input_quantizer(spec)
        return self.numerics if quantizer is None else replace(self.numerics, activations=(ActivationQuant.of(quantizer.scheme),))

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> ReferenceMoEOp:
        return ReferenceMoEOp(spec, weights)
