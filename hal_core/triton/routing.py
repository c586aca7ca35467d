"""Slots sorted by expert on the device, in padded tiles; where groups of rows begin; and the steps around products.

A slot is one of the ``top_k`` places of a token, numbered ``token * top_k + place``. Nothing here waits for the host, and every size
follows from shapes alone, so a graph captures it. An id out of range is skipped, and the first one seen is written to a flag.
"""

import triton
import triton.language as tl

from hal_core.triton.epilogue import activated, local_expert

__all__ = [
    "activate_rows", "count_slots", "direct_slots", "flag_slots", "gather_rows", "group_bounds", "report", "scatter_slots", "slot_sum",
    "sort_slots", "weighted_sum",
]  # fmt: skip


@triton.jit
def report(flag_ptr, index, ids, wrong, top_k):
    """One 64-bit word says it all, so that several programs cannot mix their reports: slot + 1 above, the id below."""
    word = ((index + 1).to(tl.int64) << 32) | (ids.to(tl.int64) & 0xFFFFFFFF)
    tl.store(flag_ptr + 1 + index * 0, top_k + index * 0, mask=wrong)
    tl.store(flag_ptr + index * 0, word, mask=wrong)


@triton.jit
def _experts_of(ids_ptr, map_ptr, flag_ptr, index, numel, num_experts, experts, top_k, HAS_MAP: tl.constexpr):
    ids = tl.load(ids_ptr + index, mask=index < numel, other=-1)
    local, wrong = local_expert(ids, map_ptr, num_experts, experts, HAS_MAP)
    report(flag_ptr, index, ids, wrong, top_k)
    return local


@triton.jit
def direct_slots(
    ids_ptr, map_ptr, flag_ptr, slots_ptr, tile_expert_ptr, total_ptr, numel, num_experts, experts, top_k,
    HAS_MAP: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BM2: tl.constexpr,
):  # fmt: skip
    """One tile for each slot, for so few that they hardly share experts; no counting, one program."""
    index = tl.arange(0, P)
    local = _experts_of(ids_ptr, map_ptr, flag_ptr, index, numel, num_experts, experts, top_k, HAS_MAP)
    inside = index < numel
    tl.store(tile_expert_ptr + index, tl.maximum(local, 0), mask=inside)
    lane = tl.arange(0, BM2)
    row = tl.where((local >= 0)[:, None] & (lane == 0)[None, :], index[:, None], numel)
    tl.store(slots_ptr + index[:, None] * BM + lane[None, :], row, mask=inside[:, None] & (lane < BM)[None, :])
    tl.store(total_ptr, numel * BM)


@triton.jit
def _starts(
    scratch_ptr, slots_ptr, total_ptr, ends_ptr, numel,
    BM: tl.constexpr, E: tl.constexpr, FILL: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """First places of experts, from counts ``scratch[0:E]``, which become 0; ``numel`` in places that stay empty."""
    e = tl.arange(0, E)
    # volatile: the counts were made by atomics, behind the first-level cache
    counts = tl.load(scratch_ptr + e, volatile=True)
    padded = (counts + BM - 1) // BM * BM
    ends = tl.cumsum(padded, 0)
    starts = ends - padded
    # every warp has read the counts before one of them clears them
    tl.debug_barrier()
    tl.store(scratch_ptr + e, tl.zeros((E,), tl.int32))
    # the last end, without another pass through shared memory for a sum
    tl.store(total_ptr + e * 0, ends, mask=e == E - 1)
    if ENDS:
        tl.store(ends_ptr + e, ends)
    for first in tl.static_range(0, BM, FILL):
        lane = first + tl.arange(0, FILL)
        place = (starts + counts)[:, None] + lane[None, :]
        tl.store(slots_ptr + place, tl.zeros((E, FILL), tl.int32) + numel, mask=lane[None, :] < (padded - counts)[:, None])
    return starts


@triton.jit
def _placed(
    slots_ptr, tile_expert_ptr, places_ptr, index, local, place, rank, numel, BM: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    """Slots to their places; the first of each tile also says whose it is."""
    tl.store(slots_ptr + place, index, mask=local >= 0)
    tl.store(tile_expert_ptr + place // BM, local, mask=(local >= 0) & (rank % BM == 0))
    if PLACES:
        tl.store(places_ptr + index, tl.where(local >= 0, place, -1), mask=index < numel)


@triton.jit
def sort_slots(
    ids_ptr, map_ptr, flag_ptr, scratch_ptr, slots_ptr, tile_expert_ptr, total_ptr, places_ptr, ends_ptr,
    numel, num_experts, experts, top_k,
    HAS_MAP: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, E: tl.constexpr, FILL: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """All in one program (``numel <= P``). ``scratch int32 [E + 1]`` is zero before and after.

    PLACES: also the place of each slot, -1 for those that go nowhere, and where each expert's places end.
    """
    index = tl.arange(0, P)
    local = _experts_of(ids_ptr, map_ptr, flag_ptr, index, numel, num_experts, experts, top_k, HAS_MAP)
    rank = tl.atomic_add(scratch_ptr + tl.maximum(local, 0), 1, mask=local >= 0)
    tl.debug_barrier()
    starts = _starts(scratch_ptr, slots_ptr, total_ptr, ends_ptr, numel, BM, E, FILL, PLACES)
    place = tl.gather(starts, tl.maximum(local, 0), 0) + rank
    _placed(slots_ptr, tile_expert_ptr, places_ptr, index, local, place, rank, numel, BM, PLACES)


@triton.jit
def count_slots(
    ids_ptr, map_ptr, flag_ptr, scratch_ptr, starts_ptr, ranks_ptr, slots_ptr, total_ptr, ends_ptr,
    numel, num_experts, experts, top_k,
    HAS_MAP: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, E: tl.constexpr, FILL: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Counts per expert and each slot's rank in it; the program that comes last finds where experts begin. Starts are the call's own."""
    index = tl.program_id(0) * P + tl.arange(0, P)
    local = _experts_of(ids_ptr, map_ptr, flag_ptr, index, numel, num_experts, experts, top_k, HAS_MAP)
    rank = tl.atomic_add(scratch_ptr + tl.maximum(local, 0), 1, mask=local >= 0)
    tl.store(ranks_ptr + index, rank, mask=index < numel)
    tl.debug_barrier()
    if tl.atomic_add(scratch_ptr + E, 1) == tl.num_programs(0) - 1:
        starts = _starts(scratch_ptr, slots_ptr, total_ptr, ends_ptr, numel, BM, E, FILL, PLACES)
        tl.store(starts_ptr + tl.arange(0, E), starts)
        tl.store(scratch_ptr + E, 0)


@triton.jit
def scatter_slots(
    ids_ptr, map_ptr, starts_ptr, ranks_ptr, slots_ptr, tile_expert_ptr, places_ptr, numel, num_experts, experts,
    HAS_MAP: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Each slot to its place."""
    index = tl.program_id(0) * P + tl.arange(0, P)
    ids = tl.load(ids_ptr + index, mask=index < numel, other=-1)
    local, _ = local_expert(ids, map_ptr, num_experts, experts, HAS_MAP)
    rank = tl.load(ranks_ptr + index, mask=local >= 0, other=0)
    place = tl.load(starts_ptr + tl.maximum(local, 0), mask=local >= 0, other=0) + rank
    _placed(slots_ptr, tile_expert_ptr, places_ptr, index, local, place, rank, numel, BM, PLACES)


@triton.jit
def flag_slots(ids_ptr, map_ptr, flag_ptr, numel, num_experts, experts, top_k, HAS_MAP: tl.constexpr, P: tl.constexpr):
    """Only the check, where nothing is sorted."""
    index = tl.program_id(0) * P + tl.arange(0, P)
    _experts_of(ids_ptr, map_ptr, flag_ptr, index, numel, num_experts, experts, top_k, HAS_MAP)


@triton.jit
def group_bounds(
    counts_ptr, bounds_ptr, flag_ptr, y_ptr, rows, experts, H,
    E: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """``bounds int32 [experts + 1]`` of groups of rows, none past the last row, from ``counts``; rows past all groups of ``y`` are zero.

    Counts below zero, or of more rows than there are, are reported and cut off.
    """
    e = tl.arange(0, E)
    count = tl.load(counts_ptr + e, mask=e < experts, other=0).to(tl.int64)
    count = tl.minimum(tl.maximum(count, -0x80000000), 0x7FFFFFFF)  # as a report holds it
    taken = tl.minimum(tl.maximum(count, 0), rows + 1)
    ends = tl.cumsum(taken, 0)
    if tl.program_id(0) == 0:
        wrong = (count < 0) | ((ends > rows) & (ends - taken <= rows))
        report(flag_ptr, e, count, wrong, -1)
        tl.store(bounds_ptr + 1 + e, tl.minimum(ends, rows).to(tl.int32), mask=e < experts)
        tl.store(bounds_ptr, 0)
    total = tl.max(ends, 0)
    first = tl.program_id(0) * BR
    if first + BR > total:
        r = (first + tl.arange(0, BR)).to(tl.int64)[:, None]
        for start in range(0, H, BH):
            h = (start + tl.arange(0, BH))[None, :]
            zero = tl.zeros((BR, BH), y_ptr.dtype.element_ty)
            tl.store(y_ptr + r * H + h, zero, mask=(r >= total) & (r < rows) & (h < H))


@triton.jit
def slot_sum(
    y_ptr, out_ptr, ids_ptr, map_ptr, b_ptr, flag_ptr, rows, H, part_stride, num_experts, experts, scaling,
    TOP_K: tl.constexpr, PARTS: tl.constexpr, ROUTED: tl.constexpr, HAS_MAP: tl.constexpr, BIAS: tl.constexpr, FLAG: tl.constexpr,
    BH: tl.constexpr,
):  # fmt: skip
    """``out [rows, H]`` = scaling * sum over slots and parts of ``y``, float32 in a fixed order, plus a bias ``[H]``.

    Slots without a local expert were never written and are left out. ``part_stride`` is the distance of two parts in elements.
    """
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros((BH,), tl.float32)
    for j in tl.static_range(TOP_K):
        slot = row * TOP_K + j
        width = H
        if ROUTED:
            ids = tl.load(ids_ptr + slot)
            local, wrong = local_expert(ids, map_ptr, num_experts, experts, HAS_MAP)
            width = tl.where(local >= 0, H, 0)
            if FLAG:
                report(flag_ptr, slot.to(tl.int32), ids, wrong, TOP_K)
        for part in tl.static_range(PARTS):
            total += tl.load(y_ptr + part * part_stride + slot * H + h, mask=h < width, other=0.0).to(tl.float32)
    total *= scaling
    if BIAS:
        total += tl.load(b_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * H + h, total.to(out_ptr.dtype.element_ty), mask=h < H)


@triton.jit
def gather_rows(x_ptr, out_ptr, slots_ptr, total_ptr, numel, H, top_k, BH: tl.constexpr):
    """Rows of ``x`` in the order of the sorted slots, zeros where a place is empty: one program a row and a part of it."""
    place = tl.program_id(0)
    if place >= tl.load(total_ptr):
        return
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    slot = tl.load(slots_ptr + place)
    row = tl.minimum(slot, numel - 1) // top_k
    x = tl.load(x_ptr + row.to(tl.int64) * H + h, mask=h < tl.where(slot < numel, H, 0), other=0.0)
    tl.store(out_ptr + place.to(tl.int64) * H + h, x, mask=h < H)


@triton.jit
def activate_rows(
    up_ptr, gate_ptr, out_ptr, rows, width, stride, alpha, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """``out [rows, width]`` of up and gate, whose rows lie ``stride`` elements apart."""
    r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    i = (tl.program_id(1) * BI + tl.arange(0, BI))[None, :]
    mask = (r < rows) & (i < width)
    up = tl.load(up_ptr + r * stride + i, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + r * stride + i, mask=mask, other=0.0).to(tl.float32) if GATED else up
    y = activated(up, gate, alpha, limit, KIND, GATED, LIMIT)
    tl.store(out_ptr + r * width + i, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def weighted_sum(
    y_ptr, out_ptr, ids_ptr, weights_ptr, map_ptr, H, num_experts, experts, scaling,
    TOP_K: tl.constexpr, SUM: tl.constexpr, HAS_MAP: tl.constexpr, PLACES: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """A token's slots times their weights, float32 in a fixed order; summed to one row, or one row each.

    Row ``slot`` of ``y`` belongs to a slot; with PLACES ``ids`` holds each slot's row instead, -1 for none.
    """
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros((BH,), tl.float32)
    lane = tl.arange(0, 1)  # vectors of one, which the interpreter masks as a GPU does
    for j in tl.static_range(TOP_K):
        slot = row * TOP_K + j
        at = tl.load(ids_ptr + slot + lane)
        if PLACES:
            there = at >= 0
            source = tl.maximum(at, 0).to(tl.int64)
        else:
            local, _ = local_expert(at, map_ptr, num_experts, experts, HAS_MAP)
            there = local >= 0
            source = slot + lane
        weight = tl.load(weights_ptr + slot + lane).to(tl.float32) * scaling
        # where all experts are here, reading does not wait for ids: what was never written is not used
        wanted = h < H
        if PLACES or HAS_MAP:
            wanted = wanted & there
        part = tl.load(y_ptr + source * H + h, mask=wanted, other=0.0).to(tl.float32)
        part = tl.where(there, part * weight, 0.0)
        if SUM:
            total += part
        else:
            tl.store(out_ptr + slot * H + h, part.to(out_ptr.dtype.element_ty), mask=h < H)
    if SUM:
        tl.store(out_ptr + row * H + h, total.to(out_ptr.dtype.element_ty), mask=h < H)
