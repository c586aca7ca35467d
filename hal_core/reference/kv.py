"""The reference cache: quantizes, reads back and attends in plain torch, float32. Other kernels are measured against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal_core.dtypes import torch_dtype
from hal_core.kernel import KVEpilogue, KVKernel, KVSchemeSet
from hal_core.kv.checks import check_append, check_attend, check_materialize
from hal_core.kv.op import KVOp, KVParams
from hal_core.kv.quantizer import quantizer
from hal_core.kv.scheme import KV_GROUP
from hal_core.numerics import Numerics
from hal_core.reference.kv_attention import attention
from hal_core.reference.kv_layout import PageLayout
from hal_core.reference.schemes import OUTPUT_ROUNDING

if TYPE_CHECKING:
    from hal_core.spec import KVCacheSpec

__all__ = ["ReferenceKV", "ReferenceKVOp"]


class ReferenceKVOp(KVOp):
    """Pages of :class:`~hal_core.reference.kv_layout.PageLayout`; tails hold the open group's keys ``[32, Hkv, D]`` in the spec's dtype."""

    def __init__(self, spec: KVCacheSpec, params: KVParams) -> None:
        super().__init__()
        self.spec = spec
        self.update(params)

    def update(self, weights: KVParams) -> None:
        self.keys, self.values = (quantizer(self.spec, side, weights) for side in ("keys", "values"))
        self.params = weights
        self.layout = PageLayout(self.keys, self.values, self.spec.page_size, self.spec.num_kv_heads)

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    @property
    def tail_bytes(self) -> int:
        if not self.spec.keys.grouped:
            return 0
        return KV_GROUP * self.spec.num_kv_heads * self.spec.head_dim * torch_dtype(self.spec.dtype).itemsize

    def append(
        self, pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, tails: Tensor | None = None, tail_ids: Tensor | None = None
    ) -> None:
        check_append(self, pages, k, v, slots, tails, tail_ids)
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
        if not len(slots):
            return
        page, offset = slots // self.spec.page_size, slots % self.spec.page_size
        self.layout.write(pages, "values", self.values.quantize(v.float()), page, offset)
        if not self.tail_bytes:
            self.layout.write(pages, "keys", self.keys.quantize(k.float()), page, offset)
            return
        assert tails is not None
        assert tail_ids is not None
        owners = tail_ids[kept]
        for owner in dict.fromkeys(owners.tolist()):
            own = owners == owner
            self._append_grouped(pages, self._tail(tails, int(owner)), k[own], slots[own])

    def _append_grouped(self, pages: Tensor, tail: Tensor, k: Tensor, slots: Tensor) -> None:
        """Keys of one sequence: groups that are full now go to the pages, what is left stays in the tail."""
        held = int(slots[0]) % KV_GROUP
        k, slots = torch.cat((tail[:held], k)), torch.cat((slots[0] - torch.arange(held, 0, -1, device=slots.device), slots))
        full = len(k) // KV_GROUP * KV_GROUP
        if full:
            parts = self.keys.quantize(_in_groups(k[:full].float()))
            parts = {part.name: parts[part.name] if part.grouped else parts[part.name].flatten(0, 1) for part in self.keys.parts}
            page, offset = slots[:full] // self.spec.page_size, slots[:full] % self.spec.page_size
            self.layout.write(pages, "keys", parts, page, offset)
        tail[: len(k) - full] = k[full:]

    def _tail(self, tails: Tensor, tail_id: int) -> Tensor:
        flat = tails[tail_id].view(torch_dtype(self.spec.dtype))
        return flat.view(KV_GROUP, self.spec.num_kv_heads, self.spec.head_dim)

    def attend(
        self,
        q: Tensor,
        pages: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        query_starts: Tensor,
        *,
        scale: float | None = None,
        causal: bool = True,
        tails: Tensor | None = None,
        tail_ids: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        check_attend(self, q, pages, block_table, lengths, query_starts, tails, tail_ids, sinks, out)
        if out is None:
            out = q.new_empty(len(q), self.spec.num_heads, self.spec.v_dim)
        lse = q.new_empty(len(q), self.spec.num_heads, dtype=torch.float32)
        starts = query_starts.tolist()
        for row, length in enumerate(lengths.tolist()):
            own = slice(starts[row], starts[row + 1])
            if own.start == own.stop:
                continue
            k, v = self._read(pages, block_table[row], length, tails, None if tail_ids is None else int(tail_ids[row]), 0)
            result, denominator = attention(self.spec, q[own].float(), k, v, scale=scale, causal=causal, sinks=sinks)
            out[own], lse[own] = result.to(out.dtype), denominator
        return out, lse

    def materialize(
        self,
        pages: Tensor,
        block_row: Tensor,
        length: int,
        tails: Tensor | None = None,
        tail_id: int | None = None,
        *,
        dtype: str | None = None,
        start: int = 0,
    ) -> tuple[Tensor, Tensor]:
        check_materialize(self, pages, block_row, length, tails, tail_id, start)
        k, v = self._read(pages, block_row, length, tails, tail_id, start)
        wanted = torch_dtype(dtype or self.spec.dtype)
        return k.to(wanted), v.to(wanted)

    def _read(
        self, pages: Tensor, block_row: Tensor, length: int, tails: Tensor | None, tail_id: int | None, start: int
    ) -> tuple[Tensor, Tensor]:
        """float32 keys and values of positions ``start`` to ``length``."""
        first = start // self.spec.page_size
        row, skipped = block_row[first : -(-length // self.spec.page_size)], first * self.spec.page_size
        v = self.values.dequantize(self.layout.read(pages, "values", row))
        k = self._grouped_keys(pages, row) if self.tail_bytes else self.keys.dequantize(self.layout.read(pages, "keys", row))
        k, v = k[start - skipped : length - skipped], v[start - skipped : length - skipped]
        closed = max(length - length % KV_GROUP, start)
        if self.tail_bytes and closed < length and tails is not None and tail_id is not None:
            open_keys = self._tail(tails, tail_id)[closed % KV_GROUP : length % KV_GROUP].float()
            k = torch.cat((k[: closed - start], open_keys))
        return k, v

    def _grouped_keys(self, pages: Tensor, row: Tensor) -> Tensor:
        parts = self.layout.read(pages, "keys", row)
        parts = {part.name: parts[part.name] if part.grouped else _in_groups(parts[part.name]) for part in self.keys.parts}
        return self.keys.dequantize(parts).flatten(0, 1)

    def reopen(self, pages: Tensor, block_row: Tensor, length: int, tails: Tensor | None, tail_id: int | None) -> None:
        if not self.tail_bytes or length % KV_GROUP == 0:
            return
        check_materialize(self, pages, block_row, length, tails, tail_id)
        assert tails is not None
        assert tail_id is not None
        page, held = (length - 1) // self.spec.page_size, length % KV_GROUP
        first = (length - held) % self.spec.page_size
        keys = self._grouped_keys(pages, block_row[page : page + 1])[first : first + held]
        self._tail(tails, tail_id)[:held] = keys.to(torch_dtype(self.spec.dtype))


def _in_groups(x: Tensor) -> Tensor:
    return x.reshape(-1, KV_GROUP, *x.shape[1:])


class ReferenceKV(KVKernel):
    """Every scheme, every shape; the definition that other kernels are measured against."""

    name = "kv"
    devices = ("any",)
    isa = ()
    architectures = ()
    schemes = KVSchemeSet(keys=("*",), values=("*",), mixed=True)
    numerics = Numerics(deterministic=True)
    dtypes = ("fp32", "bf16", "fp16")
    out_dtypes = ("fp32", "bf16", "fp16")
    head_dims = ()
    epilogue = KVEpilogue(gqa=True, value_dim=True, window=True, sink_tokens=True, sinks=True, soft_cap=True)
    limits = ()
    m_range = (1, None)
    layout = "kv_rows"
    error_bound = OUTPUT_ROUNDING
    priority = 0

    def prepare(self, spec: KVCacheSpec, weights: KVParams) -> ReferenceKVOp:
        return ReferenceKVOp(spec, weights)
