"""The prepared ops: packed buffers, and one call of a registered native op on the hot path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from hal_backend_cpu import _native
from hal_backend_cpu.layer import CpuLayer
from hal_backend_cpu.layout import PackedMatrix
from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError
from hal_core.ops import MoEExperts, QuantEmbedding, QuantLinear, Routed
from hal_core.weight_checks import (
    check_embedding_weights,
    check_linear_weights,
    check_moe_weights,
    check_same_kind,
    kinds_of,
    refuse_gradients,
)

if TYPE_CHECKING:
    from hal_core.canonical import QuantizedTensor
    from hal_core.decoder import DecoderParts
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.spec import EmbeddingSpec, LinearSpec, MoESpec
    from hal_core.transforms import WeightTransform

__all__ = ["CpuEmbedding", "CpuLinear", "CpuMoE"]


#: The overloads themselves: finding them anew costs a tenth of a microsecond a call.
_LINEAR, _MOE_OUT = _native.ops.linear.default, _native.ops.moe_out.default
#: In place of the weights of a gate, where there is none.
_NO_MATRIX = (None,) * 5


def _matmul(weight: PackedMatrix, x: Tensor, bias: Tensor | None, isa: str, out: Tensor | None) -> Tensor:
    if x.requires_grad:
        refuse_gradients("cpu linear", x)
    if weight.on_meta:
        raise _nowhere("cpu linear")
    x = x if x.is_contiguous() else x.contiguous()
    arguments = (x, *weight.arguments(), bias, *weight.sizes, isa)
    try:
        if out is None:
            return _LINEAR(*arguments)
        _native.ops.linear_out(*arguments, out)
    except (RuntimeError, NotImplementedError) as error:
        raise ShapeError("cpu linear", _first_line(error)) from error
    return out


def _nowhere(asked: str) -> ShapeError:
    # torch would answer for weights without storage by its shape rule alone, with memory that nobody wrote
    return ShapeError(asked, "its packed weights are on the meta device", "keep the op on the CPU")


def _first_line(error: Exception) -> str:
    # torch appends a C++ trace below the message
    return str(error).splitlines()[0]


def _check_change(change: WeightTransform | None, *weights: QuantizedTensor | None) -> None:
    """Raise unless a change that the kernel makes as it reads the weights stays within its bound for these."""
    for weight in weights if change is not None else ():
        if weight is not None and not weight.values.is_meta:
            for each in (weight,) if len(weight.shape) == 2 else map(weight.expert, range(weight.shape[0])):
                change.apply(each)


class CpuLinear(QuantLinear):
    """``y = x @ w.T + bias``: float32 sums in a fixed order, one rounding; operands exact, or as the level treats them."""

    def __init__(self, spec: LinearSpec, weights: LinearWeights, isa: str, change: WeightTransform | None = None) -> None:
        super().__init__()
        check_linear_weights(spec, weights)
        self.spec, self.isa, self.kinds, self.change = spec, isa, kinds_of(weights), change
        _check_change(change, weights.weight)
        self.weight = PackedMatrix(weights.weight)
        self.register_buffer("bias", None if weights.bias is None else weights.bias.float())

    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return _matmul(self._modules["weight"], x, self._buffers["bias"], self.isa, out)

    def update(self, weights: LinearWeights) -> None:
        check_linear_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        _check_change(self.change, weights.weight)
        self.weight.update(weights.weight)
        if self.bias is not None:
            self.bias.copy_(weights.bias)

    @classmethod
    def fuse(cls, parts: DecoderParts) -> CpuLayer | None:
        return CpuLayer(parts) if CpuLayer.serves(parts) else None


class CpuEmbedding(QuantEmbedding):
    """Rows of the packed table; the tied head multiplies by the same packed weights."""

    def __init__(self, spec: EmbeddingSpec, weights: LinearWeights, isa: str) -> None:
        super().__init__()
        check_embedding_weights(spec, weights)
        self.kinds = kinds_of(weights)
        self.spec, self.isa, self.dtype = spec, isa, torch_dtype(spec.dtype)
        self.weight = PackedMatrix(weights.weight)

    def lookup(self, ids: Tensor) -> Tensor:
        w = self.weight
        if w.on_meta:
            raise _nowhere("cpu embedding")
        try:
            return _native.ops.lookup(ids.contiguous(), *w.arguments(), w.n, w.k, w.group, w.scheme.bits, self.dtype)
        except (RuntimeError, NotImplementedError) as error:
            raise ShapeError("cpu embedding", _first_line(error)) from error

    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return _matmul(self.weight, x, None, self.isa, out)

    def update(self, weights: LinearWeights) -> None:
        check_embedding_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        self.weight.update(weights.weight)


class CpuMoE(MoEExperts):
    """Routing, gate, up, activation, down and the weighted sum in one native call."""

    def __init__(self, spec: MoESpec, weights: MoEWeights, isa: str, change: WeightTransform | None = None) -> None:
        super().__init__()
        check_moe_weights(spec, weights)
        self.spec, self.isa, self.kinds, self.change = spec, isa, kinds_of(weights), change
        _check_change(change, weights.gate, weights.up, weights.down)
        self.gate = None if weights.gate is None else PackedMatrix(weights.gate)
        self.up, self.down = PackedMatrix(weights.up), PackedMatrix(weights.down)
        for name in ("gate_bias", "up_bias", "down_bias"):
            bias = getattr(weights, name)
            self.register_buffer(name, None if bias is None else bias.float())
        a, gate = spec.activation, self.gate
        #: What the native op takes between its tensors and the words of a call.
        self.constants = (
            spec.local, spec.intermediate, 0 if gate is None else gate.group, self.up.group, self.down.group,
            0 if gate is None else gate.scheme.bits, self.up.scheme.bits, self.down.scheme.bits,
            a.kind, a.alpha, a.limit, spec.routed_scaling, spec.router_weight_on_input,
        )  # fmt: skip

    def compute(self, x, routing, expert_map, out, workspace, reduce):  # types: see the base class
        if not isinstance(x, Tensor) or not isinstance(routing, Routed):
            found = f"{type(x).__name__} with {type(routing).__name__}"
            raise ShapeError("cpu experts", found, "give a tensor and Routed(topk_ids, topk_weights)")
        own, parts = self._buffers, self._modules  # not by attribute, see PackedMatrix.arguments
        gate, up, down = parts.get("gate"), parts["up"], parts["down"]
        if x.requires_grad:
            refuse_gradients("cpu experts", x)
        if up.on_meta:
            raise _nowhere("cpu experts")
        ids = routing.topk_ids
        self._check_call(x, ids, expert_map)
        arguments = (
            x.contiguous(), ids.contiguous(), routing.topk_weights.contiguous(),
            *(_NO_MATRIX if gate is None else gate.arguments()), own["gate_bias"],
            *up.arguments(), own["up_bias"], *down.arguments(), own["down_bias"], expert_map, *self.constants, reduce, self.isa,
        )  # fmt: skip
        try:
            if out is None:
                return _native.ops.moe(*arguments)
            _MOE_OUT(*arguments, out)
        except (RuntimeError, NotImplementedError) as error:
            raise ShapeError("cpu experts", _first_line(error)) from error
        return out

    def _check_call(self, x: Tensor, ids: Tensor, expert_map: Tensor | None) -> None:
        s = self.spec
        # padding hides a wrong width from the native check
        if x.dim() != 2 or x.shape[1] != s.hidden or ids.dim() != 2 or ids.shape[1] != s.top_k:
            found = f"x {list(x.shape)}, topk_ids {list(ids.shape)}"
            raise ShapeError("experts input", found, f"give x [T, {s.hidden}], ids and weights [T, {s.top_k}]")
        if (expert_map is not None) != s.expert_map or (expert_map is not None and tuple(expert_map.shape) != (s.num_experts,)):
            found = "missing" if expert_map is None else f"shape {list(expert_map.shape)}"
            raise ShapeError("experts expert_map", found, f"the spec says expert_map={s.expert_map} for {s.num_experts} experts")
        if expert_map is None and self.constants[0] != s.num_experts:
            raise ShapeError("experts", f"{s.local} of {s.num_experts} experts without an expert_map", "give the map of local ids")

    def workspace_size(self, max_tokens: int) -> int:
        return 0  # the op keeps its own bounded scratch

    def update(self, weights: MoEWeights) -> None:
        check_moe_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        _check_change(self.change, weights.gate, weights.up, weights.down)
        for name in ("gate", "up", "down"):
            matrix: nn.Module | None = getattr(self, name)
            if matrix is not None:
                matrix.update(getattr(weights, name))
        for name in ("gate_bias", "up_bias", "down_bias"):
            if getattr(self, name) is not None:
                getattr(self, name).copy_(getattr(weights, name))
