"""The prepared ops, and the torch ops that they call: registered with fake kernels, so that torch.compile sees one node each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal_backend_example.layout import Columns, expand
from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError
from hal_core.ops import MoEExperts, QuantLinear, Routed
from hal_core.weight_checks import check_linear_weights, check_moe_weights

if TYPE_CHECKING:
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["ExpertsOp", "LinearOp"]


@torch.library.custom_op("hal_example::linear", mutates_args=())
def linear(x: Tensor, weight: list[Tensor], bias: Tensor | None, k: int, group: int, bits: int, dtype: torch.dtype) -> Tensor:
    """``x [M, K]`` to ``[M, N]``, float32 inside, rounded once."""
    y = x.float() @ expand(weight, k, group, bits)
    return (y if bias is None else y + bias.float()).to(dtype)


@linear.register_fake
def _(x: Tensor, weight: list[Tensor], bias: Tensor | None, k: int, group: int, bits: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], weight[0].shape[-1]), dtype=dtype)


@torch.library.custom_op("hal_example::experts", mutates_args=())
def experts(
    x: Tensor, ids: Tensor, scores: Tensor, expert_map: Tensor | None, weights: list[Tensor], biases: list[Tensor], sizes: list[int],
    count: int, kind: str, alpha: float, limit: float, scaling: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``[T, k, H]``: every expert on every token, of which the routed slots are taken. Small and simple, not fast.

    sizes: K, group and bits of gate, up and down. count: global experts.
    """
    local = _local_ids(ids, expert_map, count, weights[0].shape[0])
    gate, up, down = (expand(weights[3 * i : 3 * i + 3], *sizes[3 * i : 3 * i + 3]) for i in range(3))
    bias = [b.float().unsqueeze(1) for b in biases] or [0.0, 0.0, 0.0]
    wide = x.float()
    hidden = _activate(kind, wide @ gate + bias[0], wide @ up + bias[1], alpha, limit)
    y = hidden @ down + bias[2]
    token = torch.arange(len(x)).unsqueeze(1).expand(ids.shape)
    slots = y[local.clamp(min=0), token] * scores.unsqueeze(-1) * scaling
    return torch.where((local >= 0).unsqueeze(-1), slots, 0.0).to(dtype)


@experts.register_fake
def _(
    x: Tensor, ids: Tensor, scores: Tensor, expert_map: Tensor | None, weights: list[Tensor], biases: list[Tensor], sizes: list[int],
    count: int, kind: str, alpha: float, limit: float, scaling: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return x.new_empty((*ids.shape, x.shape[1]), dtype=dtype)


def _local_ids(ids: Tensor, expert_map: Tensor | None, count: int, here: int) -> Tensor:
    wrong = (ids < -1) | (ids >= count)
    if bool(wrong.any()):
        token, slot = (int(i) for i in wrong.nonzero()[0])
        raise ShapeError("topk id", f"{int(ids[token, slot])} at token {token}, slot {slot}", f"ids run from 0 to {count - 1}, -1 skips")
    if expert_map is None:
        return ids.long()
    if not bool(((expert_map >= -1) & (expert_map < here)).all()):
        raise ShapeError("expert_map", f"local ids {expert_map.tolist()}", f"they run from -1 to {here - 1}")
    return torch.where(ids < 0, -1, expert_map.long()[ids.clamp(min=0).long()])


def _activate(kind: str, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if kind == "swiglu_oai":
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    return torch.nn.functional.silu(gate) * up


def _delivered(y: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return y
    if out.shape != y.shape or out.dtype != y.dtype:
        raise ShapeError("out", f"{out.dtype} {list(out.shape)}", f"give {y.dtype} {list(y.shape)}")
    return out.copy_(y)


def _checked(x: Tensor, width: int) -> Tensor:
    if not x.is_floating_point() or x.dim() < 1 or x.shape[-1] != width:
        raise ShapeError("x", f"{x.dtype} {list(x.shape)}", f"give floats [.., {width}]")
    return x


class LinearOp(QuantLinear):
    """A prepared linear."""

    columns: type[Columns] = Columns

    def __init__(self, spec: LinearSpec, weights: LinearWeights) -> None:
        super().__init__()
        self.spec, self.dtype = spec, torch_dtype(spec.output)
        self._check(weights)
        self.weight = self.columns(weights.weight)
        self.register_buffer("bias", weights.bias)

    def _check(self, weights: LinearWeights) -> None:
        s = self.spec
        check_linear_weights(s, weights)

    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        s, w = self.spec, self.weight
        rows = _checked(x, s.k).reshape(-1, s.k)
        y = linear(rows, w.arguments(), self.bias, s.k, w.group, w.scheme.bits, self.dtype)
        return _delivered(y.reshape(*x.shape[:-1], s.n), out)

    def update(self, weights: LinearWeights) -> None:
        self._check(weights)
        self.weight.update(weights.weight)
        if self.bias is not None:
            self.bias.copy_(weights.bias)


class ExpertsOp(MoEExperts):
    """A prepared block of experts."""

    columns: type[Columns] = Columns

    def __init__(self, spec: MoESpec, weights: MoEWeights) -> None:
        super().__init__()
        check_moe_weights(spec, weights)
        self.spec, self.dtype = spec, torch_dtype(spec.output)
        self.gate, self.up, self.down = (self.columns(w) for w in (weights.gate, weights.up, weights.down))
        for name in ("gate_bias", "up_bias", "down_bias"):
            self.register_buffer(name, getattr(weights, name))

    def parts(self) -> tuple[nn.Module, ...]:
        return self.gate, self.up, self.down

    def compute(self, x, routing, expert_map, out, workspace, reduce):  # types: see the base class
        s = self.spec
        if not isinstance(routing, Routed):
            raise ShapeError("routing", type(routing).__name__, "give Routed(topk_ids, topk_weights)")
        ids, scores = routing.topk_ids, routing.topk_weights
        _checked(x, s.hidden)
        if x.dim() != 2 or ids.shape != scores.shape or ids.shape[:1] != x.shape[:1]:
            raise ShapeError("experts input", f"x {list(x.shape)}, ids {list(ids.shape)}, weights {list(scores.shape)}", "give T rows each")
        if (expert_map is not None) != s.expert_map or (expert_map is not None and tuple(expert_map.shape) != (s.num_experts,)):
            found = "missing" if expert_map is None else f"shape {list(expert_map.shape)}"
            raise ShapeError("expert_map", found, f"the spec says expert_map={s.expert_map} for {s.num_experts} experts")
        slots = self.slots(x, ids, scores, expert_map, torch.float32 if reduce else self.dtype)
        return _delivered(slots.sum(dim=1).to(self.dtype) if reduce else slots, out)

    def slots(self, x: Tensor, ids: Tensor, scores: Tensor, expert_map: Tensor | None, dtype: torch.dtype) -> Tensor:
        s, a = self.spec, self.spec.activation
        tensors = [tensor for part in self.parts() for tensor in part.arguments()]
        sizes = [size for part in self.parts() for size in (part.shape[-1], part.group, part.scheme.bits)]
        biases = [self.gate_bias, self.up_bias, self.down_bias] if s.bias else []
        alpha, limit = 1.702 if a.alpha is None else a.alpha, float("inf") if a.limit is None else a.limit
        return experts(
            x, ids, scores, expert_map, tensors, biases, sizes, s.num_experts, a.kind, alpha, limit, s.routed_scaling, dtype
        )  # fmt: skip

    def workspace_size(self, max_tokens: int) -> int:
        return 0

    def update(self, weights: MoEWeights) -> None:
        check_moe_weights(self.spec, weights)
        for name in ("gate", "up", "down"):
            getattr(self, name).update(getattr(weights, name))
        for name in ("gate_bias", "up_bias", "down_bias"):
            if getattr(self, name) is not None:
                getattr(self, name).copy_(getattr(weights, name))
