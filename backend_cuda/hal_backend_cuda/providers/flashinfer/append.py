"""Tokens into pages: one launch that rounds, casts and skips, or plain torch on the host."""

import triton
import triton.language as tl

__all__ = ["append_tokens"]


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
