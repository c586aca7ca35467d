"""Activations to int8 with one scale a token, and to fp8 with one scale for every group of columns.

Both take what they quantize as it lies, or compute it: the activation of rows ``stride`` elements apart, rounded to their type.
"""

import triton
import triton.language as tl

from hal_core.triton.epilogue import activated

__all__ = ["fp8_groups", "int8_tokens"]


@triton.jit
def _nearest(x):
    """To the nearest integer, ties to even, for ``abs(x) < 2**22``: what float32 rounding does when its last place counts ones."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _finite(x):
    return tl.abs(x) <= 3.4028234663852886e38


@triton.jit
def _values(x_ptr, gate_ptr, at, mask, alpha, limit, KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr):
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if KIND != "none":
        gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32) if GATED else x
        x = activated(x, gate, alpha, limit, KIND, GATED, LIMIT).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _codes(x, scale):
    code = _nearest(tl.div_rn(tl.where(_finite(x), x, 0.0), scale))
    return tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8)


@triton.jit
def int8_tokens(
    x_ptr, gate_ptr, q_ptr, s_ptr, K, stride, alpha, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, BK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """One program a row: ``q = x / s`` in -127..127 with ``s = max(abs(x)) / 127``; a row with NaN or infinity gets the scale NaN.

    ONCE: a row is BK values at most, which are not read or computed again when the scale is known.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BK)
    largest = tl.zeros((BK,), tl.float32)
    spoilt = tl.zeros((BK,), tl.int32)
    x = largest
    for first in range(0, BK if ONCE else K, BK):
        k = first + lane
        x = _values(x_ptr, gate_ptr, row * stride + k, k < K, alpha, limit, KIND, GATED, LIMIT)
        good = _finite(x)
        largest = tl.maximum(largest, tl.where(good, tl.abs(x), 0.0))
        spoilt = spoilt | (1 - good.to(tl.int32))
    top = tl.max(largest, axis=0)
    scale = tl.where(top > 0, tl.div_rn(top, 127.0), 1.0)
    bad = tl.max(spoilt, axis=0) > 0
    tl.store(s_ptr + row, tl.where(bad, float("nan"), scale))
    if ONCE:
        tl.store(q_ptr + row * K + lane, _codes(x, scale), mask=lane < K)
    else:
        for first in range(0, K, BK):
            k = first + lane
            x = _values(x_ptr, gate_ptr, row * stride + k, k < K, alpha, limit, KIND, GATED, LIMIT)
            tl.store(q_ptr + row * K + k, _codes(x, scale), mask=k < K)


@triton.jit
def fp8_groups(
    x_ptr, gate_ptr, q_ptr, s_ptr, rows, K, groups, stride, alpha, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """``q = x / s`` in e4m3 with ``s = max(abs(x)) / TOP`` of GROUP columns; what is not finite becomes NaN and has no part in it."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    group = tl.program_id(1)
    k = group * GROUP + tl.arange(0, GROUP)
    mask = (row < rows)[:, None] & (k < K)[None, :]
    x = _values(x_ptr, gate_ptr, row[:, None] * stride + k[None, :], mask, alpha, limit, KIND, GATED, LIMIT)
    good = _finite(x)
    top = tl.max(tl.where(good, tl.abs(x), 0.0), axis=1)
    scale = tl.where(top > 0, tl.div_rn(top, TOP), 1.0)
    code = tl.div_rn(tl.where(good, x, 0.0), tl.broadcast_to(scale[:, None], (BM, GROUP)))
    # the largest may round above 448, where e4m3 has only NaN; what the hardware's conversion makes of such numbers differs
    code = tl.minimum(tl.maximum(code, -TOP), TOP)
    code = tl.where(good, code, float("nan"))
    tl.store(q_ptr + row[:, None] * K + k[None, :], code.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(s_ptr + row * groups + group, scale, mask=row < rows)
