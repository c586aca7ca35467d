"""Packed integer weights written out as floats, for products so large that one pass over the weights costs little beside them."""

import triton
import triton.language as tl

from hal_core.triton.codes import centred, unpacked

__all__ = ["widen_steps"]


@triton.jit
def widen_steps(
    w_ptr, s_ptr, z_ptr, perm_ptr, out_ptr, first_n, N, K, n_pad, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, PERM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One step of BN outputs, from output ``first_n`` on, to ``out [N - first_n, K]``: scaled in float32, rounded once."""
    PLANES: tl.constexpr = 16 // BITS
    step = tl.program_id(0)
    n = first_n + tl.program_id(1) * BN + tl.arange(0, BN)
    inside = tl.minimum(n, n_pad - 1)
    words = tl.load(w_ptr + (step * n_pad + inside)[:, None] * 16 + tl.arange(0, 16)[None, :])
    row = out_ptr + (n - first_n).to(tl.int64)[:, None] * K
    for part in tl.static_range(PLANES):
        k = (step * PLANES + part) * 32 + tl.arange(0, 32)
        group = tl.minimum((step * PLANES + part) * 32 // GROUP, groups - 1) if GROUP > 0 else 0
        scale = tl.load(s_ptr + group * n_pad + inside)
        zero = tl.load(z_ptr + group * n_pad + inside) if ZERO != "none" else scale
        codes = centred(unpacked(words, BITS, part, 1, out_ptr.dtype.element_ty), zero, BITS, ZERO)
        weight = codes.to(tl.float32) * scale.to(tl.float32)[:, None]
        if ZERO == "minimum":
            weight += zero.to(tl.float32)[:, None]
        at = tl.load(perm_ptr + k, mask=k < K, other=0) if PERM else k
        tl.store(row + at[None, :], weight.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])
