"""The ops in whole, as launches over packed tensors: linears of four-bit weights, and experts of four-bit or rescaled int8 weights."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hal_backend_xpu.layout import FLOATS, int8_rows
from hal_backend_xpu.prepack import PrepackCache
from hal_backend_xpu.session import session
from hal_backend_xpu.tuned import tuning
from hal_backend_xpu.views import NO_GATE, Block, Int4View
from hal_core.check import check, device_flag

if TYPE_CHECKING:
    from torch import Tensor

    from hal_backend_xpu.session import Session

__all__ = ["CACHE", "experts", "int8_weights", "linear"]

#: int8 weights of every op of this process.
CACHE = PrepackCache()
#: Sub-groups of a work-group, as the headers have it; work-items of kernels without products.
_SUB_GROUPS, _ITEMS, _SORTING = 4, 64, 256
#: Rows that the tallest tile reads beyond the last one.
_ROOM = 64
_LADDER = (16, 128, 1025)
#: Float32, as the kernels number it.
_FP32 = 0
_ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, eq=False)
class _Places:
    """Slots in the order in which they are multiplied. order: slot of a place. places: place of a slot, or -1. offsets: of experts."""

    places: Tensor
    order: Tensor | None
    offsets: Tensor

    @property
    def total(self) -> Tensor:
        return self.offsets[-1:]


class _Call:
    """One call of an op: its session, and scratch that lives until the queue has run."""

    def __init__(self, device: torch.device, engine: str | None) -> None:
        self.here: Session = session(device, engine)
        self.held: list[Tensor] = []

    def scratch(self, *shape: int, dtype: torch.dtype) -> Tensor:
        self.held.append(self.here.scratch(*shape, dtype=dtype))
        return self.held[-1]

    def rows(self, name: str, groups: tuple[int, int, int], items: int, *arguments: Any) -> None:
        """A kernel of rows.hpp."""
        self.here.launch(self.here.kernel("rows.hpp", name), groups, (1, 1, items), arguments)

    def gathered(
        self, x: Tensor, order: Tensor | None, top_k: int, perm: Tensor | None, weights: Tensor | None, total: Tensor | None, count: int
    ) -> tuple[Tensor, Tensor | None]:
        """Rows in the order of the places with room behind them; and, of ``weights``, what each is to be multiplied with."""
        out, kind = self.scratch(count + _ROOM, x.shape[1], dtype=x.dtype), FLOATS[x.dtype]
        scales = None if weights is None else self.scratch(count + _ROOM, dtype=torch.float32)
        self.rows("gather_rows", (1, count, 1), _ITEMS, x, kind, x.shape[1], order, top_k, perm, weights, total, count, out, kind, scales)
        return out, scales

    def quantized(
        self, x: Tensor, order: Tensor | None, top_k: int, weights: Tensor | None, total: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """The same as int8 codes and a scale for each row."""
        codes, scales = self.scratch(count + _ROOM, x.shape[1], dtype=torch.int8), self.scratch(count + _ROOM, dtype=torch.float32)
        kind = FLOATS[x.dtype]
        self.rows("quantize_rows", (1, count, 1), _ITEMS, x, kind, x.shape[1], order, top_k, weights, total, count, codes, scales)
        return codes, scales

    def grouped(self, kind: str, element: str, many: float, count: int, local: int, n: int, arguments: tuple[Any, ...]) -> None:
        """A product by tiles: ``many`` rows of an expert on average, ``count`` rows in all. kind: gated_int8, grouped_int4 ..."""
        engine = self.here.engine(element)
        rung = sum(many >= step for step in _LADDER)
        tall = (1, 2, 4, 4)[rung]
        if engine.rows == 16:
            rung, tall = min(rung, 1), min(tall, 2)
        wide = engine.sub_group * (1 if kind.startswith("gated") else 2)
        tiles = (count // (tall * engine.rows) + local) * -(-n // wide)
        header = f"grouped_{kind.partition('_')[2]}.hpp"
        defines = ("-DHAL_FP16",) if element == "fp16" else ()
        kernel = self.here.kernel(header, f"{kind}_{rung}", element, defines)
        groups = max(1, min(-(-tiles // _SUB_GROUPS), self.here.facts.units * tuning(engine).per_unit))
        self.here.launch(kernel, (1, 1, groups), (1, 1, _SUB_GROUPS * engine.sub_group), arguments)

    def row_by_row(self, x: Tensor, top_k: int, count: int, slot_expert: Tensor | None, weights: Tensor | None, gate: tuple[Any, ...],
                   up: Int4View, out: Tensor, epilogue: tuple[int, float, float]) -> None:  # fmt: skip
        """A product of few rows, each with its own weights."""
        lanes = self.here.engine("int8").sub_group
        self.here.launch(
            self.here.kernel("rows_int4.hpp", "rows_int4"), (1, count, up.n // lanes), (1, 1, _SUB_GROUPS * lanes),
            (
                x, FLOATS[x.dtype], top_k, slot_expert, weights, *gate, *up.arguments(), up.n, up.k, up.group, out, FLOATS[out.dtype],
                *epilogue,
            ),
        )  # fmt: skip


_PLAIN = (0, 0.0, float("inf"))


def linear(x: Tensor, weight: Int4View, out: Tensor, engine: str | None = None) -> Tensor:
    """``out [M, N] = x [M, K] @ w.T + bias``; ``x`` bfloat16 or float16."""
    count = x.shape[0]
    if not count:
        return out
    call = _Call(x.device, engine)
    element = _ELEMENTS[x.dtype]
    if count <= tuning(call.here.engine(element)).decode_rows:
        rows = x if weight.perm is None else call.gathered(x, None, 1, weight.perm, None, None, count)[0]
        call.row_by_row(rows, 1, count, None, None, NO_GATE, weight, out, _PLAIN)
    else:
        rows, _ = call.gathered(x, None, 1, weight.perm, None, None, count)
        offsets = torch.arange(0, count + 1, count, dtype=torch.int32, device=x.device)
        call.held.append(offsets)
        arguments = (rows, None, offsets, 1, *NO_GATE, *weight.arguments(), weight.n, weight.k, weight.group)
        call.grouped("grouped_int4", element, count, count, 1, weight.n, (*arguments, out, FLOATS[out.dtype], *_PLAIN))
    call.here.finish()
    return out


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, block: Block, out: Tensor, engine: str | None = None
) -> Tensor:
    """``out [T, H]``, or ``[T, k, H]`` unreduced; ids out of range are flagged, and on the host an error."""
    tokens, top_k = ids.shape
    if not tokens:
        return out
    call, slots = _Call(x.device, engine), tokens * top_k
    weights, flag = weights.float(), device_flag(x.device)
    mapping = None if expert_map is None else expert_map.int()
    call.held += [weights, *(() if mapping is None else (mapping,))]
    given, left = (weights, None) if block.router_on_input else (None, weights)
    shared = (ids, int(ids.dtype == torch.int64), mapping, flag, slots, block.num_experts, block.local, top_k)
    tuned = tuning(call.here.engine("int8" if block.rescaled else _ELEMENTS[x.dtype]))
    decode = slots <= (tuned.int8_slots if block.rescaled else tuned.decode_slots)
    made = None if decode or not block.rescaled else CACHE.get(block.sources, lambda: int8_weights(block))
    places = call.scratch(slots, dtype=torch.int32)
    if decode:
        slot_expert = call.scratch(slots, dtype=torch.int32)
        call.rows("slot_experts", (1, 1, -(-slots // _ITEMS)), _ITEMS, *shared, places, slot_expert)
        _raise_on_host(call)
        y = _few(call, x, top_k, slots, slot_expert, given, block)
    else:
        order, counts = call.scratch(slots, dtype=torch.int32), call.scratch(block.local, dtype=torch.int32)
        offsets = call.scratch(block.local + 1, dtype=torch.int32)
        call.rows("sort_slots", (1, 1, 1), _SORTING, *shared, counts, offsets, order, places)
        _raise_on_host(call)
        at = _Places(places, order, offsets)
        y = _int4(call, x, top_k, slots, at, given, block) if made is None else _int8(call, x, top_k, slots, at, given, block, made)
    hidden = x.shape[1]
    reduce = out.dim() == 2
    call.rows("sum_slots", (1, tokens, -(-hidden // _ITEMS)), _ITEMS, y, places, left, hidden, top_k, int(reduce), block.scaling, out,
              FLOATS[out.dtype])  # fmt: skip
    call.here.finish()
    return out


def _raise_on_host(call: _Call) -> None:
    """The host waits anyway, so that a wrong id is an error before anything is written."""
    if call.here.on_host:
        call.here.finish()
        with _CHECKING:
            check(call.here.device)


_CHECKING = threading.Lock()


def _few(call: _Call, x: Tensor, top_k: int, slots: int, slot_expert: Tensor, given: Tensor | None, block: Block) -> Tensor:
    inner = call.scratch(slots, block.up.n, dtype=torch.float32)
    y = call.scratch(slots, block.down.n, dtype=torch.float32)
    epilogue = (block.activation, block.alpha, block.limit)
    call.row_by_row(x, top_k, slots, slot_expert, given, block.gate_arguments, block.up, inner, epilogue)
    call.row_by_row(inner, 1, slots, slot_expert, None, NO_GATE, block.down, y, _PLAIN)
    return y


def _int4(call: _Call, x: Tensor, top_k: int, slots: int, at: _Places, given: Tensor | None, block: Block) -> Tensor:
    element, many = _ELEMENTS[x.dtype], slots / block.local
    rows, scales = call.gathered(x, at.order, top_k, None, given, at.total, slots)
    inner = call.scratch(slots + _ROOM, block.up.n, dtype=x.dtype)
    y = call.scratch(slots, block.down.n, dtype=torch.float32)
    up, down = block.up, block.down
    kind, epilogue = "grouped_int4" if block.gate is None else "gated_int4", (block.activation, block.alpha, block.limit)
    first = (rows, scales, at.offsets, block.local, *block.gate_arguments, *up.arguments(), up.n, up.k, up.group)
    call.grouped(kind, element, many, slots, block.local, up.n, (*first, inner, FLOATS[x.dtype], *epilogue))
    second = (inner, None, at.offsets, block.local, *NO_GATE, *down.arguments(), down.n, down.k, down.group, y, _FP32)
    call.grouped("grouped_int4", element, many, slots, block.local, down.n, (*second, *_PLAIN))
    return y


def _int8(
    call: _Call, x: Tensor, top_k: int, slots: int, at: _Places, given: Tensor | None, block: Block, made: tuple[Tensor, ...]
) -> Tensor:
    many, up, down = slots / block.local, block.up, block.down
    gate = (None, None, None) if block.gate is None else (*made[:2], block.gate.bias)
    *_, up_words, up_scales, down_words, down_scales = made
    codes, scales = call.quantized(x, at.order, top_k, given, at.total, slots)
    inner = call.scratch(slots, up.n, dtype=torch.float32)
    y = call.scratch(slots, down.n, dtype=torch.float32)
    kind = "grouped_int8" if block.gate is None else "gated_int8"
    first = (codes, scales, at.offsets, block.local, *gate, up_words, up_scales, up.bias, up.n, up.k, inner, _FP32)
    call.grouped(kind, "int8", many, slots, block.local, up.n, (*first, block.activation, block.alpha, block.limit))
    codes, scales = call.quantized(inner, None, 1, None, at.total, slots)
    second = (codes, scales, at.offsets, block.local, None, None, None, down_words, down_scales, down.bias, down.n, down.k, y, _FP32)
    call.grouped("grouped_int8", "int8", many, slots, block.local, down.n, (*second, *_PLAIN))
    return y


def int8_weights(block: Block) -> tuple[Tensor, ...]:
    """Words and scales of gate (if there is one), up and down, with one scale a row.

    Raises:
        UnfitWeightsError: a weight that this would change by more than the transform's bound.
    """
    return tuple(tensor for m in block.matrices for tensor in int8_rows(m.codes, m.scales, m.zeros, m.k, m.group))
