"""Pages of a scheme as an engine with an allocator of its own holds them: what may be asked for, what a token takes, the op of a layer.

No engine is imported here. A page of such an engine is an equal number of bytes for each token and kv head, is shared between requests
(prefix cache), is dropped and filled again (preemption), and nothing but its bytes goes with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hal_core.errors import SettingError, ShapeError
from hal_core.kv.make import kv_op
from hal_core.kv.op import KVParams
from hal_core.kv.scheme import KVScheme, parse_pair
from hal_core.policy import Policy, current_policy

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.kv.op import KVOp
    from hal_core.selection import Selection
    from hal_core.spec import KVCacheSpec

__all__ = ["CacheRequest", "LayerPages", "rank_params"]


@dataclass(frozen=True)
class CacheRequest:
    """How keys and values are to be stored in every layer, and which kernels may serve.

    Raises:
        SettingError: a scheme that keeps tokens outside their pages.
    """

    keys: KVScheme
    values: KVScheme
    policy: Policy

    def __post_init__(self) -> None:
        if self.keys.grouped:
            found = f"{self.keys} keys share a scale over 32 tokens, and the newest wait outside the pages, which this engine cannot hold"
            raise SettingError(f"kv_cache k={self.keys},v={self.values}", found, f"use {self.keys.for_values()}, fp8 or turboquant:BITS")

    @classmethod
    def parse(cls, text: object, policy: Policy | str | None = None) -> CacheRequest:
        """From the text of a scheme or of a pair (:func:`hal_core.kv.scheme.parse_pair`).

        Raises:
            SettingError: no text, or a scheme that cannot be served here. ValueDecodeError: not a scheme. PolicyError: not a policy.
        """
        if not isinstance(text, str):
            raise SettingError(f"kv_cache {text!r:.60}", "not a text", "name a scheme, e.g. int8:token or turboquant:4")
        return cls(*parse_pair(text), current_policy(policy))

    @property
    def scaled(self) -> bool:
        """Whether static scales are needed."""
        return self.keys.scaled or self.values.scaled

    def token_bytes(self, head_dim: int, value_dim: int) -> int:
        """Bytes of a token in one kv head."""
        return int(self.keys.vector_bytes(head_dim) + self.values.vector_bytes(value_dim))

    def __str__(self) -> str:
        return str(self.keys) if self.values == self.keys.for_values() else f"k={self.keys},v={self.values}"


def rank_params(params: KVParams | None, heads: int, rank: int, ranks: int) -> KVParams | None:
    """The static scales of one rank's kv heads, of a layer with ``heads``; with fewer heads than ranks, several ranks hold one."""
    if params is None:
        return None
    count = max(1, heads // ranks)
    first = rank * heads // ranks

    def part(scale: Tensor | None) -> Tensor | None:
        return scale if scale is None or scale.numel() == 1 else scale.reshape(-1)[first : first + count]

    return replace(params, key_scale=part(params.key_scale), value_scale=part(params.value_scale))


class LayerPages:
    """One attention layer's op on the engine's page tensors ``uint8 [blocks, kv heads, tokens of a block, bytes of a token]``."""

    def __init__(self, spec: KVCacheSpec, params: KVParams | None, policy: Policy, layer: str) -> None:
        self.op: KVOp = kv_op(spec, params, policy=policy, layer=layer)
        wanted = spec.page_size * int(spec.token_bytes)
        if self.op.page_bytes != wanted or self.op.tail_bytes:
            found = f"its pages take {self.op.page_bytes} bytes and its sequences {self.op.tail_bytes} more"
            raise SettingError(f"{self.selection.kernel} for {spec}", found, f"this engine allots {wanted} bytes a page and none beside it")

    @property
    def spec(self) -> KVCacheSpec:
        return self.op.spec

    @property
    def selection(self) -> Selection:
        assert self.op.selection is not None  # kv_op selected it
        return self.op.selection

    def append(self, cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store the tokens of ``slots [T]``, which may be fewer than the rows of ``k`` and ``v``."""
        count = len(slots)
        self.op.append(self._pages(cache), k[:count], v[:count], slots)

    def attend(
        self,
        q: Tensor,
        cache: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        query_starts: Tensor,
        *,
        scale: float,
        causal: bool,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        """As :meth:`KVOp.attend_only`."""
        self.op.attend_only(
            q, self._pages(cache), block_table, lengths, query_starts, scale=scale, causal=causal, sinks=sinks, out=out
        )  # fmt: skip

    def _pages(self, cache: Tensor) -> Tensor:
        s = self.spec
        wanted = (s.num_kv_heads, s.page_size, int(s.token_bytes) // s.num_kv_heads)
        if cache.dtype != torch.uint8 or tuple(cache.shape[1:]) != wanted or not cache.is_contiguous():
            found = f"{cache.dtype} {list(cache.shape)}, strides {list(cache.stride())}"
            raise ShapeError("pages of the engine", found, f"contiguous uint8 [blocks, {', '.join(map(str, wanted))}] is needed")
        return cache.view(len(cache), -1)
