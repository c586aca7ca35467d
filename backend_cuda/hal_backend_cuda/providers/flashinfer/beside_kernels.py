"""Triton kernels beside FlashInfer's: tokens into pages, logarithms as this project counts them, one slot of a token for an expert."""

import triton
import triton.language as tl

from hal_core.triton.routing import report

__all__ = ["append_tokens", "merge_slots", "natural_logs"]


@triton.jit
def append_tokens(
    x_ptr, pages_ptr, slots_ptr, width, page_size, page_stride, side, slot_count, scale,
    FP8: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Row t of ``x [T, width]`` to slot ``slots[t]``: page ``slot // page_size``, ``side`` elements in. Slots out of range are skipped."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BW + tl.arange(0, BW)
    slot = tl.load(slots_ptr + token)
    inside = (slot >= 0) & (slot < slot_count)
    x = tl.load(x_ptr + token * width + lane, mask=lane < width, other=0.0)
    if FP8:
        # e4m3 has no infinity: what is larger than its largest number would be NaN
        x = x.to(tl.float32) / scale
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    place = slot // page_size * page_stride + side + slot % page_size * width
    tl.store(pages_ptr + place + lane, x.to(pages_ptr.dtype.element_ty), mask=(lane < width) & inside)


@triton.jit
def natural_logs(lse_ptr, out_ptr, count, BW: tl.constexpr):
    """Logarithms to base 2 become natural ones; those of rows that saw no token, which FlashInfer gives as -50000, become -infinity."""
    lane = tl.program_id(0) * BW + tl.arange(0, BW)
    x = tl.load(lse_ptr + lane, mask=lane < count, other=0.0)
    x = tl.where(x < -40000.0, float("-inf"), x * 0.6931471805599453)
    tl.store(out_ptr + lane, x, mask=lane < count)


@triton.jit
def merge_slots(
    ids_ptr, weights_ptr, ids_out_ptr, weights_out_ptr, flag_ptr, tokens, num_experts, top_k, scaling,
    SLOTS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Weights of a token's slots with the same expert go to the first of them, times ``scaling``; the others get the id -1 and 0.

    So do slots whose id is none of an expert, which is told. ``ids, weights [tokens, SLOTS]``; ``top_k`` is the caller's.
    """
    token = tl.program_id(0) * P + tl.arange(0, P)
    inside = token < tokens
    for j in range(SLOTS):
        ids = tl.load(ids_ptr + token * SLOTS + j, mask=inside, other=-1)
        kept = (ids >= 0) & (ids < num_experts)
        report(flag_ptr, token * SLOTS + j, ids, (ids != -1) & (kept == 0), top_k)
        total = tl.zeros((P,), tl.float32)
        for i in range(SLOTS):
            same = tl.load(ids_ptr + token * SLOTS + i, mask=inside, other=-1) == ids
            total += tl.where(same, tl.load(weights_ptr + token * SLOTS + i, mask=inside, other=0.0), 0.0)
            kept = kept & ((i >= j) | (same == 0))
        tl.store(ids_out_ptr + token * SLOTS + j, tl.where(kept, ids, -1), mask=inside)
        tl.store(weights_out_ptr + token * SLOTS + j, tl.where(kept, total * scaling, 0.0), mask=inside)
