"""``torch.ops.hal_xpu.linear`` and ``.experts``: the ops as ``torch.compile`` sees them, with fakes.

A matrix crosses as a list of tensors and a list of numbers. Eager calls go to the functions themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hal_backend_xpu.products import experts, linear
from hal_backend_xpu.views import Block, Int4View

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["call_experts", "call_linear"]


def _matrix(tensors: list[Tensor | None], numbers: list[int]) -> Int4View:
    codes, scales, *others = tensors
    return Int4View(cast("Tensor", codes), cast("Tensor", scales), *others, *numbers)  # type: ignore[arg-type]


def _linear(x: Tensor, tensors: list[Tensor | None], numbers: list[int], dtype: torch.dtype) -> Tensor:
    return linear(x, _matrix(tensors, numbers), x.new_empty(x.shape[0], numbers[0], dtype=dtype))


def _room(x: Tensor, ids: Tensor, reduce: bool, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape if reduce else (*ids.shape, x.shape[1]), dtype=dtype)


def _experts(
    x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, gate: list[Tensor | None], up: list[Tensor | None],
    down: list[Tensor | None], gate_numbers: list[int], up_numbers: list[int], down_numbers: list[int], activation: int, alpha: float,
    limit: float, num_experts: int, local: int, scaling: float, router_on_input: bool, rescaled: bool, reduce: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    gated = _matrix(gate, gate_numbers) if gate else None
    block = Block(
        _matrix(up, up_numbers), _matrix(down, down_numbers), gated, activation, alpha, limit, num_experts, local, scaling, router_on_input,
        rescaled,
    )  # fmt: skip
    return experts(x, ids, weights, expert_map, block, _room(x, ids, reduce, dtype))


_LINEAR = torch.library.custom_op(
    "hal_xpu::linear", _linear, mutates_args=(), schema="(Tensor x, Tensor?[] tensors, int[] numbers, ScalarType dtype) -> Tensor"
)
_EXPERTS = torch.library.custom_op(
    "hal_xpu::experts", _experts, mutates_args=(),
    schema=(
        "(Tensor x, Tensor ids, Tensor weights, Tensor? expert_map, Tensor?[] gate, Tensor?[] up, Tensor?[] down, int[] gate_numbers, "
        "int[] up_numbers, int[] down_numbers, int activation, float alpha, float limit, int num_experts, int local, float scaling, "
        "bool router_on_input, bool rescaled, bool reduce, ScalarType dtype) -> Tensor"
    ),
)  # fmt: skip


@_LINEAR.register_fake
def _linear_fake(x: Tensor, tensors: list[Tensor | None], numbers: list[int], dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[0], numbers[0], dtype=dtype)


@_EXPERTS.register_fake
def _experts_fake(x, ids, *arguments):  # type: ignore[no-untyped-def]
    return _room(x, ids, *arguments[-2:])


def call_linear(x: Tensor, weight: Int4View, dtype: torch.dtype) -> Tensor:
    """The registered op, as part of a graph."""
    return cast("Tensor", _LINEAR(x, weight.tensors, weight.numbers, dtype))


def call_experts(
    x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, block: Block, reduce: bool, dtype: torch.dtype
) -> Tensor:
    """The registered op, as part of a graph."""
    b, gate = block, block.gate
    found = _EXPERTS(
        x, ids, weights, expert_map, [] if gate is None else gate.tensors, b.up.tensors, b.down.tensors,
        [] if gate is None else gate.numbers, b.up.numbers, b.down.numbers, b.activation, b.alpha, b.limit, b.num_experts, b.local,
        b.scaling, b.router_on_input, b.rescaled, reduce, dtype,
    )  # fmt: skip
    return cast("Tensor", found)
