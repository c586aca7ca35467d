"""``torch.ops.hal_triton.linear`` and ``.experts``: the ops as ``torch.compile`` sees them, with fakes.

A matrix crosses as a list of tensors and a list of numbers: six tensors of packed integers, or three of floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hal_core.triton.launch import FloatMatrix, IntegerMatrix
from hal_core.triton.ops import Experts, float_linear, integer_linear, moe

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["call_experts", "call_linear"]

Matrix = IntegerMatrix | FloatMatrix


def _tensors(matrix: Matrix | None) -> list[Tensor | None]:
    if matrix is None:
        return []
    if isinstance(matrix, FloatMatrix):
        return [matrix.weight, matrix.scales, matrix.bias]
    return [matrix.codes, matrix.scales, matrix.zeros, matrix.mins, matrix.perm, matrix.bias]


def _numbers(matrix: Matrix | None) -> list[int]:
    if matrix is None:
        return []
    return list(matrix.block or ()) if isinstance(matrix, FloatMatrix) else [matrix.n, matrix.k, matrix.group, matrix.bits]


def _matrix(tensors: list[Tensor | None], numbers: list[int]) -> Matrix:
    if len(tensors) == 3:
        weight, scales, bias = tensors
        return FloatMatrix(cast("Tensor", weight), scales, bias, (numbers[0], numbers[1]) if numbers else None)
    codes, scales, zeros, mins, perm, bias = tensors
    n, k, group, bits = numbers
    return IntegerMatrix(cast("Tensor", codes), cast("Tensor", scales), zeros, mins, perm, bias, n, k, group, bits)


def _linear(x: Tensor, tensors: list[Tensor | None], numbers: list[int], n: int, x_group: int, dtype: torch.dtype) -> Tensor:
    matrix, out = _matrix(tensors, numbers), x.new_empty(x.shape[0], n, dtype=dtype)
    return integer_linear(x, matrix, out) if isinstance(matrix, IntegerMatrix) else float_linear(x, matrix, out, x_group)


def _experts(
    x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, up: list[Tensor | None], down: list[Tensor | None],
    gate: list[Tensor | None], up_numbers: list[int], down_numbers: list[int], kind: str, alpha: float, limit: float | None,
    num_experts: int, local: int, scaling: float, router_on_input: bool, x_group: int, grouped: bool,
    reduce: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    gated = _matrix(gate, up_numbers) if gate else None
    experts = Experts(
        _matrix(up, up_numbers), _matrix(down, down_numbers), gated, kind, alpha, limit, num_experts, local, scaling, router_on_input,
        x_group, grouped,
    )  # fmt: skip
    return moe(x, ids, weights, expert_map, experts, _room(x, ids, reduce, dtype))


def _room(x: Tensor, ids: Tensor, reduce: bool, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape if reduce else (*ids.shape, x.shape[1]), dtype=dtype)


_LINEAR = torch.library.custom_op(
    "hal_triton::linear", _linear, mutates_args=(),
    schema="(Tensor x, Tensor?[] tensors, int[] numbers, int n, int x_group, ScalarType dtype) -> Tensor",
)  # fmt: skip
_EXPERTS = torch.library.custom_op(
    "hal_triton::experts", _experts, mutates_args=(),
    schema=(
        "(Tensor x, Tensor ids, Tensor weights, Tensor? expert_map, Tensor?[] up, Tensor?[] down, Tensor?[] gate, int[] up_numbers, "
        "int[] down_numbers, str kind, float alpha, float? limit, int num_experts, int local, float scaling, bool router_on_input, "
        "int x_group, bool grouped, bool reduce, ScalarType dtype) -> Tensor"
    ),
)  # fmt: skip


@_LINEAR.register_fake
def _linear_fake(x, tensors, numbers, n, x_group, dtype):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], n, dtype=dtype)


@_EXPERTS.register_fake
def _experts_fake(x, ids, *arguments):  # type: ignore[no-untyped-def]
    return _room(x, ids, *arguments[-2:])


def call_linear(x: Tensor, weight: Matrix, n: int, x_group: int, dtype: torch.dtype) -> Tensor:
    """The registered op, as part of a graph."""
    return cast("Tensor", _LINEAR(x, _tensors(weight), _numbers(weight), n, x_group, dtype))


def call_experts(
    x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, experts: Experts, reduce: bool, dtype: torch.dtype
) -> Tensor:
    """The registered op, as part of a graph."""
    e = experts
    found = _EXPERTS(
        x, ids, weights, expert_map, _tensors(e.up), _tensors(e.down), _tensors(e.gate), _numbers(e.up), _numbers(e.down), e.kind, e.alpha,
        e.limit, e.num_experts, e.local, e.scaling, e.router_on_input, e.x_group, e.grouped, reduce,
        dtype,
    )  # fmt: skip
    return cast("Tensor", found)
