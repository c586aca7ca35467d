"""A cache that owns its pages: sequences of one layer, appended to, attended over, forked, trimmed and freed by id."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError
from hal_core.kv.checks import as_counts, as_device, as_ids, check_id, check_whole
from hal_core.kv.decode_cache import DecodeCache
from hal_core.kv.pool import RowPool
from hal_core.kv.scales import computed_params, scales_wait
from hal_core.kv.scheme import KV_GROUP

if TYPE_CHECKING:
    from hal_core.kv.op import KVOp
    from hal_core.spec import KVCacheSpec

__all__ = ["PagedKVCache"]

#: One sequence, or several.
Ids = int | Sequence[int]


@dataclass
class _Sequence:
    """pages: rows of the pool, in order. tail: row of the tails, where the scheme has them. row: ``pages`` as int32, once it was asked for.

    A list of pages is replaced and never changed, so that the tensor made of it holds until then.
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    tail: int | None = None
    row: Tensor | None = None

    def set_pages(self, pages: list[int]) -> None:
        if pages != self.pages:
            self.pages, self.row = pages, None


class PagedKVCache:
    """Keys and values of one layer for several sequences, in pages of a KV op's layout. Make one with ``hal.kv_cache``.

    Every method either does all that it says or raises and changes nothing. Ids are never given twice. Not safe between threads.

    op: what stores and attends; it holds no tokens. One whose scales are still to be computed is copied: they are those of this cache's
        first tokens, and of no other's.
    capacity: tokens, rounded up to pages; None grows as needed. Tokens of a page count in full.
    decode_cache: bytes for dequantized prefixes (:class:`~hal_core.kv.decode_cache.DecodeCache`); 0 for none.
    check_finite: refuse keys and values that are not finite. Otherwise such a token spoils what attends to it, and nothing else.
    """

    def __init__(
        self, op: KVOp, *, capacity: int | None = None, device: torch.device | str = "cpu", decode_cache: int = 0, check_finite: bool = True
    ) -> None:
        if capacity is not None:
            check_whole("tokens of a KV cache's capacity", capacity, 1, "give at least 1, or None to grow as needed")
        check_whole("bytes of a KV decode cache", decode_cache, 0, "give 0 for none")
        self.op, self.device, self.check_finite = _own(op), as_device(device), check_finite
        page = self.spec.page_size
        self._pages = RowPool(op.page_bytes, None if capacity is None else -(-capacity // page), self.device, f"pages of {page} tokens")
        self._tails = RowPool(op.tail_bytes, None, self.device, "tails", first=1) if op.tail_bytes else None
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self.decode_cache = DecodeCache(self.spec, decode_cache) if decode_cache else None

    @property
    def spec(self) -> KVCacheSpec:
        return self.op.spec

    # Sequences

    @property
    def ids(self) -> tuple[int, ...]:
        """The sequences that there are, oldest first."""
        return tuple(self._sequences)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._get(sequence).length

    def new(self) -> int:
        """A new, empty sequence; returns its id."""
        made = _Sequence(tail=self._tails.take(1)[0] if self._tails else None)
        self._sequences[self._next] = made
        self._next += 1
        return self._next - 1

    def fork(self, sequence: int) -> int:
        """A sequence with the same tokens, sharing its pages until one of the two appends to a page; returns its id."""
        old, made = self._get(sequence), self.new()
        new = self._sequences[made]
        self._pages.share(old.pages)
        new.pages, new.length, new.row = old.pages, old.length, old.row
        if self._tails and old.tail is not None and new.tail is not None:
            self._tails.copy_row(old.tail, new.tail)
        if self.decode_cache:
            self.decode_cache.fork(sequence, made)
        return made

    def trim(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` tokens.

        Where keys are quantized in groups and the cut lies in a group that was closed, its keys stay as they were quantized, rounded to
        the spec's dtype.
        """
        old = self._get(sequence)
        if type(length) is not int or not 0 <= length <= old.length:
            raise ShapeError(f"trim of sequence {sequence}", f"length {length}", f"it has {old.length} tokens")
        if self._tails and length // KV_GROUP != old.length // KV_GROUP:
            self.op.reopen(self._pages.data, self._row(old), length, self._tails.data, old.tail)
        kept = -(-length // self.spec.page_size)
        self._pages.drop(old.pages[kept:])
        old.set_pages(old.pages[:kept])
        old.length = length
        if self.decode_cache:
            self.decode_cache.trim(sequence, length)

    def free(self, sequence: int) -> None:
        """Forget a sequence; its id is not used again."""
        old = self._get(sequence)
        self._pages.drop(old.pages)
        if self._tails and old.tail is not None:
            self._tails.drop([old.tail])
        del self._sequences[sequence]
        if self.decode_cache:
            self.decode_cache.drop(sequence)

    # Tokens

    def append(self, k: Tensor, v: Tensor, sequences: Ids, counts: Sequence[int] | None = None) -> None:
        """Add tokens to the ends of sequences.

        Args:
            k: ``[T, Hkv, D]`` in the spec's dtype, the tokens of the first sequence first.
            v: ``[T, Hkv, Dv]``, likewise.
            sequences: one id, or distinct ones.
            counts: tokens of each; None for equally many.

        Raises:
            CapacityError: no room for them.
            ShapeError: wrong shapes or dtypes, an unknown id, a number that is not finite.
        """
        ids = self._ids(sequences)
        self._check_tokens(k, v)
        counts = as_counts(counts, len(k), len(ids))
        if not sum(counts):
            return
        plan, params = self._plan(ids, counts), self.op.params
        try:
            self._settle_scales(k, v)
            slots, tail_ids = self._slots(ids, counts, plan)
            self.op.append(self._pages.data, k, v, slots, self._tails.data if self._tails else None, tail_ids)
        except BaseException:
            for pages, own in plan.values():
                self._pages.drop(pages[own:])
            if self.op.params is not params:
                self.op.update(params)
            raise
        for sequence, count in zip(ids, counts, strict=True):
            old, (pages, own) = self._sequences[sequence], plan[sequence]
            self._pages.drop(old.pages[own:])
            old.set_pages(pages)
            old.length += count

    def _plan(self, ids: Sequence[int], counts: Sequence[int]) -> dict[int, tuple[list[int], int]]:
        """For each sequence its pages after the append, and from which on they are new; the copied page's bytes are copied.

        A page that is written to and has other users is replaced by a copy.
        """
        page, needed, users = self.spec.page_size, {}, dict[int, int]()
        for sequence, count in zip(ids, counts, strict=True):
            old = self._sequences[sequence]
            own, last = len(old.pages), old.pages[-1] if old.pages else -1
            if count and old.length % page:
                users.setdefault(last, self._pages.users[last])
                if users[last] > 1:
                    users[last] -= 1
                    own -= 1
            needed[sequence] = (-(-(old.length + count) // page) - own if count else 0, own)
        taken = self._pages.take(sum(new for new, _ in needed.values()))
        plan = {}
        for sequence, (new, own) in needed.items():
            old, fresh, taken = self._sequences[sequence], taken[:new], taken[new:]
            if own < len(old.pages):
                self._pages.copy_row(old.pages[-1], fresh[0])
            plan[sequence] = ([*old.pages[:own], *fresh], own)
        return plan

    def _slots(self, ids: Sequence[int], counts: Sequence[int], plan: dict[int, tuple[list[int], int]]) -> tuple[Tensor, Tensor | None]:
        """Slots int64 and tail ids int32 of the new tokens."""
        page, slots, tails = self.spec.page_size, [], []
        for sequence, count in zip(ids, counts, strict=True):
            old = self._sequences[sequence]
            at, first = torch.arange(old.length, old.length + count), old.length // page
            # only the pages that are written to: a long sequence has thousands
            written = torch.tensor(plan[sequence][0][first:], dtype=torch.int64)
            slots.append(written[at // page - first] * page + at % page if count else at)
            tails += [old.tail or 0] * count
        tail_ids = torch.tensor(tails, dtype=torch.int32, device=self.device) if self._tails else None
        return torch.cat(slots).to(self.device), tail_ids

    def attend(
        self,
        q: Tensor,
        sequences: Ids,
        counts: Sequence[int] | None = None,
        *,
        scale: float | None = None,
        causal: bool = True,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of queries, the last positions of their sequences, over all cached tokens: see :meth:`KVOp.attend`.

        Args:
            q: ``[T, Hq, D]`` in the spec's dtype, the queries of the first sequence first.
            sequences: one id, or several; one may be given twice.
            counts: queries of each; None for equally many.
            scale: of the logits; None for ``D ** -0.5``.
            causal: a query sees positions up to its own.
            sinks: float32 ``[Hq]``, where the spec says so.
            out: receives the result.

        Returns:
            ``[T, Hq, Dv]`` and the log of the softmax denominator, float32 ``[T, Hq]``.
        """
        ids = [self._known(sequence) for sequence in as_ids(sequences)]
        rows = _rows(q)
        self._fits("queries", q, [rows, self.spec.num_heads, self.spec.head_dim])
        counts = as_counts(counts, rows, len(ids))
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        if self.decode_cache:
            return self.decode_cache.attend(self, q, ids, starts.tolist(), scale=scale, causal=causal, sinks=sinks, out=out)
        return self.attend_pages(q, ids, starts, scale=scale, causal=causal, sinks=sinks, out=out)

    def attend_pages(
        self, q: Tensor, ids: Sequence[int], starts: Tensor, *, scale: float | None, causal: bool, sinks: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The op on the pages of these sequences."""
        table, lengths = self.block_table(ids), torch.tensor([self.length(i) for i in ids], dtype=torch.int32, device=self.device)
        return self.op.attend(
            q, self._pages.data, table, lengths, starts.to(self.device), scale=scale, causal=causal, sinks=sinks, out=out,
            tails=self._tails.data if self._tails else None, tail_ids=self._tail_ids(ids),
        )  # fmt: skip

    def materialize(self, sequence: int, *, dtype: str | None = None, start: int = 0) -> tuple[Tensor, Tensor]:
        """Dequantized keys ``[n, Hkv, D]`` and values ``[n, Hkv, Dv]`` from position ``start`` on, in the spec's dtype or in ``"fp32"``."""
        old = self._get(sequence)
        if type(start) is not int:
            raise ShapeError(f"start of sequence {sequence}", f"{start!r:.80}", "give a position")
        if self.decode_cache and dtype in (None, self.spec.dtype) and start == 0:
            found = self.decode_cache.prefix(self, sequence)
            if found is not None:
                return found[0].clone(), found[1].clone()
        return self.materialize_pages(sequence, dtype=dtype, start=min(start, old.length))

    def materialize_pages(self, sequence: int, *, dtype: str | None = None, start: int = 0) -> tuple[Tensor, Tensor]:
        """The same from the pages, whatever the decode cache holds."""
        old, tails = self._get(sequence), self._tails.data if self._tails else None
        return self.op.materialize(self._pages.data, self._row(old), old.length, tails, old.tail, dtype=dtype, start=start)

    # The whole

    @property
    def pages(self) -> Tensor:
        """The page tensor, for the op's methods; another tensor after growing."""
        return self._pages.data

    @property
    def tails(self) -> Tensor | None:
        """The open groups, for the op's methods."""
        return self._tails.data if self._tails else None

    def block_table(self, ids: Sequence[int]) -> Tensor:
        """int32 ``[B, pages of the longest]``; 0 beyond a sequence's end."""
        rows = [self._row(self._get(sequence)) for sequence in as_ids(ids)]
        table = torch.zeros(len(rows), max((len(row) for row in rows), default=0), dtype=torch.int32, device=self.device)
        for index, row in enumerate(rows):
            table[index, : len(row)] = row
        return table

    @property
    def nbytes(self) -> int:
        """Bytes held: all pages, used or not, tails, and the decode cache's."""
        held = self._pages.data.nbytes + (self._tails.data.nbytes if self._tails else 0)
        return held + (self.decode_cache.nbytes if self.decode_cache else 0)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that sequences use."""
        return self._pages.used * self.op.page_bytes

    @property
    def free_tokens(self) -> int | None:
        """Tokens that fit into unused pages; None where the cache grows."""
        room = self._pages.room()
        return None if room is None else room * self.spec.page_size

    def clone(self) -> PagedKVCache:
        """The same sequences under the same ids in memory of their own; an op whose scales are settled is shared."""
        return self._copied(self.device)

    def to(self, device: torch.device | str) -> PagedKVCache:
        """This cache if it is there already, or a copy on ``device``."""
        device = as_device(device)
        return self if device == self.device else self._copied(device)

    def _copied(self, device: torch.device) -> PagedKVCache:
        other = copy.copy(self)
        other.op = _own(self.op) if device == self.device else copy.deepcopy(self.op).to(device)
        other.device, other._pages = device, self._pages.clone(device)
        other._tails = self._tails.clone(device) if self._tails else None
        other._sequences = {i: replace(old, row=None) for i, old in self._sequences.items()}
        other.decode_cache = self.decode_cache.clone(device) if self.decode_cache else None
        return other

    def __repr__(self) -> str:
        tokens = sum(old.length for old in self._sequences.values())
        return f"PagedKVCache({self.spec}; {len(self._sequences)} sequences, {tokens} tokens, {self.nbytes} bytes on {self.device})"

    # Checks

    def _get(self, sequence: int) -> _Sequence:
        return self._sequences[self._known(sequence)]

    def _known(self, sequence: int) -> int:
        check_id(sequence)
        if sequence not in self._sequences:
            was = "was freed" if sequence in range(self._next) else "is not of this cache"
            raise ShapeError(f"sequence {sequence}", was, "new() gives ids")
        return sequence

    def _ids(self, sequences: Ids) -> list[int]:
        ids = [self._known(sequence) for sequence in as_ids(sequences)]
        if len(set(ids)) != len(ids):
            raise ShapeError("sequences", f"{ids} names one twice", "append to each once")
        return ids

    def _check_tokens(self, k: object, v: object) -> None:
        rows = _rows(k)
        for name, tensor, dim in (("keys", k, self.spec.head_dim), ("values", v, self.spec.v_dim)):
            wanted = [rows, self.spec.num_kv_heads, dim]
            self._fits(name, tensor, wanted)
            if self.check_finite and isinstance(tensor, Tensor):
                _refuse_infinite(name, tensor)

    def _fits(self, name: str, tensor: object, wanted: list[int]) -> None:
        dtype = torch_dtype(self.spec.dtype)
        if not isinstance(tensor, Tensor):
            raise ShapeError(name, type(tensor).__name__, f"this cache takes {dtype} {wanted}")
        if list(tensor.shape) != wanted or tensor.dtype != dtype or tensor.device != self.device:
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise ShapeError(name, found, f"this cache takes {dtype} {wanted} on {self.device}")

    def _settle_scales(self, k: Tensor, v: Tensor) -> None:
        """The static scales of a spec that says ``computed`` are those of the first tokens that come."""
        if scales_wait(self.spec, self.op.params):
            self.op.update(computed_params(self.spec, k, v, self.op.params))

    def _row(self, old: _Sequence) -> Tensor:
        if old.row is None:
            old.row = torch.tensor(old.pages, dtype=torch.int32, device=self.device)
        return old.row

    def _tail_ids(self, ids: Sequence[int]) -> Tensor | None:
        if not self._tails:
            return None
        return torch.tensor([self._get(sequence).tail for sequence in ids], dtype=torch.int32, device=self.device)


def _rows(x: object) -> int:
    return len(x) if isinstance(x, Tensor) and x.dim() else 0


def _own(op: KVOp) -> KVOp:
    """The op itself, or a copy where it will be given scales."""
    return copy.deepcopy(op) if scales_wait(op.spec, op.params) else op


def _refuse_infinite(name: str, tensor: Tensor) -> None:
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        token, head, channel = (~finite).nonzero()[0].tolist()
        found = f"{float(tensor[token, head, channel])} at token {token}, head {head}, channel {channel}"
        raise ShapeError(name, found, "give finite numbers, or check_finite=False to let them spoil their sequence")
