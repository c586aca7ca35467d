"""Attention of queries over dequantized keys and values, in float32: the definition."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hal_core.spec import KVCacheSpec

__all__ = ["attention", "visible"]


def visible(spec: KVCacheSpec, queries: int, length: int, causal: bool, device: torch.device) -> Tensor:
    """Boolean ``[queries, length]``: which positions each of the last ``queries`` positions sees."""
    own = torch.arange(length - queries, length, device=device)[:, None]
    at = torch.arange(length, device=device)
    seen = at <= own if causal else torch.ones(queries, length, dtype=torch.bool, device=device)
    return seen if spec.window is None else seen & ((at > own - spec.window) | (at < spec.sink_tokens))


def attention(
    spec: KVCacheSpec, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, causal: bool, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Queries ``[n, Hq, D]`` at the last positions of ``k [L, Hkv, D]`` and ``v [L, Hkv, Dv]``; computes in their one float type.

    Returns:
        ``[n, Hq, Dv]`` and the log of the softmax denominator ``[n, Hq]``. A token that a query does not see cannot touch it,
        whatever it holds.
    """
    count, length, group = len(q), len(k), spec.num_heads // spec.num_kv_heads
    if length == 0:
        lse = q.new_full((count, spec.num_heads), -math.inf) if sinks is None else sinks.to(q.dtype).expand(count, -1).clone()
        return q.new_zeros(count, spec.num_heads, spec.v_dim), lse
    grouped = q.reshape(count, spec.num_kv_heads, group, spec.head_dim)
    logits = torch.einsum("nhgd,lhd->hgnl", grouped, k) * (spec.head_dim**-0.5 if scale is None else scale)
    if spec.soft_cap is not None:
        logits = spec.soft_cap * torch.tanh(logits / spec.soft_cap)
    seen = visible(spec, count, length, causal, q.device)
    logits = logits.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(logits, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(q.dtype).reshape(spec.num_kv_heads, group, 1).expand_as(lse))
    weights = torch.where(torch.isneginf(lse)[..., None], 0.0, torch.exp(logits - lse[..., None]))
    finite = torch.isfinite(v)
    out = torch.einsum("hgnl,lhd->nhgd", weights, torch.where(finite, v, 0.0))
    if not bool(finite.all()):
        # 0 times NaN is NaN: only the queries that see such a value get it.
        touched = torch.einsum("nl,lhd->nhd", seen.to(q.dtype), (~finite).to(q.dtype)) > 0
        out = torch.where(touched[:, :, None], torch.nan, out)
    return out.flatten(1, 2), lse.permute(2, 0, 1).flatten(1)
