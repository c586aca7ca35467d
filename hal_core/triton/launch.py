"""From tensors to kernel launches: arguments, grids, scratch. Allocates through torch only and never waits for the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hal_core.triton import gemm, gemm_float, quantizers, routing, widen
from hal_core.triton.layout import step_size
from hal_core.triton.matrices import FloatMatrix, IntegerMatrix
from hal_core.triton.repeat import launched, room

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hal_core.triton.configs import Tile

__all__ = [
    "Epilogue", "FloatMatrix", "IntegerMatrix", "Route", "Sorted", "activate", "arch_of", "direct", "float_product", "group_bounds",
    "integer_product", "plain", "quantize_fp8", "quantize_int8", "sort_scratch", "sort_slots", "sorted_by_expert", "spread_slots",
    "sum_slots", "weighted_sum", "widened",
]  # fmt: skip

#: Slots that one program sorts, and slots of one program when there are more.
_FEW, _CHUNK = 1024, 256
#: Rows that one program clears.
_CLEARED = 16


def _launch(kernel: Any, grid: tuple[int, ...], values: dict[str, Any], warps: int, stages: int) -> None:
    first = next(value for value in values.values() if isinstance(value, torch.Tensor))
    # graphs that torch.compile makes see to it themselves
    if torch.compiler.is_compiling() or not first.is_cuda or first.get_device() == torch.cuda.current_device():
        launched(kernel, grid, values, kernel[grid](**values, num_warps=warps, num_stages=stages))
        return
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]  # Triton launches on the current one
        launched(kernel, grid, values, kernel[grid](**values, num_warps=warps, num_stages=stages))


#: Replaced by tests that only compile.
run: Callable[[Any, tuple[int, ...], dict[str, Any], int, int], None] = _launch


@functools.cache
def arch_of(device: torch.device) -> str:
    """``sm_90`` or ``gfx942`` form; empty where there is no GPU (the interpreter)."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return name.partition(":")[0] or f"sm_{properties.major}{properties.minor}"


@dataclass(frozen=True)
class Epilogue:
    """What follows the product. router: "none", "input" or "output"."""

    kind: str = "none"
    alpha: float = 0.0
    limit: float | None = None
    router: str = "none"


#: Nothing follows, or nothing came before.
_NOTHING = Epilogue()


@dataclass(frozen=True, eq=False)
class Route:
    """Which rows go through which matrix; ``tiles`` is the most that there can be.

    kind: "plain", "direct" or "sorted"; ``bm`` is the size of the tiles that the latter were cut into.
    tensors: ids, map, slots, tile_expert, total, router; a stand-in where unused.
    """

    kind: str
    rows: int
    tiles: int
    tensors: tuple[Tensor, ...]
    num_experts: int = 1
    experts: int = 1
    has_map: bool = False
    bm: int = 0

    def sub(self, tile: Tile) -> int:
        """Tiles of a product that one tile of the sort falls into."""
        assert self.kind != "sorted" or self.bm % tile.rows == 0  # what the tables hold
        return self.bm // tile.rows if self.kind == "sorted" else 1


def plain(x: Tensor, bm: int) -> Route:
    """All rows through one matrix."""
    return Route("plain", x.shape[0], -(-x.shape[0] // bm), (x,) * 6)


def direct(ids: Tensor, weights: Tensor, expert_map: Tensor | None, num_experts: int, experts: int) -> Route:
    """One slot a tile: for few slots nothing is won by sorting."""
    mapping = ids if expert_map is None else expert_map
    tensors = (ids, mapping, ids, ids, ids, weights)
    return Route("direct", ids.numel(), ids.numel(), tensors, num_experts, experts, expert_map is not None)


@dataclass(frozen=True, eq=False)
class Sorted:
    """Slots by expert, each expert's padded to whole tiles.

    slots: int32 ``[places]``, the slot at each place, and their number where there is none. tile_expert: int32 ``[places / bm]``.
    total: int32 ``[1]``, places in use. places, ends: where they were asked for, each slot's place or -1, and each expert's last and one.
    """

    slots: Tensor
    tile_expert: Tensor
    total: Tensor
    places: Tensor | None = None
    ends: Tensor | None = None


def _lanes(experts: int) -> int:
    return max(16, 1 << (experts - 1).bit_length())


def sort_scratch(experts: int, device: torch.device) -> Tensor:
    """What :func:`sort_slots` counts in: zeros before and after. Calls that share one must not overlap."""
    return torch.zeros(_lanes(experts) + 1, dtype=torch.int32, device=device)


def _rooms(device: torch.device, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """int32 rooms, each at 16 bytes: kernels are compiled anew for pointers that are not."""
    wide = [-(-size // 4) * 4 for size in sizes]
    found = torch.split(room((sum(wide),), torch.int32, device), wide)
    return tuple(room if room.shape[0] == size else room[:size] for room, size in zip(found, sizes, strict=True))


def sort_slots(
    ids: Tensor, expert_map: Tensor | None, num_experts: int, experts: int, bm: int, places: int, flag: Tensor, scratch: Tensor,
    placed: bool = False,
) -> Sorted:  # fmt: skip
    """Slots of ``ids [T, k]`` by local expert, in at most ``places`` places, a multiple of ``bm``; one launch, or two for many slots.

    placed: see :class:`Sorted`.
    """
    numel, lanes, top_k = ids.numel(), _lanes(experts), ids.shape[-1]
    many = numel > _FEW
    sizes = (places, places // bm, 1, numel if placed else 0, lanes if placed else 0, lanes if many else 0, numel if many else 0)
    slots, tile_expert, total, at, ends, starts, ranks = _rooms(ids.device, sizes)
    shared: dict[str, Any] = {
        "ids_ptr": ids, "map_ptr": ids if expert_map is None else expert_map, "numel": numel, "num_experts": num_experts,
        "experts": experts, "HAS_MAP": expert_map is not None, "slots_ptr": slots, "PLACES": placed, "BM": bm,
    }  # fmt: skip
    laid = {
        "flag_ptr": flag, "top_k": top_k, "scratch_ptr": scratch, "total_ptr": total, "ends_ptr": ends if placed else slots, "E": lanes,
        "FILL": min(32, bm & -bm),
    }  # fmt: skip
    where = {"places_ptr": at if placed else slots, "tile_expert_ptr": tile_expert}
    if many:
        grid = (-(-numel // _CHUNK),)
        run(routing.count_slots, grid, {**shared, **laid, "starts_ptr": starts, "ranks_ptr": ranks, "P": _CHUNK}, 8, 1)
        run(routing.scatter_slots, grid, {**shared, **where, "starts_ptr": starts, "ranks_ptr": ranks, "P": _CHUNK}, 4, 1)
    else:
        power = max(32, 1 << (numel - 1).bit_length())
        run(routing.sort_slots, (1,), {**shared, **laid, **where, "P": power}, min(16, max(4, power // 32)), 1)
    return Sorted(slots, tile_expert, total, at if placed else None, ends if placed else None)


def spread_slots(ids: Tensor, expert_map: Tensor | None, num_experts: int, experts: int, bm: int, places: int, flag: Tensor) -> Sorted:
    """The same with a tile for each slot, for so few that nothing is won by sorting."""
    numel, top_k = ids.numel(), ids.shape[-1]
    slots, tile_expert, total = _rooms(ids.device, (places, places // bm, 1))
    values = {
        "ids_ptr": ids, "map_ptr": ids if expert_map is None else expert_map, "flag_ptr": flag, "slots_ptr": slots,
        "tile_expert_ptr": tile_expert, "total_ptr": total, "numel": numel, "num_experts": num_experts, "experts": experts, "top_k": top_k,
        "HAS_MAP": expert_map is not None, "P": 1 << (numel - 1).bit_length(), "BM": bm, "BM2": 1 << (bm - 1).bit_length(),
    }  # fmt: skip
    run(routing.direct_slots, (1,), values, 4, 1)
    return Sorted(slots, tile_expert, total)


def group_bounds(counts: Tensor, y: Tensor, flag: Tensor) -> Tensor:
    """int32 ``[experts + 1]``: where the groups of rows begin and end whose sizes are ``counts [experts]``; see the kernel for ``y``."""
    experts, (rows, h) = counts.shape[0], y.shape
    (bounds,) = _rooms(y.device, (experts + 1,))
    values = {
        "counts_ptr": counts, "bounds_ptr": bounds, "flag_ptr": flag, "y_ptr": y, "rows": rows, "experts": experts, "H": h,
        "E": _lanes(experts), "BR": _CLEARED, "BH": 256,
    }  # fmt: skip
    run(routing.group_bounds, (max(1, -(-rows // _CLEARED)),), values, 4, 1)
    return bounds


def sorted_by_expert(
    ids: Tensor, weights: Tensor, expert_map: Tensor | None, num_experts: int, experts: int, bm: int, flag: Tensor,
    scratch: Tensor | None = None,
) -> Route:  # fmt: skip
    """A route whose tiles of ``bm`` slots hold one expert each."""
    numel = ids.numel()
    tiles = min(numel, -(-numel // bm) + min(experts, numel))
    scratch = sort_scratch(experts, ids.device) if scratch is None else scratch
    found = sort_slots(ids, expert_map, num_experts, experts, bm, tiles * bm, flag, scratch)
    tensors = (ids, ids if expert_map is None else expert_map, found.slots, found.tile_expert, found.total, weights)
    return Route("sorted", numel, tiles, tensors, num_experts, experts, expert_map is not None, bm)


def _route_values(route: Route, tile: Tile, x_div: int) -> dict[str, Any]:
    names = ("ids_ptr", "map_ptr", "slots_ptr", "tile_expert_ptr", "total_ptr", "router_ptr")
    return {
        **dict(zip(names, route.tensors, strict=True)), "rows": route.rows, "num_experts": route.num_experts, "experts": route.experts,
        "x_div": x_div, "ROUTE": route.kind, "HAS_MAP": route.has_map, "BM": tile.bm, "BN": tile.bn, "SPLIT": tile.split,
        "SUB": route.sub(tile), **dict(tile.options),
    }  # fmt: skip


def _epilogue_values(epilogue: Epilogue, bias: bool, gated: bool) -> dict[str, Any]:
    return {
        "alpha": epilogue.alpha, "limit": epilogue.limit or 0.0, "KIND": epilogue.kind, "LIMIT": epilogue.limit is not None,
        "ROUTER": epilogue.router, "BIAS": bias, "GATED": gated,
    }  # fmt: skip


def integer_product(
    x: Tensor, y: Tensor, up: IntegerMatrix, gate: IntegerMatrix | None, route: Route, tile: Tile, x_div: int, epilogue: Epilogue
) -> None:
    """``x [rows / x_div, k]`` to ``y [rows, n]``, or with a split to ``y [split, rows, n]`` float32."""
    other = up if gate is None else gate
    values = {
        "x_ptr": x, "y_ptr": y, "w_ptr": up.codes, "s_ptr": up.scales, "z_ptr": up.shift,
        "b_ptr": up.scales if up.bias is None else up.bias,
        "gw_ptr": other.codes, "gs_ptr": other.scales, "gz_ptr": other.shift,
        "gb_ptr": other.scales if other.bias is None else other.bias,
        "perm_ptr": up.codes if up.perm is None else up.perm, "gperm_ptr": other.codes if other.perm is None else other.perm,
        "N": up.n, "K": up.k, "n_pad": up.codes.shape[-2], "groups": up.scales.shape[-2],
        "BITS": up.bits, "GROUP": up.scale_group, "ZERO": up.zero_kind, "PERM": up.perm is not None,
        "EVEN_K": up.k % step_size(up.bits) == 0, "WEIGHTS": tile.weights and x.dtype == torch.bfloat16, "EXTRA": tile.extra,
        **_route_values(route, tile, x_div), **_epilogue_values(epilogue, up.bias is not None, gate is not None),
    }  # fmt: skip
    run(gemm.integer_gemm, (route.tiles * route.sub(tile) * -(-up.n // tile.bn), tile.split), values, tile.warps, tile.stages)


def float_product(
    x: Tensor, x_scales: Tensor | None, y: Tensor, up: FloatMatrix, gate: FloatMatrix | None, route: Route, tile: Tile, x_div: int,
    epilogue: Epilogue, x_group: int = 128,
) -> None:  # fmt: skip
    """As :func:`integer_product`, for weights that are multiplied as they are."""
    other = up if gate is None else gate
    scales = "none" if up.scales is None else "row" if up.block is None else "block"
    block = up.block or (1, tile.bk)
    bk = min(tile.bk, block[1], x_group) if scales == "block" else tile.bk
    stand_in = up.weight
    values = {
        "x_ptr": x, "xs_ptr": stand_in if x_scales is None else x_scales, "y_ptr": y, "w_ptr": up.weight,
        "ws_ptr": stand_in if up.scales is None else up.scales, "b_ptr": stand_in if up.bias is None else up.bias,
        "gw_ptr": other.weight, "gws_ptr": stand_in if other.scales is None else other.scales,
        "gb_ptr": stand_in if other.bias is None else other.bias,
        "N": up.n, "K": up.k, "SCALES": scales, "BLOCK_N": block[0], "BLOCK_K": block[1], "X_GROUP": x_group,
        "EVEN_K": up.k % bk == 0, "BK": bk,
        **_route_values(route, tile, x_div), **_epilogue_values(epilogue, up.bias is not None, gate is not None),
    }  # fmt: skip
    run(gemm_float.float_gemm, (route.tiles * route.sub(tile) * -(-up.n // tile.bn), tile.split), values, tile.warps, tile.stages)


def widened(weight: IntegerMatrix, first: int, out: Tensor) -> Tensor:
    """Outputs ``first`` to ``first + len(out)`` of one matrix, as the float type of ``out [rows, k]``."""
    steps = -(-weight.k // step_size(weight.bits))
    values = {
        "w_ptr": weight.codes, "s_ptr": weight.scales, "z_ptr": weight.shift,
        "perm_ptr": weight.codes if weight.perm is None else weight.perm, "out_ptr": out, "first_n": first, "N": first + out.shape[0],
        "K": weight.k, "n_pad": weight.codes.shape[-2], "groups": weight.scales.shape[-2], "BITS": weight.bits, "GROUP": weight.group,
        "ZERO": weight.zero_kind, "PERM": weight.perm is not None, "BN": 64,
    }  # fmt: skip
    run(widen.widen_steps, (steps, -(-out.shape[0] // 64)), values, 4, 1)
    return out


def _sum_width(rows: int, h: int) -> int:
    """Columns that one program sums: few rows need more programs to fill a GPU."""
    return min(512 if rows <= 256 else 1024, max(128, 1 << (h - 1).bit_length()))


def sum_slots(
    y: Tensor, out: Tensor, route: Route, scaling: float, flag: Tensor | None = None, bias: Tensor | None = None, parts: int = 1
) -> None:
    """``out [rows, h]`` from ``y [parts, rows * top_k, h]``; reports wrong ids where nothing before it did (``flag``)."""
    rows, h = out.shape
    ids, mapping = route.tensors[:2]
    width = _sum_width(rows, h)
    values = {
        "y_ptr": y, "out_ptr": out, "ids_ptr": ids, "map_ptr": mapping, "b_ptr": y if bias is None else bias,
        "flag_ptr": y if flag is None else flag, "rows": rows, "H": h, "part_stride": route.rows * h, "num_experts": route.num_experts,
        "experts": route.experts, "scaling": scaling, "TOP_K": route.rows // rows, "PARTS": parts, "ROUTED": route.kind != "plain",
        "HAS_MAP": route.has_map, "BIAS": bias is not None, "FLAG": flag is not None, "BH": width,
    }  # fmt: skip
    run(routing.slot_sum, (rows, -(-h // width)), values, 4, 1)


def weighted_sum(
    y: Tensor, out: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, num_experts: int, experts: int, scaling: float,
    placed: bool = False,
) -> None:  # fmt: skip
    """``out [T, h] = scaling * sum over slots of weights * y``, or each slot's part where out is ``[T, k, h]``.

    ``ids [T, k]``: experts, slots of whose local ones lie in ``y [T * k, h]``; or, ``placed``, each slot's row of ``y``, -1 for none.
    """
    tokens, top_k, width = *ids.shape, y.shape[1]
    block = _sum_width(tokens, width)
    values = {
        "y_ptr": y, "out_ptr": out, "ids_ptr": ids, "weights_ptr": weights, "H": width,
        "map_ptr": ids if expert_map is None else expert_map,
        "num_experts": num_experts, "experts": experts, "scaling": float(scaling), "TOP_K": top_k, "SUM": out.dim() == 2,
        "HAS_MAP": expert_map is not None, "PLACES": placed, "BH": block,
    }  # fmt: skip
    run(routing.weighted_sum, (tokens, -(-width // block)), values, 4, 1)


def _activation_values(up: Tensor, gate: Tensor | None, epilogue: Epilogue) -> dict[str, Any]:
    return {
        "gate_ptr": up if gate is None else gate, "stride": up.stride(0), "alpha": float(epilogue.alpha),
        "limit": float(epilogue.limit or 0.0), "KIND": epilogue.kind, "GATED": gate is not None, "LIMIT": epilogue.limit is not None,
    }  # fmt: skip


def activate(up: Tensor, gate: Tensor | None, out: Tensor, epilogue: Epilogue) -> None:
    """``act(gate) * up``, or ``act(up)``; ``up`` and ``gate [R, width]`` may be halves of one tensor."""
    rows, width = out.shape
    tall, wide = (1, 256) if rows <= 64 else (4, 256)
    values = {
        "up_ptr": up, "out_ptr": out, "rows": rows, "width": width, "BR": tall, "BI": wide, **_activation_values(up, gate, epilogue),
    }  # fmt: skip
    run(routing.activate_rows, (-(-rows // tall), -(-width // wide)), values, 1 if tall == 1 else 4, 1)


def flag_only(route: Route, flag: Tensor, top_k: int) -> None:
    """Reports wrong ids of a direct route."""
    values = {
        "ids_ptr": route.tensors[0], "map_ptr": route.tensors[1], "flag_ptr": flag, "numel": route.rows, "num_experts": route.num_experts,
        "experts": route.experts, "top_k": top_k, "HAS_MAP": route.has_map, "P": _CHUNK,
    }  # fmt: skip
    run(routing.flag_slots, (-(-route.rows // _CHUNK),), values, 4, 1)


def _scale_room(rows: int, groups: int, device: torch.device) -> Tensor:
    """``[rows, groups]``, in memory of whole steps of 16 bytes, in which products read them."""
    return room((-(-rows // 4) * 4, groups), torch.float32, device)[:rows]


def quantize_int8(x: Tensor, gate: Tensor | None = None, epilogue: Epilogue = _NOTHING) -> tuple[Tensor, Tensor]:
    """``x [rows, k]`` to int8 codes and float32 scales ``[rows]``, one a token.

    gate, epilogue: what is quantized is the activation of both as :func:`activate` rounds it to the dtype of ``x``.
    """
    rows, k = x.shape
    codes, scales = room(x.shape, torch.int8, x.device), _scale_room(rows, 1, x.device)[:, 0]
    if rows:
        width = min(4096, max(64, 1 << (k - 1).bit_length()))
        values = {
            "x_ptr": x, "q_ptr": codes, "s_ptr": scales, "K": k, "BK": width, "ONCE": k <= width, **_activation_values(x, gate, epilogue),
        }  # fmt: skip
        run(quantizers.int8_tokens, (rows,), values, 4, 1)
    return codes, scales


def quantize_fp8(
    x: Tensor, group: int | None, dtype: torch.dtype = torch.float8_e4m3fn, gate: Tensor | None = None, epilogue: Epilogue = _NOTHING
) -> tuple[Tensor, Tensor]:
    """``x [rows, k]`` to e4m3 codes and float32 scales ``[rows, ceil(k / group)]``; no group: one scale a token.

    dtype: also float8_e4m3fnuz, whose numbers are half those of the same code in float8_e4m3fn. Its scales are twice as large, so that
    both stand for the same numbers. gate, epilogue: as of :func:`quantize_int8`.
    """
    rows, k = x.shape
    width = 1 << (k - 1).bit_length() if group is None else group
    groups = -(-k // width)
    codes = room(x.shape, dtype, x.device)
    scales = _scale_room(rows, groups, x.device)
    if rows:
        bm = max(1, min(16, 4096 // width))
        top = 224.0 if dtype == torch.float8_e4m3fnuz else 448.0
        values = {
            "x_ptr": x, "q_ptr": codes, "s_ptr": scales, "rows": rows, "K": k, "groups": groups, "GROUP": width, "BM": bm, "TOP": top,
            **_activation_values(x, gate, epilogue),
        }  # fmt: skip
        run(quantizers.fp8_groups, (-(-rows // bm), groups), values, 4, 1)
    return codes, scales
