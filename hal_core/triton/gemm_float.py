"""Matrix products with weights that matrix units take as they are: bfloat16, float16, or fp8 with scales."""

import triton
import triton.language as tl

from hal_core.triton.epilogue import finish, tile_rows

__all__ = ["float_gemm"]


@triton.jit
def _added(acc, w, x, w_scale, x_scale, SCALES: tl.constexpr):
    """``acc [BN, BM]`` plus ``w [BN, BK] @ x [BK, BM]``; with blocks, times the scales of the block's rows and columns."""
    if SCALES == "block":
        acc += tl.dot(w, x) * w_scale[:, None] * x_scale[None, :]
    elif SCALES == "row":
        # a step at a time: inside the unit sums of fp8 products keep fewer digits than float32
        acc += tl.dot(w, x)
    else:
        acc = tl.dot(w, x, acc)
    return acc


@triton.jit
def float_gemm(
    x_ptr, xs_ptr, y_ptr, w_ptr, ws_ptr, b_ptr, gw_ptr, gws_ptr, gb_ptr,
    ids_ptr, map_ptr, slots_ptr, tile_expert_ptr, total_ptr, router_ptr,
    rows, N, K, num_experts, experts, x_div, alpha, limit,
    SCALES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, X_GROUP: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, ROUTER: tl.constexpr,
    ROUTE: tl.constexpr, HAS_MAP: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Tile ``[BM rows, BN outputs]`` of ``y [slots, N]``; with SPLIT > 1 of float32 parts ``[SPLIT, slots, N]``.

    Weights ``[experts, N, K]``. SCALES "none"; "block": weight scales float32 ``[experts, ceil(N/BLOCK_N), ceil(K/BLOCK_K)]`` and one
    scale of x for every X_GROUP columns, ``xs [rows, ceil(K/X_GROUP)]``, where BK divides both; "row": weight scales ``[experts, N]``,
    one scale a row of x.
    """
    num_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    if ROUTE == "plain":
        num_m = tl.cdiv(rows, BM)
        pid_m = pid % num_m
        pid_n = pid // num_m
    else:
        pid_n = pid % num_n
        pid_m = pid // num_n
    expert, slot, there = tile_rows(
        pid_m, ids_ptr, map_ptr, slots_ptr, tile_expert_ptr, total_ptr, rows, num_experts, experts, ROUTE, HAS_MAP, BM, 0, SUB
    )
    if ROUTE != "plain":
        if expert < 0:
            return
    wide = tl.cast(expert, tl.int64)
    n = pid_n * BN + tl.arange(0, BN)
    inside = tl.minimum(n, N - 1)
    lane = tl.arange(0, BK)
    row = (slot // x_div).to(tl.int64)
    x_tile = x_ptr + row[None, :] * K + lane[:, None]
    w_tile = w_ptr + wide * N * K + inside.to(tl.int64)[:, None] * K + lane[None, :]
    if GATED:
        g_tile = gw_ptr + wide * N * K + inside.to(tl.int64)[:, None] * K + lane[None, :]
    steps = tl.cdiv(K, BK)
    blocks_k = tl.cdiv(K, BLOCK_K)
    w_scales = ws_ptr + wide * tl.cdiv(N, BLOCK_N) * blocks_k + inside // BLOCK_N * blocks_k
    g_scales = gws_ptr + wide * tl.cdiv(N, BLOCK_N) * blocks_k + inside // BLOCK_N * blocks_k
    x_scales = xs_ptr + row * tl.cdiv(K, X_GROUP)
    up = tl.zeros((BN, BM), tl.float32)
    gate = up
    for step in range(steps * tl.program_id(1) // SPLIT, steps * (tl.program_id(1) + 1) // SPLIT):
        k = step * BK + lane
        x_mask = there[None, :] if EVEN_K else there[None, :] & (k < K)[:, None]
        x = tl.load(x_tile + step * BK, mask=x_mask, other=0.0)
        w_scale = 0.0
        g_scale = 0.0
        x_scale = 0.0
        if SCALES == "block":
            x_scale = tl.load(x_scales + step * BK // X_GROUP, mask=there, other=0.0)
            w_scale = tl.load(w_scales + step * BK // BLOCK_K)
            if GATED:
                g_scale = tl.load(g_scales + step * BK // BLOCK_K)
        if EVEN_K:
            w = tl.load(w_tile + step * BK)
        else:
            w = tl.load(w_tile + step * BK, mask=(k < K)[None, :], other=0.0)
        up = _added(up, w, x, w_scale, x_scale, SCALES)
        if GATED:
            if EVEN_K:
                g = tl.load(g_tile + step * BK)
            else:
                g = tl.load(g_tile + step * BK, mask=(k < K)[None, :], other=0.0)
            gate = _added(gate, g, x, g_scale, x_scale, SCALES)
    if SCALES == "row":
        x_scale = tl.load(xs_ptr + row, mask=there, other=0.0)
        up *= tl.load(ws_ptr + wide * N + inside)[:, None] * x_scale[None, :]
        if GATED:
            gate *= tl.load(gws_ptr + wide * N + inside)[:, None] * x_scale[None, :]
    finish(up, gate, slot, there, wide, n, N, rows, y_ptr, b_ptr, gb_ptr, router_ptr, alpha, limit, KIND, GATED, LIMIT, ROUTER, BIAS, SPLIT)
