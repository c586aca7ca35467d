"""Slots sorted by expert on the device: counts, offsets, scatter; and the weighted sum of each token's slots.

A slot is one of the ``top_k`` places of a token, numbered ``token * top_k + place``. Nothing here waits for the host, and every size
follows from shapes alone, so a graph captures it. An id out of range is skipped, and the first one seen is written to a flag.
"""

import triton
import triton.language as tl

from hal_core.triton.epilogue import activated, local_expert

__all__ = ["activate_rows", "count_slots", "flag_slots", "gather_rows", "offsets", "placed_sum", "scatter_slots", "slot_sum", "sort_slots"]


@triton.jit
def _flag(flag_ptr, index, ids, wrong, top_k):
    """One 64-bit word says it all, so that several programs cannot mix their reports: slot + 1 above, the id below."""
    report = ((index + 1).to(tl.int64) << 32) | (ids.to(tl.int64) & 0xFFFFFFFF)
    tl.store(flag_ptr + 1 + index * 0, top_k + index * 0, mask=wrong)
    tl.store(flag_ptr + index * 0, report, mask=wrong)


@triton.jit
def _experts_of(ids_ptr, map_ptr, flag_ptr, index, numel, num_experts, experts, top_k, HAS_MAP: tl.constexpr):
    ids = tl.load(ids_ptr + index, mask=index < numel, other=-1)
    local, wrong = local_expert(ids, map_ptr, num_experts, experts, HAS_MAP)
    _flag(flag_ptr, index, ids, wrong, top_k)
    return local


@triton.jit
def _offsets(scratch_ptr, tile_expert_ptr, tile_start_ptr, first, last, BM: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr):
    """Counts ``scratch[0:E]`` to starts ``[E:2E]``, ends ``[2E:3E]``; expert and first place of the tiles ``first`` to ``last``."""
    e = tl.arange(0, E)
    # volatile: the counts were made by atomics, behind the first-level cache
    counts = tl.load(scratch_ptr + e, volatile=True)
    ends = tl.cumsum(counts, 0)
    starts = ends - counts
    tl.store(scratch_ptr + E + e, starts)
    tl.store(scratch_ptr + 2 * E + e, ends)
    tiles_of = (counts + BM - 1) // BM
    tile_ends = tl.cumsum(tiles_of, 0)
    # a tile's place is its own number times BM, moved by what its expert's tiles before it do not fill
    moved = starts - (tile_ends - tiles_of) * BM
    for chunk in range(first, last, CHUNK):
        t = chunk + tl.arange(0, CHUNK)
        expert = tl.sum((tile_ends[None, :] <= t[:, None]).to(tl.int32), axis=1)
        shift = tl.sum(tl.where(e[None, :] == expert[:, None], moved[None, :], 0), axis=1)
        tl.store(tile_expert_ptr + t, tl.where(expert < E, expert, -1), mask=t < last)
        tl.store(tile_start_ptr + t, t * BM + shift, mask=t < last)


@triton.jit
def sort_slots(
    ids_ptr, map_ptr, flag_ptr, slots_ptr, scratch_ptr, tile_expert_ptr, tile_start_ptr,
    places_ptr, numel, num_experts, experts, top_k, tiles,
    HAS_MAP: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """All in one program, for few slots (``numel <= P``). PLACES: also the place of each slot, -1 for those that go nowhere."""
    tl.store(scratch_ptr + tl.arange(0, E), tl.zeros((E,), tl.int32))
    tl.debug_barrier()
    index = tl.arange(0, P)
    local = _experts_of(ids_ptr, map_ptr, flag_ptr, index, numel, num_experts, experts, top_k, HAS_MAP)
    rank = tl.atomic_add(scratch_ptr + tl.maximum(local, 0), 1, mask=local >= 0)
    tl.debug_barrier()
    _offsets(scratch_ptr, tile_expert_ptr, tile_start_ptr, 0, tiles, BM, E, CHUNK)
    tl.debug_barrier()
    start = tl.load(scratch_ptr + E + tl.maximum(local, 0), mask=local >= 0, other=0, volatile=True)
    tl.store(slots_ptr + start + rank, index, mask=local >= 0)
    if PLACES:
        tl.store(places_ptr + index, tl.where(local >= 0, start + rank, -1), mask=index < numel)


@triton.jit
def count_slots(
    ids_ptr, map_ptr, flag_ptr, scratch_ptr, ranks_ptr, numel, num_experts, experts, top_k, HAS_MAP: tl.constexpr, P: tl.constexpr
):
    """Counts per expert, into zeroed ``scratch``, and each slot's place among those of its expert."""
    index = tl.program_id(0) * P + tl.arange(0, P)
    local = _experts_of(ids_ptr, map_ptr, flag_ptr, index, numel, num_experts, experts, top_k, HAS_MAP)
    rank = tl.atomic_add(scratch_ptr + tl.maximum(local, 0), 1, mask=local >= 0)
    tl.store(ranks_ptr + index, rank, mask=index < numel)


@triton.jit
def offsets(scratch_ptr, tile_expert_ptr, tile_start_ptr, tiles, BM: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr):
    """Between counting and scattering: each program sums all counts, and looks up CHUNK tiles."""
    first = tl.program_id(0) * CHUNK
    _offsets(scratch_ptr, tile_expert_ptr, tile_start_ptr, first, tl.minimum(first + CHUNK, tiles), BM, E, CHUNK)


@triton.jit
def scatter_slots(
    ids_ptr, map_ptr, scratch_ptr, ranks_ptr, slots_ptr, places_ptr, numel, num_experts, experts,
    HAS_MAP: tl.constexpr, P: tl.constexpr, E: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Each slot to its place."""
    index = tl.program_id(0) * P + tl.arange(0, P)
    ids = tl.load(ids_ptr + index, mask=index < numel, other=-1)
    local, _ = local_expert(ids, map_ptr, num_experts, experts, HAS_MAP)
    start = tl.load(scratch_ptr + E + tl.maximum(local, 0), mask=local >= 0, other=0)
    rank = tl.load(ranks_ptr + index, mask=local >= 0, other=0)
    tl.store(slots_ptr + start + rank, index, mask=local >= 0)
    if PLACES:
        tl.store(places_ptr + index, tl.where(local >= 0, start + rank, -1), mask=index < numel)


@triton.jit
def flag_slots(ids_ptr, map_ptr, flag_ptr, numel, num_experts, experts, top_k, HAS_MAP: tl.constexpr, P: tl.constexpr):
    """Only the check, where nothing is sorted."""
    index = tl.program_id(0) * P + tl.arange(0, P)
    _experts_of(ids_ptr, map_ptr, flag_ptr, index, numel, num_experts, experts, top_k, HAS_MAP)


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
                _flag(flag_ptr, slot.to(tl.int32), ids, wrong, TOP_K)
        for part in tl.static_range(PARTS):
            total += tl.load(y_ptr + part * part_stride + slot * H + h, mask=h < width, other=0.0).to(tl.float32)
    total *= scaling
    if BIAS:
        total += tl.load(b_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * H + h, total.to(out_ptr.dtype.element_ty), mask=h < H)


@triton.jit
def gather_rows(x_ptr, out_ptr, slots_ptr, total_ptr, H, top_k, BH: tl.constexpr):
    """Rows of ``x`` in the order of the sorted slots: one program a row and a part of it."""
    place = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    width = tl.where(place < tl.load(total_ptr), H, 0)
    slot = tl.load(slots_ptr + tl.minimum(place, tl.maximum(tl.load(total_ptr) - 1, 0)))
    row = tl.where(width > 0, slot // top_k, 0).to(tl.int64)
    x = tl.load(x_ptr + row * H + h, mask=h < width, other=0.0)
    tl.store(out_ptr + place.to(tl.int64) * H + h, x, mask=h < H)


@triton.jit
def activate_rows(
    up_ptr, gate_ptr, out_ptr, numel, alpha, limit, KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, B: tl.constexpr
):
    """The activation function of experts, element by element."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    up = tl.load(up_ptr + at, mask=at < numel, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=at < numel, other=0.0).to(tl.float32) if GATED else up
    y = activated(up, gate, alpha, limit, KIND, GATED, LIMIT)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=at < numel)


@triton.jit
def placed_sum(
    y_ptr, out_ptr, places_ptr, weights_ptr, H, scaling, TOP_K: tl.constexpr, REDUCE: tl.constexpr, BH: tl.constexpr
):
    """Weighted sum over each token's slots of rows ``y`` that lie at their places; or the weighted slots one by one."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros((BH,), tl.float32)
    for j in tl.static_range(TOP_K):
        place = tl.load(places_ptr + row * TOP_K + j)
        width = tl.where(place >= 0, H, 0)
        weight = tl.load(weights_ptr + row * TOP_K + j).to(tl.float32)
        y = tl.load(y_ptr + tl.maximum(place, 0).to(tl.int64) * H + h, mask=h < width, other=0.0).to(tl.float32)
        # a slot that goes nowhere adds nothing, whatever its weight
        term = tl.where(h < width, y * weight, 0.0)
        if REDUCE:
            total += term
        else:
            tl.store(out_ptr + (row * TOP_K + j) * H + h, (term * scaling).to(out_ptr.dtype.element_ty), mask=h < H)
    if REDUCE:
        tl.store(out_ptr + row * H + h, (total * scaling).to(out_ptr.dtype.element_ty), mask=h < H)
