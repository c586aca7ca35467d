"""A product of two MXFP4 matrices with scales of blocks, for what compilers make of it; a file of its own, as Triton reads sources."""

import triton
import triton.language as tl


@triton.jit
def scaled_product(a_ptr, as_ptr, b_ptr, bs_ptr, c_ptr):
    """``c [64, 64] = a [64, 128] @ b [128, 64]``; two codes a byte, a scale for 32."""
    m, n, half, groups = tl.arange(0, 64), tl.arange(0, 64), tl.arange(0, 64), tl.arange(0, 4)
    a, b = tl.load(a_ptr + m[:, None] * 64 + half[None, :]), tl.load(b_ptr + half[:, None] + n[None, :] * 64)
    a_scale, b_scale = tl.load(as_ptr + m[:, None] * 4 + groups[None, :]), tl.load(bs_ptr + n[:, None] * 4 + groups[None, :])
    c = tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1")
    tl.store(c_ptr + m[:, None] * 64 + n[None, :], c)
