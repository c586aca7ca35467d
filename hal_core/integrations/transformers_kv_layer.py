"""One layer of a :class:`~hal_core.integrations.transformers_kv.KVCache`: a batch of sequences in pages, and the columns they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from hal_core.dtypes import dtype_word
from hal_core.errors import ShapeError
from hal_core.integrations.transformers_kv_attention import AttentionCall, PackedLength, mark
from hal_core.integrations.transformers_kv_conditioning import Conditioning
from hal_core.kv.make import kv_cache
from hal_core.spec import KVCacheSpec

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.kv.cache import PagedKVCache
    from hal_core.kv.op import KVParams
    from hal_core.kv.scheme import KVScheme
    from hal_core.policy import Policy
    from hal_core.selection import Selection

__all__ = ["KVCacheLayer", "LayerPlan"]


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """What is known of a layer before its first keys come."""

    index: int
    window: int | None
    keys: KVScheme
    values: KVScheme
    policy: Policy
    page_size: int
    seed: int
    scales: str
    params: KVParams | None
    condition: bool

    @property
    def name(self) -> str:
        return f"KV cache of layer {self.index}"


class KVCacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The pages of one layer. transformers counts columns of a padded batch; a sequence here holds only the tokens that may be seen.

    ``update`` takes keys and values and hands them back marked; the attention function then calls ``attend``, which stores them.
    """

    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = plan
        self.is_sliding = plan.window is not None
        self.sliding_window = plan.window
        self.spec: KVCacheSpec | None = None
        self.selection: Selection | None = None
        self._pages: PagedKVCache | None = None
        self._asked: tuple[Any, ...] = ()
        self._pending: tuple[Tensor, Tensor] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget every token; the pages stay."""
        if self._pages is not None:
            for sequence in self._sequences:
                self._pages.free(sequence)
        self._sequences: list[int] = []
        self.conditioning: Conditioning | None = None
        self._columns = 0
        self._seen: Tensor | None = None
        self._pending = None
        self.is_initialized = False

    @property
    def nbytes(self) -> int:
        """Bytes held, pages that wait for tokens included."""
        return 0 if self._pages is None else self._pages.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that hold tokens."""
        return 0 if self._pages is None else self._pages.used_bytes

    @property
    def scales(self) -> str:
        """Where static scales come from: a word of ``KV_SCALES``."""
        return self.plan.scales if self._pages is None else self._pages.op.params.source

    @property
    def tokens(self) -> int:
        """Tokens held, of all sequences; padding is not."""
        return 0 if self._pages is None else sum(self._pages.length(sequence) for sequence in self._sequences)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is laid out before the attention's own arguments are known."""

    def get_seq_length(self) -> int:
        return self._columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return PackedLength(self._columns + query_length), 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The same keys and values, marked for the attention function: ``[B, Hkv, T, D]``.

        Raises:
            ShapeError: the last ones were never attended, so the model does not use the attention function ``hal``.
        """
        self.check_attended()
        if key_states.dim() != 4 or value_states.dim() != 4 or key_states.shape[:3] != value_states.shape[:3]:
            found = f"keys {list(key_states.shape)}, values {list(value_states.shape)}"
            raise ShapeError(self.plan.name, found, "give [batch, heads, tokens, channels] of both")
        self._pending = key_states.detach(), value_states.detach()  # packed tokens carry no gradients
        return mark(key_states, self), value_states

    def check_attended(self) -> None:
        """Raise if keys were taken and no attention followed: another function would attend to a part of them."""
        if self._pending is not None:
            found = "the model attends with another function than hal, or an earlier call failed"
            raise ShapeError(self.plan.name, found, 'call model.set_attn_implementation("hal"), and reset() the cache')

    def attend(self, call: AttentionCall) -> Tensor:
        """Store what ``update`` was given, then attend: ``[B, T, Hq, Dv]``. Rows of hidden queries are zeros."""
        assert self._pending is not None  # the mark on the keys is this layer's
        (key, value), self._pending = self._pending, None
        batch, _, count, _ = key.shape
        pages = self._paged(call, key, value)
        self._check_batch(batch)
        seen = self._new_columns(call.padding, batch, count)
        rows = [count] * batch if seen is None else seen.sum(1).tolist()
        k, v, q = (_rows(x, seen) for x in (key, value, call.query.detach()))
        q = self._store(pages, k, v, q, rows, shifted=call.sinks is None and call.soft_cap is None)
        self._columns += count
        self._seen = _joined(self._seen, seen, self._columns, count, batch)
        self.is_initialized = True
        self._pending = key, value  # tokens that are stored and not attended must not be stored again
        out, _ = pages.attend(q, self._sequences, rows, scale=call.scale, sinks=call.sinks)
        self._pending = None
        if seen is None:
            return out.reshape(batch, count, *out.shape[1:])
        full = out.new_zeros(batch, count, *out.shape[1:])
        full[seen.to(out.device)] = out
        return full

    def _store(self, pages: PagedKVCache, k: Tensor, v: Tensor, q: Tensor, rows: list[int], *, shifted: bool) -> Tensor:
        """Append keys and values; returns queries as the stored keys want them. Where it raises, nothing has changed."""
        made: list[int] = []
        conditioning = self.conditioning
        try:
            if not self._sequences:
                if self.plan.condition and bool(torch.isfinite(k).all()):  # else the append says which token is not
                    conditioning = Conditioning.measured(k, q, shifted)
                made.extend(pages.new() for _ in rows)
            if conditioning is not None:
                k, q = conditioning.keys(k), conditioning.queries(q)
            pages.append(k, v, self._sequences or made, rows)
        except BaseException:
            for sequence in made:
                pages.free(sequence)
            raise
        self._sequences, self.conditioning = self._sequences or made, conditioning
        return q

    def _paged(self, call: AttentionCall, key: Tensor, value: Tensor) -> PagedKVCache:
        """The pages, made for what the first call asks; a later call must ask the same."""
        asked = (
            call.query.shape[1], key.shape[1], key.shape[3], value.shape[3], key.dtype, call.window, call.soft_cap, call.sinks is not None,
        )  # fmt: skip
        if self._pages is None:
            self.spec = self._spec(call, key, value)
            self._pages = kv_cache(self.spec, params=self.plan.params, device=key.device, policy=self.plan.policy, layer=self.plan.name)
            self.selection, self._asked = self._pages.op.selection, asked
        elif asked != self._asked:
            found = f"holds {self.spec}, a call asks for {self._spec(call, key, value)}"
            raise ShapeError(self.plan.name, found, "use one cache for one model and dtype")
        return self._pages

    def _spec(self, call: AttentionCall, key: Tensor, value: Tensor) -> KVCacheSpec:
        plan = self.plan
        if call.window != plan.window:
            found = f"window {call.window} in the call, {plan.window} by config.json"
            raise ShapeError(plan.name, found, "report this model type")
        return KVCacheSpec(
            call.query.shape[1], key.shape[1], key.shape[3], plan.page_size, plan.keys, plan.values, dtype=dtype_word(key.dtype),
            value_dim=None if value.shape[3] == key.shape[3] else value.shape[3], window=plan.window, sinks=call.sinks is not None,
            soft_cap=call.soft_cap, scales=plan.scales, seed=plan.seed,
        )  # fmt: skip

    def _check_batch(self, batch: int) -> None:
        if self._sequences and len(self._sequences) != batch:
            raise ShapeError(self.plan.name, f"holds {len(self._sequences)} sequences, a call has {batch}", "use one cache for one batch")

    def _new_columns(self, padding: Tensor | None, batch: int, count: int) -> Tensor | None:
        """Which of the new columns may be seen, bool ``[B, T]``; None for all.

        Raises:
            ShapeError: the mask is of another shape, hides or shows an earlier token otherwise than before, or has holes under a window.
        """
        if padding is None and self._seen is None:
            return None
        total = self._columns + count
        mask = self._all(batch, total) if padding is None else padding.bool()
        if mask.shape != (batch, total):
            found = f"an attention mask of shape {list(mask.shape)}"
            raise ShapeError(self.plan.name, found, f"give [{batch}, {total}]: {self._columns} columns are cached, {count} are new")
        before = self._all(batch, self._columns) if self._seen is None else self._seen
        if not torch.equal(mask[:, : self._columns].cpu(), before):
            found = "the attention mask shows or hides cached tokens otherwise than when they came"
            raise ShapeError(self.plan.name, found, "keep a token's mask for as long as it is cached")
        if self.plan.window is not None and bool((mask[:, :-1] & ~mask[:, 1:]).any()):
            found = f"hidden tokens after visible ones, under a window of {self.plan.window}"
            raise ShapeError(self.plan.name, found, "pad on the left")
        return None if self._seen is None and bool(mask.all()) else mask[:, self._columns :]

    @staticmethod
    def _all(batch: int, columns: int) -> Tensor:
        return torch.ones(batch, columns, dtype=torch.bool)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns.

        Where scales hold over groups of tokens and the cut lies in a closed group, its keys stay as they were quantized.

        Raises:
            ShapeError: a positive number, or more columns than there are.
        """
        removed = -tokens_to_remove
        if not 0 <= removed <= self._columns:
            raise ShapeError(f"crop of {self.plan.name}", f"{tokens_to_remove}", f"give a number from {-self._columns} to 0")
        self._pending = None
        if not removed or self._pages is None:
            return
        for row, sequence in enumerate(self._sequences):
            gone = removed if self._seen is None else int(self._seen[row, -removed:].sum())
            self._pages.trim(sequence, self._pages.length(sequence) - gone)
        self._columns -= removed
        self._seen = None if self._seen is None else self._seen[:, : self._columns]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self._sequences)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The batch becomes the sequences at ``indices``; one that is taken several times is forked, sharing its pages."""
        wanted = torch.arange(len(self._sequences))[indices.cpu()].tolist()
        if self._pages is None or wanted == list(range(len(self._sequences))):
            return
        old, taken, new = self._sequences, set[int](), []
        for index in wanted:
            new.append(self._pages.fork(old[index]) if index in taken else old[index])
            taken.add(index)
        for index, sequence in enumerate(old):
            if index not in taken:
                self._pages.free(sequence)
        self._sequences = new
        self._seen = None if self._seen is None else self._seen[torch.tensor(wanted)]


def _rows(x: Tensor, seen: Tensor | None) -> Tensor:
    """``[B, H, T, D]`` to the rows that may be seen, ``[n, H, D]``, a sequence's in order."""
    x = x.transpose(1, 2)
    return x.flatten(0, 1).contiguous() if seen is None else x[seen.to(x.device)]


def _joined(before: Tensor | None, new: Tensor | None, columns: int, count: int, batch: int) -> Tensor | None:
    """Which columns may be seen, after ``count`` new ones; None for all."""
    if before is None and new is None:
        return None
    before = torch.ones(batch, columns - count, dtype=torch.bool) if before is None else before
    new = torch.ones(batch, count, dtype=torch.bool) if new is None else new.cpu()
    return torch.cat((before, new), dim=1)
