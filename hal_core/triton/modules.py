"""The prepared ops over the Triton kernels: packed buffers, checks that need no device, one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hal_core.check import device_flag
from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError
from hal_core.ops import MoEExperts, QuantLinear, Routed
from hal_core.reference.activations import SWIGLU_OAI_ALPHA
from hal_core.triton.launch import FloatMatrix, IntegerMatrix, sort_scratch
from hal_core.triton.layout import StepMatrix
from hal_core.triton.ops import Experts, float_linear, integer_linear, moe
from hal_core.triton.registered import call_experts, call_linear
from hal_core.triton.rows import RowMatrix
from hal_core.weight_checks import check_linear_weights, check_moe_weights, check_same_kind, kinds_of, refuse_gradients

if TYPE_CHECKING:
    from hal_core.canonical import QuantizedTensor
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["GroupedExperts", "TritonExperts", "TritonLinear"]

#: Columns of one scale of activations, where weights have block scales.
X_GROUP = 128


def _packed(weight: QuantizedTensor) -> StepMatrix | RowMatrix:
    return StepMatrix(weight) if weight.scheme.dtype.startswith("int") else RowMatrix(weight)


def _view(matrix: StepMatrix | RowMatrix, bias: Tensor | None) -> IntegerMatrix | FloatMatrix:
    if isinstance(matrix, StepMatrix):
        return IntegerMatrix.of(matrix, bias)
    return FloatMatrix(matrix.get_buffer("weight"), matrix._buffers["scales"], bias, matrix.block)


def _where(matrix: StepMatrix | RowMatrix) -> torch.device:
    return next(matrix.buffers()).device


def _rows(asked: str, x: Any, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not isinstance(x, Tensor):
        raise ShapeError(f"{asked} input", f"a {type(x).__name__}", "this kernel takes unquantized activations")
    if x.dim() < 1 or x.shape[-1] != k or x.dtype != dtype or x.device != device:
        raise ShapeError(f"{asked} input", f"{x.dtype} {list(x.shape)} on {x.device}", f"give {dtype} [.., {k}] on {device}")
    refuse_gradients(asked, x)
    return x.reshape(-1, k).contiguous()


def _room(asked: str, out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device or not out.is_contiguous():
        found = f"{out.dtype} {list(out.shape)} on {out.device}{'' if out.is_contiguous() else ', not contiguous'}"
        raise ShapeError(f"{asked} out", found, f"give contiguous {dtype} {list(shape)} on {device}")
    return out


class _Prepared(nn.Module):
    """Views of packed buffers, made anew when these move. ``packed``: how a weight is packed."""

    packed = staticmethod(_packed)

    def _apply(self, fn: object, recurse: bool = True) -> _Prepared:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.refresh()
        return self

    def refresh(self) -> None:
        """Take up the buffers as they are."""
        raise NotImplementedError


class TritonLinear(_Prepared, QuantLinear):
    """``y = x @ w.T + bias`` in float32 sums, rounded once."""

    def __init__(self, spec: LinearSpec, weights: LinearWeights) -> None:
        super().__init__()
        check_linear_weights(spec, weights)
        self.spec, self.kinds = spec, kinds_of(weights)
        self.dtype, self.output = torch_dtype(spec.dtype), torch_dtype(spec.output)
        self.weight = self.packed(weights.weight)
        # integers of the same bits: Module.to(dtype) would round a float buffer
        self.register_buffer("bias", None if weights.bias is None else weights.bias.float().view(torch.int32))
        self.refresh()

    def refresh(self) -> None:
        bias = self._buffers["bias"]
        self.view, self.device = _view(self.weight, None if bias is None else bias.view(torch.float32)), _where(self.weight)

    def checked(self, x: Any) -> tuple[Tensor, tuple[int, ...]]:
        """``x`` as contiguous rows, and the shape of the result; raises where it is not of the spec's width and dtype, or elsewhere."""
        rows = _rows("triton linear", x, self.spec.k, self.dtype, self.device)
        return rows, (*x.shape[:-1], self.spec.n)

    def room(self, out: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """``out``, or new memory; raises where it does not fit."""
        return _room("triton linear", out, shape, self.output, self.device)

    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        rows, shape = self.checked(x)
        if torch.compiler.is_compiling():
            y = call_linear(rows, self.view, self.spec.n, X_GROUP, self.output).view(shape)
            return y if out is None else out.copy_(y)
        y = self.room(out, shape)
        flat = y.view(-1, self.spec.n)
        if isinstance(self.view, IntegerMatrix):
            integer_linear(rows, self.view, flat)
        else:
            float_linear(rows, self.view, flat, X_GROUP)
        return y

    def update(self, weights: LinearWeights) -> None:
        check_linear_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        self.weight.update(weights.weight)
        if weights.bias is not None:
            self.get_buffer("bias").copy_(weights.bias.float().view(torch.int32))


class TritonExperts(_Prepared, MoEExperts):
    """Sorting, gate and up with the activation, down, and the weighted sum, one after another in one stream."""

    grouped = False

    def __init__(self, spec: MoESpec, weights: MoEWeights) -> None:
        super().__init__()
        check_moe_weights(spec, weights)
        self.spec, self.kinds = spec, kinds_of(weights)
        self.dtype, self.output = torch_dtype(spec.dtype), torch_dtype(spec.output)
        self.gate = None if weights.gate is None else self.packed(weights.gate)
        self.up, self.down = self.packed(weights.up), self.packed(weights.down)
        for name in ("gate_bias", "up_bias", "down_bias"):
            bias = getattr(weights, name)
            self.register_buffer(name, None if bias is None else bias.float().view(torch.int32))
        self.refresh()

    def refresh(self) -> None:
        s, act = self.spec, self.spec.activation
        biases = {n: None if (b := self._buffers[f"{n}_bias"]) is None else b.view(torch.float32) for n in ("gate", "up", "down")}
        gate = None if self.gate is None else _view(self.gate, biases["gate"])
        self.experts = Experts(
            _view(self.up, biases["up"]), _view(self.down, biases["down"]), gate, act.kind,
            SWIGLU_OAI_ALPHA if act.alpha is None else act.alpha, act.limit, s.num_experts, s.local, s.routed_scaling,
            s.router_weight_on_input, X_GROUP, self.grouped, sort_scratch(s.local, _where(self.up)),
        )  # fmt: skip
        self.device = _where(self.up)
        if self.device.type != "meta":
            device_flag(self.device)  # now, so that no captured graph makes it

    def compute(
        self, x: Any, routing: Any, expert_map: Tensor | None, out: Tensor | None, workspace: Tensor | None, reduce: bool
    ) -> Tensor:
        ids, weights = self._routing(routing, x, expert_map)
        rows = _rows("triton experts", x, self.spec.hidden, self.dtype, self.device)
        mapping = None if expert_map is None else expert_map.contiguous()
        if torch.compiler.is_compiling():
            y = call_experts(rows, ids, weights, mapping, self.experts, reduce, self.output)
            return y if out is None else out.copy_(y)
        shape = (rows.shape[0], self.spec.hidden) if reduce else (*ids.shape, self.spec.hidden)
        return moe(rows, ids, weights, mapping, self.experts, _room("triton experts", out, shape, self.output, rows.device))

    def _routing(self, routing: Any, x: Any, expert_map: Tensor | None) -> tuple[Tensor, Tensor]:
        """Contiguous ids and weights; raises where shapes, dtypes or devices do not agree. What ids are is seen on the device."""
        s = self.spec
        if not isinstance(routing, Routed) or not isinstance(x, Tensor):
            found = f"{type(x).__name__} with {type(routing).__name__}"
            raise ShapeError("triton experts", found, "give a tensor and Routed(topk_ids, topk_weights)")
        ids, weights = routing.topk_ids, routing.topk_weights
        if x.dim() != 2 or tuple(ids.shape) != (x.shape[0], s.top_k) or ids.shape != weights.shape:
            found = f"x {list(x.shape)}, topk_ids {list(ids.shape)}, topk_weights {list(weights.shape)}"
            raise ShapeError("experts input", found, f"give x [T, {s.hidden}], ids and weights [T, {s.top_k}]")
        if ids.dtype not in (torch.int32, torch.int64) or not weights.is_floating_point():
            raise ShapeError("experts routing", f"topk_ids {ids.dtype}, topk_weights {weights.dtype}", "give int32 ids and float32 weights")
        if (expert_map is not None) != s.expert_map or (expert_map is not None and tuple(expert_map.shape) != (s.num_experts,)):
            found = "missing" if expert_map is None else f"shape {list(expert_map.shape)}"
            raise ShapeError("experts expert_map", found, f"the spec says expert_map={s.expert_map} for {s.num_experts} experts")
        if expert_map is not None and expert_map.dtype not in (torch.int32, torch.int64):
            raise ShapeError("experts expert_map", f"{expert_map.dtype}", "give int32 local ids")
        if expert_map is None and s.local != s.num_experts:
            raise ShapeError("experts", f"{s.local} of {s.num_experts} experts without an expert_map", "give the map of local ids")
        places = {t.device for t in (ids, weights, *(() if expert_map is None else (expert_map,)))}
        if places != {self.device}:
            raise ShapeError("experts routing", f"on {', '.join(map(str, places))}", f"keep all on {self.device}")
        return ids.contiguous(), weights.contiguous()

    def workspace_size(self, max_tokens: int) -> int:
        return 0  # scratch comes from torch's allocator, which captured graphs keep

    def update(self, weights: MoEWeights) -> None:
        check_moe_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        for name in ("gate", "up", "down"):
            matrix: Any = getattr(self, name)
            if matrix is not None:
                matrix.update(getattr(weights, name))
        for name in ("gate_bias", "up_bias", "down_bias"):
            bias = getattr(weights, name)
            if bias is not None:
                self.get_buffer(name).copy_(bias.float().view(torch.int32))


class GroupedExperts(TritonExperts):
    """The same by torch's grouped product: bfloat16 weights, no biases."""

    grouped = True
