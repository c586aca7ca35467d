"""The prepared ops over the Triton kernels: packed buffers, checks that need no device, one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal_core.check import device_flag
from hal_core.prepared import PreparedExperts, PreparedLinear
from hal_core.reference.activations import SWIGLU_OAI_ALPHA
from hal_core.triton.launch import FloatMatrix, IntegerMatrix, sort_scratch
from hal_core.triton.layout import StepMatrix
from hal_core.triton.ops import Experts, float_linear, integer_linear, moe
from hal_core.triton.registered import call_experts, call_linear
from hal_core.triton.repeat import Repeats, buffers_of
from hal_core.triton.rows import RowMatrix

if TYPE_CHECKING:
    from hal_core.canonical import QuantizedTensor

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


class TritonLinear(PreparedLinear):
    """``y = x @ w.T + bias`` in float32 sums, rounded once."""

    asked = "triton linear"
    packed = staticmethod(_packed)

    def refresh(self) -> None:
        self.view, self.device = _view(self.weight, self.held_bias("bias")), _where(self.weight)
        self.repeats = Repeats(buffers_of(self))  # calls that were recorded hold addresses of before

    def traced(self, rows: Tensor) -> Tensor:
        return call_linear(rows, self.view, self.spec.n, X_GROUP, self.output)

    def launch(self, rows: Tensor, out: Tensor) -> None:
        if not self.repeats.of(self):
            self.refresh()
        self.repeats(rows.shape[0], (rows, out), lambda: self.launched(rows, out))

    def launched(self, rows: Tensor, out: Tensor) -> None:
        """The launches themselves, as they are recorded."""
        if isinstance(self.view, IntegerMatrix):
            integer_linear(rows, self.view, out)
        else:
            float_linear(rows, self.view, out, X_GROUP)


class TritonExperts(PreparedExperts):
    """Sorting, gate and up with the activation, down, and the weighted sum, one after another in one stream."""

    asked = "triton experts"
    packed = staticmethod(_packed)
    grouped = False

    def refresh(self) -> None:
        s, act = self.spec, self.spec.activation
        gate = None if self.gate is None else _view(self.gate, self.held_bias("gate_bias"))
        where, scratch = _where(self.up), getattr(getattr(self, "experts", None), "scratch", None)
        if scratch is None or scratch.device != where:  # kept where it can be: memory made under capture is of the graph
            scratch = sort_scratch(s.local, where)
        self.experts = Experts(
            _view(self.up, self.held_bias("up_bias")), _view(self.down, self.held_bias("down_bias")), gate, act.kind,
            SWIGLU_OAI_ALPHA if act.alpha is None else act.alpha, act.limit, s.num_experts, s.local, s.routed_scaling,
            s.router_weight_on_input, X_GROUP, self.grouped, scratch,
        )  # fmt: skip
        self.device, self.repeats = where, Repeats(buffers_of(self))  # as above
        if self.device.type != "meta":
            device_flag(self.device)  # now, so that no captured graph makes it

    def traced(self, rows: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, reduce: bool) -> Tensor:
        return call_experts(rows, ids, weights, expert_map, self.experts, reduce, self.output)

    def launch(self, rows: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, out: Tensor) -> Tensor:
        if not self.repeats.of(self):
            self.refresh()
        key = rows.shape[0], ids.dtype, weights.dtype, out.dim(), expert_map is None or expert_map.dtype
        self.repeats(key, (rows, ids, weights, expert_map, out), lambda: moe(rows, ids, weights, expert_map, self.experts, out))
        return out


class GroupedExperts(TritonExperts):
    """The same by torch's grouped product: bfloat16 weights, no biases."""

    grouped = True
