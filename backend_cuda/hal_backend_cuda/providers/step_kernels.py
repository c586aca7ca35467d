"""Triton kernels around a provider's products: slots by expert in padded blocks, activation, weighted sum of a token's slots.

Every size follows from shapes alone and nothing waits for the host, so a graph captures them. Ids out of range are skipped, and the
first one seen is written to a flag of two 64-bit words.
"""

import triton
import triton.language as tl

from hal_core.triton.epilogue import activated, local_expert

__all__ = ["activate_rows", "count_slots", "direct_slots", "scatter_slots", "sort_slots", "weighted_sum"]


@triton.jit
def _local(ids_ptr, map_ptr, flag_ptr, index, numel, num_experts, experts, top_k, HAS_MAP: tl.constexpr):
    ids = tl.load(ids_ptr + index, mask=index < numel, other=-1)
    local, wrong = local_expert(ids, map_ptr, num_experts, experts, HAS_MAP)
    report = ((index + 1).to(tl.int64) << 32) | (ids.to(tl.int64) & 0xFFFFFFFF)
    tl.store(flag_ptr + 1 + index * 0, top_k + index * 0, mask=wrong)
    tl.store(flag_ptr + index * 0, report, mask=wrong)
    return local


@triton.jit
def direct_slots(
    ids_ptr, map_ptr, flag_ptr, sorted_ptr, block_expert_ptr, padded_ptr, numel, num_experts, experts, top_k,
    HAS_MAP: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BM2: tl.constexpr,
):  # fmt: skip
    """One block for each slot, for so few that they hardly share experts; no counting, one program."""
    index = tl.arange(0, P)
    local = _local(ids_ptr, map_ptr, flag_ptr, index, numel, num_experts, experts, top_k, HAS_MAP)
    inside = index < numel
    tl.store(block_expert_ptr + index, tl.maximum(local, 0), mask=inside)
    lane = tl.arange(0, BM2)
    row = tl.where((local >= 0)[:, None] & (lane == 0)[None, :], index[:, None], numel)
    tl.store(sorted_ptr + index[:, None] * BM + lane[None, :], row, mask=inside[:, None] & (lane < BM)[None, :])
    tl.store(padded_ptr, numel * BM)


@triton.jit
def _blocks(scratch_ptr, sorted_ptr, block_expert_ptr, padded_ptr, numel, BM: tl.constexpr, E: tl.constexpr, FILL: tl.constexpr):
    """First places of experts, from counts ``scratch[0:E]``, which become 0; experts of blocks; rows of places that stay empty."""
    e = tl.arange(0, E)
    # volatile: the counts were made by atomics, behind the first-level cache
    counts = tl.load(scratch_ptr + e, volatile=True)
    blocks = (counts + BM - 1) // BM
    padded = blocks * BM
    starts = tl.cumsum(padded, 0) - padded
    # every warp has read the counts before one of them clears them
    tl.debug_barrier()
    tl.store(scratch_ptr + e, tl.zeros((E,), tl.int32))
    tl.store(padded_ptr, tl.sum(padded, 0))
    for block in range(tl.max(blocks, 0)):
        tl.store(block_expert_ptr + starts // BM + block, e, mask=block < blocks)
    for first in tl.static_range(0, BM, FILL):
        lane = first + tl.arange(0, FILL)
        place = (starts + counts)[:, None] + lane[None, :]
        tl.store(sorted_ptr + place, tl.zeros((E, FILL), tl.int32) + numel, mask=lane[None, :] < (padded - counts)[:, None])
    return starts


@triton.jit
def sort_slots(
    ids_ptr, map_ptr, flag_ptr, scratch_ptr, sorted_ptr, block_expert_ptr, padded_ptr, numel, num_experts, experts, top_k,
    HAS_MAP: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, E: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """All in one program (``numel <= P``). ``scratch int32 [E + 1]`` is zero before and after."""
    index = tl.arange(0, P)
    local = _local(ids_ptr, map_ptr, flag_ptr, index, numel, num_experts, experts, top_k, HAS_MAP)
    rank = tl.atomic_add(scratch_ptr + tl.maximum(local, 0), 1, mask=local >= 0)
    tl.debug_barrier()
    starts = _blocks(scratch_ptr, sorted_ptr, block_expert_ptr, padded_ptr, numel, BM, E, FILL)
    start = tl.gather(starts, tl.maximum(local, 0), 0)
    tl.store(sorted_ptr + start + rank, index, mask=local >= 0)


@triton.jit
def count_slots(
    ids_ptr, map_ptr, flag_ptr, scratch_ptr, starts_ptr, ranks_ptr, sorted_ptr, block_expert_ptr, padded_ptr,
    numel, num_experts, experts, top_k,
    HAS_MAP: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, E: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Counts per expert and each slot's rank in it; the program that comes last lays out the blocks. Starts are the call's own."""
    index = tl.program_id(0) * P + tl.arange(0, P)
    local = _local(ids_ptr, map_ptr, flag_ptr, index, numel, num_experts, experts, top_k, HAS_MAP)
    rank = tl.atomic_add(scratch_ptr + tl.maximum(local, 0), 1, mask=local >= 0)
    tl.store(ranks_ptr + index, rank, mask=index < numel)
    tl.debug_barrier()
    if tl.atomic_add(scratch_ptr + E, 1) == tl.num_programs(0) - 1:
        starts = _blocks(scratch_ptr, sorted_ptr, block_expert_ptr, padded_ptr, numel, BM, E, FILL)
        tl.store(starts_ptr + tl.arange(0, E), starts)
        tl.store(scratch_ptr + E, 0)


@triton.jit
def scatter_slots(
    ids_ptr, map_ptr, starts_ptr, ranks_ptr, sorted_ptr, numel, num_experts, experts, HAS_MAP: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Each slot to its place."""
    index = tl.program_id(0) * P + tl.arange(0, P)
    ids = tl.load(ids_ptr + index, mask=index < numel, other=-1)
    local, _ = local_expert(ids, map_ptr, num_experts, experts, HAS_MAP)
    start = tl.load(starts_ptr + tl.maximum(local, 0), mask=local >= 0, other=0)
    rank = tl.load(ranks_ptr + index, mask=local >= 0, other=0)
    tl.store(sorted_ptr + start + rank, index, mask=local >= 0)


@triton.jit
def activate_rows(
    y_ptr, out_ptr, rows, width, alpha, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """``[R, 2 width]``, gate before up, or ``[R, width]``, to ``[R, width]``."""
    r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    i = (tl.program_id(1) * BI + tl.arange(0, BI))[None, :]
    mask = (r < rows) & (i < width)
    if GATED:
        gate = tl.load(y_ptr + r * (2 * width) + i, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(y_ptr + r * (2 * width) + width + i, mask=mask, other=0.0).to(tl.float32)
    else:
        up = tl.load(y_ptr + r * width + i, mask=mask, other=0.0).to(tl.float32)
        gate = up
    y = activated(up, gate, alpha, limit, KIND, GATED, LIMIT)
    tl.store(out_ptr + r * width + i, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def weighted_sum(
    y_ptr, out_ptr, ids_ptr, weights_ptr, map_ptr, H, num_experts, experts, scaling,
    TOP_K: tl.constexpr, SUM: tl.constexpr, HAS_MAP: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """A token's slots times their weights, float32 in a fixed order; summed to one row, or one row each."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros((BH,), tl.float32)
    lane = tl.arange(0, 1)  # vectors of one, which the interpreter masks as a GPU does
    for j in tl.static_range(TOP_K):
        slot = row * TOP_K + j
        local, _ = local_expert(tl.load(ids_ptr + slot + lane), map_ptr, num_experts, experts, HAS_MAP)
        weight = tl.load(weights_ptr + slot + lane) * scaling
        part = tl.load(y_ptr + slot * H + h, mask=(h < H) & (local >= 0), other=0.0).to(tl.float32)
        part = tl.where(local >= 0, part * weight, 0.0)
        if SUM:
            total += part
        else:
            tl.store(out_ptr + slot * H + h, part.to(out_ptr.dtype.element_ty), mask=h < H)
    if SUM:
        tl.store(out_ptr + row * H + h, total.to(out_ptr.dtype.element_ty), mask=h < H)
