"""The ops in whole, as functions of packed tensors; registered as ``torch.ops.hal_triton.*`` with fakes.

In eager mode the functions are called directly: a registered op costs more than the launches of a small call. Under ``torch.compile``
the registered ones stand in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hal_core.check import device_flag
from hal_core.triton.configs import Tile, linear_tile, moe_tile
from hal_core.triton.grouped import grouped_experts
from hal_core.triton.launch import (
    Epilogue,
    FloatMatrix,
    IntegerMatrix,
    Route,
    arch_of,
    direct,
    flag_only,
    float_product,
    integer_product,
    plain,
    quantize_fp8,
    sorted_by_expert,
    sum_slots,
    widened,
)
from hal_core.triton.layout import step_size
from hal_core.triton.repeat import called, room

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Experts", "float_linear", "integer_linear", "moe"]

#: From that many rows on, bfloat16 products with weights written out once are faster than unpacking in every tile of rows.
_MANY_ROWS = 640
#: Bytes of weights that are written out at a time: they are read again before they leave the second-level cache.
_WRITTEN = 32 << 20
#: With that few slots each is a tile of its own, and nothing is sorted.
_DIRECT = 48


def integer_linear(x: Tensor, weight: IntegerMatrix, out: Tensor) -> Tensor:
    """``out [M, n] = x [M, k] @ w.T + bias``, with 4- or 8-bit weights as they are stored; ``x`` bfloat16 or float16."""
    rows = x.shape[0]
    if rows >= _MANY_ROWS and x.dtype == torch.bfloat16 and x.device.type != "cpu" and out.dtype == x.dtype:
        return _wide_linear(x, weight, out)
    if rows:
        tile = linear_tile(arch_of(x.device), rows, weight.n, -(-weight.k // step_size(weight.bits)))
        _linear(x, None, weight, out, tile, 128)
    return out


def _wide_linear(x: Tensor, weight: IntegerMatrix, out: Tensor) -> Tensor:
    """A few outputs at a time: their weights as bfloat16, then torch's own product."""
    part = max(64, _WRITTEN // (2 * weight.k) // 64 * 64)
    written = room((min(part, weight.n), weight.k), x.dtype, x.device)
    for first in range(0, weight.n, part):
        wide = widened(weight, first, written[: min(part, weight.n - first)])
        called(torch.mm, x, wide.t(), out=out[:, first : first + wide.shape[0]])
    if weight.bias is not None:
        called(torch.add, out, weight.bias, out=out)
    return out


def float_linear(x: Tensor, weight: FloatMatrix, out: Tensor, x_group: int = 128) -> Tensor:
    """The same with float weights. e4m3 weights take ``x`` quantized to e4m3 here, a scale for every ``x_group`` columns or a row."""
    rows = x.shape[0]
    if rows:
        tile = linear_tile(arch_of(x.device), rows, weight.n, -(-weight.k // 128), _kind(weight))
        codes, scales = (x, None) if weight.scales is None else quantize_fp8(x, x_group if weight.block else None, weight.weight.dtype)
        _linear(codes, scales, weight, out, tile, x_group)
    return out


def _linear(x: Tensor, scales: Tensor | None, weight: IntegerMatrix | FloatMatrix, out: Tensor, tile: Tile, x_group: int) -> None:
    route = plain(x, tile.bm)
    if tile.split == 1:
        _product(x, scales, out, weight, None, route, tile, 1, Epilogue(), x_group)
        return
    parts = room((tile.split, *out.shape), torch.float32, x.device)
    _product(x, scales, parts, _without_bias(weight), None, route, tile, 1, Epilogue(), x_group)
    sum_slots(parts, out, route, 1.0, bias=weight.bias, parts=tile.split)


def _kind(weight: IntegerMatrix | FloatMatrix) -> str:
    return "integer" if isinstance(weight, IntegerMatrix) else "float" if weight.scales is None else "fp8"


def _without_bias(weight: IntegerMatrix | FloatMatrix) -> IntegerMatrix | FloatMatrix:
    """A bias is added to the sum of the parts, not to each."""
    if isinstance(weight, FloatMatrix):
        return FloatMatrix(weight.weight, weight.scales, None, weight.block)
    w = weight
    return IntegerMatrix(w.codes, w.scales, w.zeros, w.mins, w.perm, None, w.n, w.k, w.group, w.bits)


def _product(
    x: Tensor, scales: Tensor | None, y: Tensor, up: IntegerMatrix | FloatMatrix, gate: IntegerMatrix | FloatMatrix | None, route: Route,
    tile: Tile, x_div: int, epilogue: Epilogue, x_group: int,
) -> None:  # fmt: skip
    if isinstance(up, IntegerMatrix):
        assert gate is None or isinstance(gate, IntegerMatrix)  # experts of one scheme
        integer_product(x, y, up, gate, route, tile, x_div, epilogue)
        return
    assert gate is None or isinstance(gate, FloatMatrix)  # experts of one scheme
    float_product(x, scales, y, up, gate, route, tile, x_div, epilogue, x_group)


@dataclass(frozen=True, eq=False)
class Experts:
    """A block of experts: its matrices and what its spec says.

    local: experts whose weights are here. grouped: torch's grouped product at every number of rows. scratch: of the sort; where there is
    none each call makes one.
    """

    up: IntegerMatrix | FloatMatrix
    down: IntegerMatrix | FloatMatrix
    gate: IntegerMatrix | FloatMatrix | None
    kind: str
    alpha: float
    limit: float | None
    num_experts: int
    local: int
    scaling: float
    router_on_input: bool
    x_group: int = 128
    grouped: bool = False
    scratch: Tensor | None = None

    @property
    def quantized_inputs(self) -> bool:
        return isinstance(self.up, FloatMatrix) and self.up.scales is not None


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, experts: Experts, out: Tensor,
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:  # fmt: skip
    """``x [T, H]``, ``ids [T, k] int32``, ``weights [T, k] float32`` to ``out [T, H]``, or ``[T, k, H]`` unreduced.

    Nothing is read or written for an id out of range; :func:`hal_core.check` raises it. ``tiles`` overrides the table's choice.
    """
    if not x.shape[0]:
        return out
    reduce, top_k, slots = out.dim() == 2, ids.shape[1], ids.numel()
    flag, rows = device_flag(x.device), slots / max(1, min(experts.num_experts, slots))
    if experts.grouped:
        return grouped_experts(x, ids, weights, expert_map, experts, out, flag)
    if tiles is None:
        tiles = moe_tile(arch_of(x.device), rows, _kind(experts.up))
    if slots <= _DIRECT:
        route = direct(ids, weights, expert_map, experts.num_experts, experts.local)
    else:
        bm = max(tile.rows for tile in tiles)
        route = sorted_by_expert(ids, weights, expert_map, experts.num_experts, experts.local, bm, flag, experts.scratch)
    inner = room((slots, experts.up.n), x.dtype, x.device)
    hidden, scales = _quantized(x, experts)
    first = Epilogue(experts.kind, experts.alpha, experts.limit, "input" if experts.router_on_input else "none")
    _product(hidden, scales, inner, experts.up, experts.gate, route, tiles[0], top_k, first, experts.x_group)
    second = Epilogue(router="none" if experts.router_on_input else "output")
    inner, scales = _quantized(inner, experts)
    if not reduce:
        return _unreduced(inner, scales, experts, route, tiles[1], second, flag, out)
    slots_out = room((slots, experts.down.n), x.dtype, x.device)
    _product(inner, scales, slots_out, experts.down, None, route, tiles[1], 1, second, experts.x_group)
    sum_slots(slots_out, out, route, experts.scaling, flag if route.kind == "direct" else None)
    return out


def _unreduced(
    inner: Tensor, scales: Tensor | None, experts: Experts, route: Route, tile: Tile, epilogue: Epilogue, flag: Tensor, out: Tensor
) -> Tensor:
    """Slots that go nowhere are zero."""
    called(torch.Tensor.zero_, out)
    _product(inner, scales, out.view(route.rows, -1), experts.down, None, route, tile, 1, epilogue, experts.x_group)
    if route.kind == "direct":
        flag_only(route, flag, out.shape[1])
    if experts.scaling != 1.0:
        called(torch.Tensor.mul_, out, experts.scaling)
    return out


def _quantized(x: Tensor, experts: Experts) -> tuple[Tensor, Tensor | None]:
    if not experts.quantized_inputs:
        return x, None
    assert isinstance(experts.up, FloatMatrix)  # as quantized_inputs says
    return quantize_fp8(x, experts.x_group if experts.up.block is not None else None, experts.up.weight.dtype)
