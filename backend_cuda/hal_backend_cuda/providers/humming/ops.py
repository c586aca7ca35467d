"""The prepared ops: a dense product, and a block of experts as two products with this backend's steps around them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hal_backend_cuda.providers.fused_steps import fastest_steps
from hal_backend_cuda.providers.humming.layout import humming_tensors, stacked_rows
from hal_backend_cuda.providers.humming.runtime import (
    HummingMatrix,
    Problem,
    compile_dense,
    compile_experts,
    quantize_rows,
)
from hal_backend_cuda.providers.inputs import on_cuda
from hal_backend_cuda.providers.steps import Route
from hal_core.dtypes import torch_dtype
from hal_core.op_parts import Numbered, NumberedOp, check_grouped, check_out, check_routing, check_rows
from hal_core.ops import MoEExperts, QuantLinear
from hal_core.triton.repeat import Repeats, buffers_of, room
from hal_core.weight_checks import check_linear_weights, check_moe_weights, check_same_kind, kinds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from hal_backend_cuda.providers.humming.recipes import Recipe
    from hal_backend_cuda.providers.steps import MoESteps, Sorted
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["HummingExperts", "HummingGroups", "HummingLinear"]


def _with_bias(tensors: dict[str, Tensor], bias: Tensor | None, dtype: str) -> dict[str, Tensor]:
    found = on_cuda(tensors)
    if bias is not None:
        found["bias"] = bias.to(found["weight"].device, torch_dtype(dtype))
    return found


class _Repeating(nn.Module):
    """Calls that were recorded hold addresses: when buffers move, or others stand in their places, they are forgotten."""

    repeats: Repeats

    def repeated(self, key: Hashable, tensors: tuple[Tensor | None, ...], call: Callable[[], object]) -> None:
        """As :class:`Repeats`, of this op's buffers as they are."""
        if not self.repeats.of(self):
            self.repeats = Repeats(buffers_of(self))
        self.repeats(key, tensors, call)

    def _apply(self, fn: Any, recurse: bool = True) -> _Repeating:
        super()._apply(fn, recurse)
        self.repeats = Repeats()
        return self


class HummingLinear(_Repeating, QuantLinear):
    """``y = x @ w.T + bias`` by Humming's dense kernels."""

    def __init__(self, spec: LinearSpec, weights: LinearWeights, recipe: Recipe) -> None:
        super().__init__()
        check_linear_weights(spec, weights)
        self.spec, self.recipe, self.kinds, self.dtype = spec, recipe, kinds_of(weights), torch_dtype(spec.dtype)
        problem = Problem(recipe, spec.weights, spec.n, spec.k, spec.dtype, spec.bias)
        self.matrix = HummingMatrix(problem, self._tensors(weights))
        self.device, self.repeats = self.matrix.locks.device, Repeats()
        compile_dense(self.matrix)

    def _tensors(self, weights: LinearWeights) -> dict[str, Tensor]:
        return _with_bias(humming_tensors(weights.weight, self.spec.dtype), weights.bias, self.spec.dtype)

    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        n, device = self.spec.n, self.device
        rows = check_rows("humming linear", x, self.spec.k, self.dtype, device)
        y = check_out("humming linear", out, (*x.shape[:-1], n), self.dtype, device)
        if not rows.shape[0]:
            return y
        flat = y if y.dim() == 2 else y.view(-1, n)
        if torch.compiler.is_compiling():
            self._launched(rows, flat)
        else:
            self.repeated(rows.shape[0], (rows, flat), lambda: self._launched(rows, flat))
        return y

    def _launched(self, rows: Tensor, out: Tensor) -> None:
        codes, scales = quantize_rows(self.recipe, rows)
        self.matrix.launch(codes, scales, out)

    def update(self, weights: LinearWeights) -> None:
        check_linear_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        self.matrix.refill(self._tensors(weights))


class _HummingBlock(_Repeating, NumberedOp, MoEExperts):
    """Gate and up as one matrix, down as another. Nothing waits for the device."""

    grouped: bool
    numbers: ClassVar[Numbered[Any]] = Numbered()

    def __init__(self, spec: MoESpec, weights: MoEWeights, recipe: Recipe, steps: MoESteps | None = None) -> None:
        super().__init__()
        check_moe_weights(spec, weights)
        self.spec, self.recipe, self.kinds, self.dtype = spec, recipe, kinds_of(weights), torch_dtype(spec.dtype)
        self.wide = spec.intermediate * (2 if spec.gate else 1)
        shape, more = (self.wide, spec.hidden, spec.dtype, spec.bias, spec.local), {"grouped": self.grouped}
        first = Problem(recipe, spec.up, *shape, stacked=spec.gate is not None, **more)
        second = Problem(recipe, spec.down, spec.hidden, spec.intermediate, *shape[2:], **more)
        self.first = HummingMatrix(first, self._first(weights))
        self.second = HummingMatrix(second, self._second(weights))
        self._compile()
        self.device, self.repeats = self.first.locks.device, Repeats()
        self.steps = fastest_steps(self.device, spec.local) if steps is None else steps
        self.enrol()

    def _first(self, weights: MoEWeights) -> dict[str, Tensor]:
        if weights.gate is None:
            return _with_bias(humming_tensors(weights.up, self.spec.dtype), weights.up_bias, self.spec.dtype)
        matrices, biases = [weights.gate, weights.up], [weights.gate_bias, weights.up_bias]
        tensors = stacked_rows([humming_tensors(matrix, self.spec.dtype) for matrix in matrices], self.spec.dtype)
        bias = torch.cat([b.float() for b in biases], dim=-1) if self.spec.bias else None
        return _with_bias(tensors, bias, self.spec.dtype)

    def _second(self, weights: MoEWeights) -> dict[str, Tensor]:
        return _with_bias(humming_tensors(weights.down, self.spec.dtype), weights.down_bias, self.spec.dtype)

    def _compile(self) -> None:
        """Build the tiles of both products."""
        compile_dense(self.first)
        compile_dense(self.second)

    def _products(self, rows: Tensor, order: Sorted | Tensor, top_k: int, out: Tensor) -> None:
        """``rows [T, H]`` through both products, to ``out [T * top_k, H]``."""
        codes, scales = quantize_rows(self.recipe, rows)
        wide = room((out.shape[0], self.wide), self.dtype, rows.device)
        self._modules["first"].launch(codes, scales, wide, order, top_k=top_k)
        self._modules["second"].launch(*self._activated(wide), out, order)

    def _stepped(self, key: Hashable, tensors: tuple[Tensor | None, ...], call: Callable[[], None]) -> None:
        """The call, or its launches again where every step tells of them."""
        if self.steps.told:
            self.repeated(key, tensors, call)
            return
        assert tensors[0] is not None  # rows
        with torch.cuda.device_of(tensors[0]):
            call()

    def _activated(self, wide: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the second product takes."""
        activation, gated = self.spec.activation, self.spec.gate is not None
        if self.recipe.quant is None:
            return self.steps.activate(wide, activation, gated), None
        return self.steps.quantized(wide, activation, gated, functools.partial(quantize_rows, self.recipe))

    def workspace_size(self, max_tokens: int) -> int:
        return 0

    def update(self, weights: MoEWeights) -> None:
        check_moe_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        # both are made before either is written: weights that do not fit change nothing
        first, second = self._first(weights), self._second(weights)
        self.first.refill(first)
        self.second.refill(second)


class HummingExperts(_HummingBlock):
    """Routing sort, two indexed products with the activation between them, weighted sum."""

    grouped = False

    def _compile(self) -> None:
        self.blocks = compile_experts(self.first, self.second)

    def compute(
        self, x: Any, routing: Any, expert_map: Tensor | None, out: Tensor | None, workspace: Tensor | None, reduce: bool
    ) -> Tensor:
        spec = self.spec
        routing = check_routing("humming experts", spec, x, routing, expert_map)
        expert_map = None if expert_map is None else expert_map.contiguous()
        rows = check_rows("humming experts", x, spec.hidden, self.dtype, self.device)
        shape = (rows.shape[0], spec.hidden) if reduce else (*routing.topk_ids.shape, spec.hidden)
        if torch.compiler.is_compiling():
            y = _EXPERTS(rows, routing.topk_ids, routing.topk_weights, expert_map, self.number, reduce)
            return y if out is None else check_out("humming experts", out, shape, self.dtype, x.device).copy_(y)
        y = check_out("humming experts", out, shape, self.dtype, x.device)
        if rows.shape[0]:
            self.run(rows, routing.topk_ids, routing.topk_weights, expert_map, y)
        return y

    def run(self, rows: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, y: Tensor) -> None:
        """``rows [T, H]``, checked, to ``y [T, H]``, or to ``[T, k, H]`` unreduced."""
        key = rows.shape[0], y.dim(), expert_map is None or expert_map.dtype
        self._stepped(key, (rows, ids, weights, expert_map, y), lambda: self._launched(rows, ids, weights, expert_map, y))

    def _launched(self, rows: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, y: Tensor) -> None:
        spec, steps, count = self.spec, self.steps, ids.numel()
        route = Route(ids, weights, spec.num_experts, spec.local, expert_map)
        order = steps.sort(route, self.blocks.block(count), self.blocks.capacity(count, spec.local))
        slots = room((count, spec.hidden), self.dtype, rows.device)
        self._products(rows, order, spec.top_k, slots)
        steps.reduce(slots, route, spec.routed_scaling, y)


class HummingGroups(_HummingBlock):
    """Rows that the caller has sorted by expert, in two products of contiguous groups; their results in the same order, unweighted."""

    grouped = True

    def compute(
        self, x: Any, routing: Any, expert_map: Tensor | None, out: Tensor | None, workspace: Tensor | None, reduce: bool
    ) -> Tensor:
        asked = "humming grouped experts"
        counts = check_grouped(asked, self.spec, x, routing, expert_map)
        rows = check_rows(asked, x, self.spec.hidden, self.dtype, self.device)
        if torch.compiler.is_compiling():
            y = _GROUPS(rows, counts, self.number)
            return y if out is None else check_out(asked, out, tuple(rows.shape), self.dtype, x.device).copy_(y)
        y = check_out(asked, out, tuple(rows.shape), self.dtype, x.device)
        if rows.shape[0]:
            self.run(rows, counts, y)
        else:
            self.steps.bounds(counts, y)  # tells of sizes that are not zero
        return y

    def run(self, rows: Tensor, counts: Tensor, y: Tensor) -> None:
        """``rows [R, H]``, checked, to ``y [R, H]``; rows past all groups to zeros."""
        self._stepped((rows.shape[0], counts.dtype), (rows, counts, y), lambda: self._launched(rows, counts, y))

    def _launched(self, rows: Tensor, counts: Tensor, y: Tensor) -> None:
        self._products(rows, self.steps.bounds(counts, y), 1, y)


def _experts(x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, number: int, reduce: bool) -> Tensor:
    op = HummingExperts.numbers[number]
    y = x.new_empty(x.shape if reduce else (*ids.shape, x.shape[1]))
    if x.shape[0]:
        op.run(x, ids, weights, expert_map, y)
    return y


_EXPERTS = torch.library.custom_op(
    "hal_cuda::humming_experts", _experts, mutates_args=(),
    schema="(Tensor x, Tensor ids, Tensor weights, Tensor? expert_map, int number, bool reduce) -> Tensor",
)  # fmt: skip


def _groups(x: Tensor, counts: Tensor, number: int) -> Tensor:
    y = torch.empty_like(x)
    if x.shape[0]:
        HummingGroups.numbers[number].run(x, counts, y)
    return y


_GROUPS = torch.library.custom_op(
    "hal_cuda::humming_groups", _groups, mutates_args=(), schema="(Tensor x, Tensor counts, int number) -> Tensor"
)


@_GROUPS.register_fake
def _groups_fake(x, counts, number):
    return torch.empty_like(x)


@_EXPERTS.register_fake
def _experts_fake(x, ids, weights, expert_map, number, reduce):
    return x.new_empty(x.shape if reduce else (*ids.shape, x.shape[1]))
