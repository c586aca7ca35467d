"""Triton kernels beside FlashInfer's: tokens into pages, and logarithms as this project counts them."""

import triton
import triton.language as tl

__all__ = ["append_tokens", "natural_logs"]


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
def natural_logs(lse_ptr, count, BW: tl.constexpr):
    """Logarithms to base 2 become natural ones; those of rows that saw no token, which FlashInfer gives as -50000, become -infinity."""
    lane = tl.program_id(0) * BW + tl.arange(0, BW)
    x = tl.load(lse_ptr + lane, mask=lane < count, other=0.0)
    x = tl.where(x < -40000.0, float("-inf"), x * 0.6931471805599453)
    tl.store(lse_ptr + lane, x, mask=lane < count)
