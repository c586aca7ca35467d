"""The prepared op over AITER's attention, on a caller's pages. Bound against its signatures; no AMD GPU has run it.

A page holds its keys ``[Hkv, D / 8, page_size, 8]`` and then its values ``[Hkv, D, page_size]``. AITER has two caches, of keys and of
values, and one number for a block of both: seen in halves of pages, page p is block ``2 p`` of the keys, and of the values in the
memory that begins half a page later.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hal_backend_rocm.aiter_provider.attention import ATTEND, STORE, attention_refusals
from hal_backend_rocm.aiter_provider.calls import bind
from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError, UnfitWeightsError
from hal_core.kv.checks import check_append, check_attend, check_materialize
from hal_core.kv.op import KVOp, KVParams
from hal_core.triton.launch import arch_of

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.spec import KVCacheSpec

__all__ = ["AiterKVOp"]

#: Tokens of which one workgroup makes a part of a row's result.
_PART = 256
#: Tokens of a sequence, which AITER's own callers keep to.
_MOST_TOKENS = 65536
#: Elements of partial results held at a time; queries beyond that are computed after the others.
_SCRATCH = 1 << 26
#: Elements of a read of 16 bytes.
_READ = 8


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class AiterKVOp(KVOp):
    """Every query is a sequence of its own to AITER, which sees what lies before it: decoding, and prefill in chunks.

    Ranges are looked at before each call, which waits for the device; under capture of a graph what is out of range is left out instead.
    """

    def __init__(self, spec: KVCacheSpec, params: KVParams, target: str | None = None) -> None:
        super().__init__()
        reasons = attention_refusals(spec, target or arch_of(torch.device("cuda", torch.cuda.current_device())))
        if reasons:
            raise UnfitWeightsError("AITER's attention", "; ".join(reason.found for reason in reasons), reasons[0].fix)
        self.spec, self.params = spec, params
        self.store, self.run = bind(STORE), bind(ATTEND)
        self.register_buffer("one", torch.ones(1), persistent=False)

    @property
    def page_bytes(self) -> int:
        return 4 * self._half

    @property
    def tail_bytes(self) -> int:
        return 0

    @property
    def _half(self) -> int:
        """Elements of a page's keys, or values."""
        return self.spec.page_size * self.spec.num_kv_heads * self.spec.head_dim

    def caches(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[2 P, Hkv, D / 8, page_size, 8]`` and values ``[2 P - 1, Hkv, D, page_size]`` of whole pages; views of their memory."""
        s, flat = self.spec, pages.view(torch_dtype(self.spec.dtype)).view(-1)
        keys = flat.view(-1, s.num_kv_heads, s.head_dim // _READ, s.page_size, _READ)
        return keys, flat[self._half :].view(-1, s.num_kv_heads, s.head_dim, s.page_size)

    def append(
        self, pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, tails: Tensor | None = None, tail_ids: Tensor | None = None
    ) -> None:
        if not _capturing(slots):
            check_append(self, pages, k, v, slots, tails, tail_ids)
        size = self.spec.page_size
        if not len(slots) or not len(pages):
            return
        inside = (slots >= 0) & (slots < len(pages) * size)
        keys, values = self.caches(pages)
        self.store({
            "key": k.contiguous(), "value": v.contiguous(), "key_cache": keys, "value_cache": values,
            "slot_mapping": torch.where(inside, slots + slots // size * size, -1), "kv_cache_dtype": "auto",
        })  # fmt: skip

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
        if not _capturing(q):
            check_attend(self, q, pages, block_table, lengths, query_starts, tails, tail_ids, sinks, out)
        if (tokens := block_table.shape[1] * self.spec.page_size) > _MOST_TOKENS:
            raise ShapeError("block_table", f"{tokens} tokens a row", f"AITER's attention takes {_MOST_TOKENS}: give a narrower table")
        lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
        result = q.new_zeros(q.shape) if out is None or not out.is_contiguous() else out
        if len(q) and len(pages) and tokens:
            table, seen = self._rows(len(q), len(pages), block_table, lengths, query_starts, causal)
            step = max(1, _SCRATCH // (self.spec.num_heads * -(-tokens // _PART) * self.spec.head_dim))
            factor = self.spec.head_dim**-0.5 if scale is None else scale
            for start in range(0, len(q), step):
                part = slice(start, start + step)
                self._attend(q[part], pages, table[part], seen[part], factor, result[part], lse[part])
        else:
            result.zero_()
        return (result if out is None or result is out else out.copy_(result)), lse

    def _rows(
        self, count: int, pages: int, block_table: Tensor, lengths: Tensor, query_starts: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """For each query its blocks ``int32 [T, width]``, none out of range, and how many tokens it sees ``int64 [T]``."""
        at, starts = torch.arange(count, device=block_table.device), query_starts.long()
        owner = torch.searchsorted(starts[1:].contiguous(), at, right=True).clamp(max=len(lengths) - 1)
        seen = lengths.long()[owner]
        if causal:
            seen = seen - (starts[owner + 1] - 1 - at)
        seen = seen.clamp(0, block_table.shape[1] * self.spec.page_size)
        used = torch.arange(block_table.shape[1], device=block_table.device) * self.spec.page_size < seen[:, None]
        table = torch.where(used, block_table.long()[owner], 0).clamp(0, pages - 1)
        return (2 * table).to(torch.int32), seen

    def _attend(self, q: Tensor, pages: Tensor, table: Tensor, seen: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        """Some queries, into ``out`` and ``lse``. AITER's reduction reads before its buffers for a row of no tokens: it is given one."""
        tokens = table.shape[1] * self.spec.page_size
        keys, values = self.caches(pages)
        sums = q.new_empty(len(q), self.spec.num_heads, -(-tokens // _PART), dtype=torch.float32)
        largest, one = torch.empty_like(sums), self.get_buffer("one").to(q.device)
        self.run({
            "out": out, "exp_sums": sums, "max_logits": largest, "tmp_out": q.new_empty(*sums.shape, self.spec.head_dim),
            "query": q.contiguous(), "key_cache": keys, "value_cache": values, "num_kv_heads": self.spec.num_kv_heads, "scale": scale,
            "block_tables": table.contiguous(), "context_lens": seen.clamp(min=1).to(torch.int32), "block_size": self.spec.page_size,
            "max_context_len": tokens, "alibi_slopes": None, "kv_cache_dtype": "auto", "k_scale": one, "v_scale": one,
            "partition_size": _PART,
        })  # fmt: skip
        made = torch.arange(sums.shape[2], device=q.device) * _PART < seen[:, None]
        lse.copy_(torch.where(made[:, None], largest + sums.log(), -math.inf).logsumexp(-1))
        out.masked_fill_((seen == 0)[:, None, None], 0)

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
        s, kind = self.spec, torch_dtype(dtype or self.spec.dtype)
        first = start // s.page_size
        halves = pages.view(torch_dtype(s.dtype)).view(len(pages), 2, -1)[block_row[first : -(-length // s.page_size)].long()]
        k = halves[:, 0].reshape(-1, s.num_kv_heads, s.head_dim // _READ, s.page_size, _READ).permute(0, 3, 1, 2, 4)
        v = halves[:, 1].reshape(-1, s.num_kv_heads, s.head_dim, s.page_size).permute(0, 3, 1, 2)
        wanted = slice(start - first * s.page_size, length - first * s.page_size)
        k, v = (side.reshape(-1, s.num_kv_heads, s.head_dim)[wanted] for side in (k, v))
        return k.to(kind), v.to(kind)

    def update(self, weights: KVParams) -> None:
        """Nothing of these caches depends on parameters."""
        self.params = weights
