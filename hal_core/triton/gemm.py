"""Matrix products with packed integer weights: rows of activations times one matrix, or the matrix of each row's expert.

The weight tile is the left operand: its codes are widened in registers, straight into the matrix unit, and the rows of
activations are the columns of the product, so that a batch of one wastes no more than the narrowest unit.

Scales are applied in one of two places. To the float32 sums of their group: weights are multiplied as the exact integers that they
are, at the price of waiting for each group's sums; right for few rows. To the weights, rounded once to the type of the activations:
the matrix unit then works through all of K while the next weights are unpacked; right for many rows.
"""

import triton
import triton.language as tl

from hal_core.triton.codes import centred, unpacked
from hal_core.triton.epilogue import finish, more_rows, tile_rows

__all__ = ["integer_gemm"]


@triton.jit
def _grid_value(ptr, group, n, n_pad):
    """One value for each output of a scale grid stored ``[groups, n_pad]``."""
    return tl.load(ptr + group * n_pad + n)


@triton.jit
def _group_sum(acc, part, x, scale, minimum, ZERO: tl.constexpr):
    """A group's products scaled and added; with minima, each times the sum of the group's activations."""
    acc += part * scale.to(tl.float32)[:, None]
    if ZERO == "minimum":
        acc += minimum.to(tl.float32)[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]
    return acc


@triton.jit
def _scaled(w, scale, minimum, ZERO: tl.constexpr):
    """Weights of a group in their own type, rounded once."""
    if scale.dtype == w.dtype and ZERO != "minimum":
        made = w * scale[:, None]
    else:
        made = w.to(tl.float32) * scale.to(tl.float32)[:, None]
        if ZERO == "minimum":
            made += minimum.to(tl.float32)[:, None]
    return made.to(w.dtype)


@triton.jit
def _product(
    acc, words, x, s_ptr, z_ptr, scale, zero, group, n, n_pad,
    BITS: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, ZERO: tl.constexpr, GROUPED: tl.constexpr, AHEAD: tl.constexpr,
    WEIGHTS: tl.constexpr,
):  # fmt: skip
    """``acc [BN, BM]`` plus some planes of a step. AHEAD: scale and minimum came with the step before.

    What goes into weights is loaded here: carried from step to step it would lie in another order than the weights in registers.
    """
    if GROUPED and not AHEAD:
        scale = _grid_value(s_ptr, group, n, n_pad)
    if GROUPED and (ZERO == "integer" or (ZERO == "minimum" and not AHEAD)):
        zero = _grid_value(z_ptr, group, n, n_pad)
    w = centred(unpacked(words, BITS, FIRST, COUNT, x.dtype), zero, BITS, ZERO)
    if GROUPED and WEIGHTS:
        acc = tl.dot(_scaled(w, scale, zero, ZERO), x, acc)
    elif GROUPED:
        acc = _group_sum(acc, tl.dot(w, x), x, scale, zero, ZERO)
    else:
        acc = tl.dot(w, x, acc)
    return acc


@triton.jit
def integer_gemm(
    x_ptr, y_ptr, w_ptr, s_ptr, z_ptr, b_ptr, gw_ptr, gs_ptr, gz_ptr, gb_ptr, perm_ptr, gperm_ptr,
    ids_ptr, map_ptr, slots_ptr, tile_expert_ptr, total_ptr, router_ptr,
    rows, N, K, n_pad, groups, num_experts, experts, x_div, alpha, limit,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, GATED: tl.constexpr, PERM: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr, LIMIT: tl.constexpr, ROUTER: tl.constexpr, ROUTE: tl.constexpr, HAS_MAP: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, EXTRA: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, SUB: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Tile ``[BM + EXTRA rows, BN outputs]`` of ``y [slots, N]``; with SPLIT > 1 of float32 parts ``[SPLIT, slots, N]``.

    EXTRA rows, of sorted routes only, are a product of their own with the same weights: these are unpacked once for both, and an expert
    that gets a few rows more than BM needs no second tile. Weights, scales: see ``layout``. Router weights multiply the products
    ("input": before the bias) or the result ("output").
    """
    PLANES: tl.constexpr = 16 // BITS
    STEP: tl.constexpr = 32 * PLANES
    # planes of one product: all of a step, unless scales change inside it
    COUNT: tl.constexpr = PLANES if GROUP % STEP == 0 else (2 if GROUP % 64 == 0 else 1)
    GROUPED: tl.constexpr = GROUP > 0
    AHEAD: tl.constexpr = COUNT == PLANES and not WEIGHTS
    num_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    if ROUTE == "plain":  # neighbours share weights
        num_m = tl.cdiv(rows, BM)
        pid_m = pid % num_m
        pid_n = pid // num_m
    else:  # neighbours share activations
        pid_n = pid % num_n
        pid_m = pid // num_n
    expert, slot, there = tile_rows(
        pid_m, ids_ptr, map_ptr, slots_ptr, tile_expert_ptr, total_ptr, rows, num_experts, experts, ROUTE, HAS_MAP, BM, EXTRA, SUB
    )
    if ROUTE != "plain":
        if expert < 0:
            return
    wide = tl.cast(expert, tl.int64)
    steps = tl.cdiv(K, STEP)
    n = pid_n * BN + tl.arange(0, BN)
    inside = tl.minimum(n, n_pad - 1)  # a tile may be wider than what the layout pads
    w_tile = w_ptr + wide * steps * n_pad * 16 + inside[:, None] * 16 + tl.arange(0, 16)[None, :]
    s_ptr += wide * groups * n_pad
    z_ptr += wide * groups * n_pad
    if GATED:
        g_tile = gw_ptr + wide * steps * n_pad * 16 + inside[:, None] * 16 + tl.arange(0, 16)[None, :]
        gs_ptr += wide * groups * n_pad
        gz_ptr += wide * groups * n_pad
    x_rows = x_ptr + (slot // x_div).to(tl.int64) * K
    if EXTRA:
        slot2, there2 = more_rows(pid_m, slots_ptr, rows, BM, EXTRA)
        x_rows2 = x_ptr + (slot2 // x_div).to(tl.int64) * K
        up2 = tl.zeros((BN, EXTRA), tl.float32)
        gate2 = up2
    lane = tl.arange(0, 32 * COUNT)
    first = steps * tl.program_id(1) // SPLIT
    last = steps * (tl.program_id(1) + 1) // SPLIT

    up = tl.zeros((BN, BM), tl.float32)
    gate = up
    group = first * STEP // GROUP if GROUPED else 0
    scale = _grid_value(s_ptr, group, inside, n_pad)
    zero = _grid_value(z_ptr, group, inside, n_pad) if ZERO != "none" else scale
    gscale = _grid_value(gs_ptr, group, inside, n_pad) if GATED else scale
    gzero = _grid_value(gz_ptr, group, inside, n_pad) if GATED and ZERO != "none" else scale
    for step in range(first, last):
        words = tl.load(w_tile + step * n_pad * 16)
        if GATED:
            gwords = tl.load(g_tile + step * n_pad * 16)
        if GROUPED and AHEAD:
            after = tl.minimum((step + 1) * STEP // GROUP, groups - 1)
            next_scale = _grid_value(s_ptr, after, inside, n_pad)
            next_zero = _grid_value(z_ptr, after, inside, n_pad) if ZERO == "minimum" else zero
            next_gscale = _grid_value(gs_ptr, after, inside, n_pad) if GATED else next_scale
            next_gzero = _grid_value(gz_ptr, after, inside, n_pad) if GATED and ZERO == "minimum" else gzero
        for part in tl.static_range(PLANES // COUNT):
            k = step * STEP + part * 32 * COUNT + lane
            mask = there[None, :] if EVEN_K else there[None, :] & (k < K)[:, None]
            at = tl.load(perm_ptr + wide * K + k, mask=k < K, other=0) if PERM else k
            x = tl.load(x_rows[None, :] + at[:, None], mask=mask, other=0.0)
            if EXTRA:
                mask2 = there2[None, :] if EVEN_K else there2[None, :] & (k < K)[:, None]
                x2 = tl.load(x_rows2[None, :] + at[:, None], mask=mask2, other=0.0)
            # the last step may reach beyond the last group, with codes of zero
            inner = tl.minimum((step * STEP + part * 32 * COUNT) // GROUP, groups - 1) if GROUPED else 0
            up = _product(
                up, words, x, s_ptr, z_ptr, scale, zero, inner, inside, n_pad, BITS, part * COUNT, COUNT, ZERO, GROUPED, AHEAD, WEIGHTS
            )
            if EXTRA:
                up2 = _product(
                    up2, words, x2, s_ptr, z_ptr, scale, zero, inner, inside, n_pad, BITS, part * COUNT, COUNT, ZERO, GROUPED, AHEAD,
                    WEIGHTS,
                )  # fmt: skip
            if GATED:
                if PERM:
                    gat = tl.load(gperm_ptr + wide * K + k, mask=k < K, other=0)
                    x = tl.load(x_rows[None, :] + gat[:, None], mask=mask, other=0.0)
                gate = _product(
                    gate, gwords, x, gs_ptr, gz_ptr, gscale, gzero, inner, inside, n_pad, BITS, part * COUNT, COUNT, ZERO, GROUPED, AHEAD,
                    WEIGHTS,
                )  # fmt: skip
                if EXTRA:
                    if PERM:
                        x2 = tl.load(x_rows2[None, :] + gat[:, None], mask=mask2, other=0.0)
                    gate2 = _product(
                        gate2, gwords, x2, gs_ptr, gz_ptr, gscale, gzero, inner, inside, n_pad, BITS, part * COUNT, COUNT, ZERO, GROUPED,
                        AHEAD, WEIGHTS,
                    )  # fmt: skip
        if GROUPED and AHEAD:
            scale = next_scale
            zero = next_zero
            gscale = next_gscale
            gzero = next_gzero
    if not GROUPED:
        up *= scale.to(tl.float32)[:, None]
        gate *= gscale.to(tl.float32)[:, None]
    finish(up, gate, slot, there, wide, n, N, rows, y_ptr, b_ptr, gb_ptr, router_ptr, alpha, limit, KIND, GATED, LIMIT, ROUTER, BIAS, SPLIT)
    if EXTRA:
        if not GROUPED:
            up2 *= scale.to(tl.float32)[:, None]
            gate2 *= gscale.to(tl.float32)[:, None]
        finish(
            up2, gate2, slot2, there2, wide, n, N, rows, y_ptr, b_ptr, gb_ptr, router_ptr, alpha, limit, KIND, GATED, LIMIT, ROUTER, BIAS,
            SPLIT,
        )  # fmt: skip
