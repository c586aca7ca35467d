"""Which rows a tile has, and what happens to its products before they are stored: shared by the matrix kernels."""

import triton
import triton.language as tl

__all__ = ["activated", "finish", "local_expert", "more_rows", "tile_rows"]


@triton.jit
def _curve(x, KIND: tl.constexpr):
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "relu2":
        y = tl.where(x < 0, 0.0, x)  # keeps NaN, which a maximum would drop
        y = y * y
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    return y


@triton.jit
def activated(up, gate, alpha, limit, KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr):
    """``act(gate) * up``, or ``act(up)`` when ungated; ``limit`` clamps gate from above and up on both sides first. float32."""
    if LIMIT:
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
        if GATED:
            gate = tl.where(gate > limit, limit, gate)
    if KIND == "none":
        y = up
    elif not GATED:
        y = _curve(up, KIND)
    elif KIND == "swiglu_oai":
        y = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    else:
        y = _curve(gate, KIND) * up
    return y


@triton.jit
def local_expert(ids, map_ptr, num_experts, experts, HAS_MAP: tl.constexpr):
    """Local experts of global ids, -1 where there is none; and whether an id or the map's answer is out of range."""
    wrong = (ids < -1) | (ids >= num_experts)
    local = tl.where(wrong, -1, ids)
    if HAS_MAP:
        local = tl.load(map_ptr + tl.maximum(local, 0), mask=local >= 0, other=-1)
    beyond = (local < -1) | (local >= experts)
    return tl.where(beyond, -1, local), wrong | beyond


@triton.jit
def tile_rows(
    pid_m, ids_ptr, map_ptr, slots_ptr, tile_expert_ptr, total_ptr, rows, num_experts, experts,
    ROUTE: tl.constexpr, HAS_MAP: tl.constexpr, BM: tl.constexpr, EXTRA: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Expert of a tile (-1: nothing to do), its first slots ``[BM]``, and which of them are there; :func:`more_rows` gives the others.

    ROUTE "plain": rows one after another, one expert. "direct": one slot a tile. "sorted": as the routing kernels wrote it, where SUB of
    these tiles stand for one of theirs.
    """
    lane = tl.arange(0, BM)
    if ROUTE == "plain":
        expert = 0
        slot = pid_m * BM + lane
        there = slot < rows
    elif ROUTE == "direct":
        expert, _ = local_expert(tl.load(ids_ptr + pid_m), map_ptr, num_experts, experts, HAS_MAP)
        slot = pid_m + lane * 0
        there = lane == 0
    else:
        first = pid_m * (BM + EXTRA)
        expert = tl.where(first < tl.load(total_ptr), tl.load(tile_expert_ptr + pid_m // SUB), -1)
        if SUB > 1:  # rows come first in a tile of the sort, so that parts of it may be empty
            expert = tl.where(tl.load(slots_ptr + first) < rows, expert, -1)
        slot = tl.load(slots_ptr + first + lane)
        there = slot < rows
        slot = tl.where(there, slot, 0)
    return expert, slot, there


@triton.jit
def more_rows(pid_m, slots_ptr, rows, BM: tl.constexpr, EXTRA: tl.constexpr):
    """The last slots ``[EXTRA]`` of a sorted tile, and which of them are there."""
    slot = tl.load(slots_ptr + pid_m * (BM + EXTRA) + BM + tl.arange(0, EXTRA))
    there = slot < rows
    return tl.where(there, slot, 0), there


@triton.jit
def finish(
    up, gate, slot, there, expert, n, N, rows, y_ptr, b_ptr, gb_ptr, router_ptr, alpha, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ROUTER: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Router weights ("input": on the products; "output": on the result), biases, activation; then ``y [slots, N]``, or parts of it."""
    if ROUTER != "none":
        weight = tl.load(router_ptr + slot, mask=there, other=0.0).to(tl.float32)[None, :]
    if ROUTER == "input":
        up *= weight
        gate *= weight
    if BIAS:
        up += tl.load(b_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            gate += tl.load(gb_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    y = activated(up, gate, alpha, limit, KIND, GATED, LIMIT)
    if ROUTER == "output":
        y *= weight
    target = slot.to(tl.int64) * N
    if SPLIT > 1:
        target += tl.program_id(1).to(tl.int64) * rows * N
    tl.store(y_ptr + target[None, :] + n[:, None], y.to(y_ptr.dtype.element_ty), mask=there[None, :] & (n < N)[:, None])
