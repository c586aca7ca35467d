"""What a KV kernel prepares: append into, attend from and dequantize a **caller's** pages. Holds no tokens itself."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.errors import ShapeError, ValueDecodeError
from hal_core.ops import Op

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.spec import KVCacheSpec

__all__ = ["KVOp", "KVParams"]


@dataclass(frozen=True, eq=False)
class KVParams:
    """What a cache is prepared from besides its spec.

    key_scale, value_scale: fp8 only: float32 ``[]``, ``[1]`` or ``[Hkv]``, positive and not subnormal; a stored code times its scale is
        the number. None: 1.0.
    source: where the scales come from: ``calibrated`` (the checkpoint), ``computed`` (from tokens seen) or ``default``.
    key_channels, value_channels: channel splits only: int64 permutation ``[D]`` whose first entries are the finer channels.
    """

    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    source: str = "default"
    key_channels: Tensor | None = None
    value_channels: Tensor | None = None

    def __post_init__(self) -> None:
        from hal_core.kv.quantizer import USABLE_SCALES, usable_scales
        from hal_core.spec import KV_SCALES

        if self.source not in KV_SCALES:
            raise ValueDecodeError(f"KVParams.source {self.source!r}", "unknown", f"use one of {', '.join(KV_SCALES)}")
        for name in ("key_scale", "value_scale"):
            scale = getattr(self, name)
            if scale is not None and not (hasattr(scale, "is_meta") and scale.is_floating_point()):
                raise ShapeError(f"KVParams.{name}", f"{scale!r:.60}", "give a tensor of float32 numbers")
            if scale is not None and not scale.is_meta and not usable_scales(scale):
                raise ShapeError(f"KVParams.{name}", f"{scale.reshape(-1)[:8].tolist()}", USABLE_SCALES)


class KVOp(Op):
    """A prepared cache layout of one layer. Every method works on the caller's tensors, on their device.

    pages: contiguous ``uint8 [num_pages, page_bytes]``; a page holds K and V of ``page_size`` tokens of all kv heads.
    tails: ``uint8 [num_tails, tail_bytes]`` or None where ``tail_bytes`` is 0; row ``tail_id`` holds the keys of one
        sequence's open group. In a sequence of n tokens the last ``n % 32`` are read from the tail, the others from pages.
    slots: a token's place, ``page * page_size + offset``; the tokens of a sequence lie in its pages in order, so that
        position p is at offset ``p % page_size``. -1 skips the token.
    """

    spec: KVCacheSpec
    params: KVParams

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """Bytes of one page."""

    @property
    @abstractmethod
    def tail_bytes(self) -> int:
        """Bytes of one sequence's open group; 0 for schemes whose tokens are stored at once."""

    @abstractmethod
    def append(
        self, pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, tails: Tensor | None = None, tail_ids: Tensor | None = None
    ) -> None:
        """Store tokens.

        Args:
            pages: the caller's pages, written to.
            k: ``[T, Hkv, D]`` in the spec's dtype; the tokens of a sequence in order.
            v: ``[T, Hkv, Dv]``, likewise.
            slots: int64 ``[T]``.
            tails: the caller's tails, written to.
            tail_ids: int32 ``[T]``, the tail of each token's sequence; needed where ``tail_bytes`` is not 0.

        Raises:
            ShapeError: wrong shapes or dtypes, a slot out of range or given twice; nothing was written.
        """

    @abstractmethod
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
        """Attention of new queries over cached tokens, theirs among them.

        Args:
            q: ``[T, Hq, D]``; rows ``query_starts[b]`` to ``query_starts[b + 1]`` are the last positions of sequence b.
            pages: the caller's pages.
            block_table: int32 ``[B, max_pages]``, a sequence's pages in order; entries beyond its length are not read.
            lengths: int32 ``[B]`` cached tokens, the queries' own included.
            query_starts: int32 ``[B + 1]``, rising from 0 to T.
            scale: of the logits; None for ``D ** -0.5``.
            causal: a query sees positions up to its own; else all of its sequence. A window counts back from the query's own.
            tails: the caller's tails.
            tail_ids: int32 ``[B]``, where ``tail_bytes`` is not 0.
            sinks: float32 ``[Hq]``, exactly where the spec says ``sinks``: a logit that only the denominator sees.
            out: receives the result.

        Returns:
            ``[T, Hq, Dv]`` in q's dtype, and float32 ``[T, Hq]``: the natural log of the softmax denominator, of logits scaled,
            soft-capped and with the sink. A row that sees no token gives zeros, and -inf (or its sink's logit).

        Raises:
            ShapeError: wrong shapes or dtypes, a length beyond the table, a page out of range; nothing was written.
        """

    def attend_only(
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
    ) -> Tensor:
        """The result of :meth:`attend`, for callers that need no logarithms. A kernel to which they cost something makes none here."""
        return self.attend(
            q, pages, block_table, lengths, query_starts, scale=scale, causal=causal, tails=tails, tail_ids=tail_ids, sinks=sinks, out=out
        )[0]

    @abstractmethod
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
        """Dequantized keys ``[length - start, Hkv, D]`` and values ``[length - start, Hkv, Dv]`` of positions ``start`` to ``length``.

        Args:
            pages: the caller's pages.
            block_row: int32 ``[n_pages]``, the sequence's pages in order.
            length: tokens of the sequence.
            tails: the caller's tails.
            tail_id: the sequence's tail, where ``tail_bytes`` is not 0.
            dtype: ``fp32``, or None for the spec's.
            start: first position wanted.
        """

    def reopen(self, pages: Tensor, block_row: Tensor, length: int, tails: Tensor | None, tail_id: int | None) -> None:
        """After a sequence was cut to ``length`` inside a closed group: fill its tail with that group's dequantized keys.

        The default does nothing, which is right where ``tail_bytes`` is 0.
        """
        if self.tail_bytes:
            raise ShapeError(f"{type(self).__name__}.reopen", "has tails and does not say how to refill them", "implement reopen")

    def update(self, weights: KVParams) -> None:
        """Take other parameters, e.g. scales computed from the first tokens. Pages written before are not converted."""
        raise ShapeError(f"{type(self).__name__}.update", "cannot take other parameters", "prepare the kernel again")
