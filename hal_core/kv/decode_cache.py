"""Dequantized prefixes, kept between steps: memory for time, where attention from packed pages is not fast enough.

A prefix holds, in the spec's dtype, what ``materialize`` gives. It is extended by the tokens that came since; tokens of an open group
are still to be quantized, so they are read anew each time. ``materialize`` and ``attend`` read the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hal_core.dtypes import torch_dtype
from hal_core.kv.scheme import KV_GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hal_core.kv.cache import PagedKVCache
    from hal_core.spec import KVCacheSpec

__all__ = ["DecodeCache"]

_FIRST = 64


@dataclass
class _Prefix:
    """Buffers with room to grow; the first ``length`` tokens are as the pages say and will stay so unless trimmed."""

    keys: Tensor
    values: Tensor
    length: int = 0

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class DecodeCache:
    """Prefixes within a budget of bytes; the one used longest ago goes first. What does not fit is read from the pages.

    dequantized: tokens dequantized so far, to see that nothing is done twice.
    """

    def __init__(self, spec: KVCacheSpec, budget: int) -> None:
        self.spec, self.budget, self.dequantized = spec, budget, 0
        # In order of use, the latest last.
        self._prefixes: dict[int, _Prefix] = {}

    @property
    def nbytes(self) -> int:
        return sum(prefix.nbytes for prefix in self._prefixes.values())

    def _token_bytes(self) -> int:
        return self.spec.num_kv_heads * (self.spec.head_dim + self.spec.v_dim) * torch_dtype(self.spec.dtype).itemsize

    def prefix(self, cache: PagedKVCache, sequence: int) -> tuple[Tensor, Tensor] | None:
        """Keys ``[n, Hkv, D]`` and values of a whole sequence, views that hold until the next call; None where they do not fit."""
        length = cache.length(sequence)
        own = self._room_for(sequence, length, cache.device)
        if own is None:
            return None
        if own.length < length:
            k, v = cache.materialize_pages(sequence, start=own.length)
            self.dequantized += len(k)
            own.keys[own.length : length], own.values[own.length : length] = k, v
            own.length = length - length % KV_GROUP if self.spec.keys.grouped else length
        return own.keys[:length], own.values[:length]

    def _room_for(self, sequence: int, length: int, device: torch.device) -> _Prefix | None:
        own = self._prefixes.pop(sequence, None)
        if own is not None and len(own.keys) >= length:
            self._prefixes[sequence] = own
            return own
        each = self._token_bytes()
        if length * each > self.budget:
            return None
        room = min(max(_FIRST, 2 * length), self.budget // each)
        while self._prefixes and self.nbytes + room * each > self.budget:
            del self._prefixes[next(iter(self._prefixes))]
        dtype, heads = torch_dtype(self.spec.dtype), self.spec.num_kv_heads
        k, v = (torch.empty(room, heads, dim, dtype=dtype, device=device) for dim in (self.spec.head_dim, self.spec.v_dim))
        made = _Prefix(k, v)
        if own is not None:
            made.keys[: own.length], made.values[: own.length] = own.keys[: own.length], own.values[: own.length]
            made.length = own.length
        self._prefixes[sequence] = made
        return made

    def attend(
        self,
        cache: PagedKVCache,
        q: Tensor,
        ids: Sequence[int],
        starts: Sequence[int],
        *,
        scale: float | None,
        causal: bool,
        sinks: Tensor | None,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """As the cache's ``attend``, over prefixes in float32 where they fit and from pages where they do not."""
        from hal_core.kv.checks import check_attend
        from hal_core.reference.kv_attention import attention

        lengths = torch.tensor([cache.length(i) for i in ids], dtype=torch.int32, device=cache.device)
        marks = torch.tensor(starts, dtype=torch.int32, device=cache.device)
        tail_ids = torch.zeros_like(lengths)
        check_attend(cache.op, q, cache.pages, cache.block_table(ids), lengths, marks, cache.tails, tail_ids, sinks, out)
        out = torch.empty(len(q), self.spec.num_heads, self.spec.v_dim, dtype=q.dtype, device=q.device) if out is None else out
        lse = torch.empty(len(q), self.spec.num_heads, dtype=torch.float32, device=q.device)
        for row, sequence in enumerate(ids):
            own = slice(starts[row], starts[row + 1])
            found = self.prefix(cache, sequence)
            if found is None:
                count = torch.tensor([0, own.stop - own.start], dtype=torch.int32)
                out[own], lse[own] = cache.attend_pages(q[own], [sequence], count, scale=scale, causal=causal, sinks=sinks, out=None)
            else:
                k, v = (x.float() for x in found)
                result, lse[own] = attention(self.spec, q[own].float(), k, v, scale=scale, causal=causal, sinks=sinks)
                out[own] = result.to(out.dtype)
        return out, lse

    def trim(self, sequence: int, length: int) -> None:
        """Tokens from ``length`` on are no longer what the prefix holds."""
        own = self._prefixes.get(sequence)
        if own is not None:
            own.length = min(own.length, length - length % KV_GROUP if self.spec.keys.grouped else length)

    def fork(self, sequence: int, made: int) -> None:
        """The new sequence gets a copy of the prefix if both fit."""
        own = self._prefixes.get(sequence)
        if own is not None and self.nbytes + own.nbytes <= self.budget:
            self._prefixes[made] = _Prefix(own.keys.clone(), own.values.clone(), own.length)

    def drop(self, sequence: int) -> None:
        """Forget a prefix."""
        self._prefixes.pop(sequence, None)

    def clone(self, device: torch.device) -> DecodeCache:
        """The same prefixes in memory of their own on ``device``."""
        other = DecodeCache(self.spec, self.budget)
        for sequence, own in self._prefixes.items():
            other._prefixes[sequence] = _Prefix(own.keys.to(device, copy=True), own.values.to(device, copy=True), own.length)
        return other
