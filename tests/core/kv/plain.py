"""A cache in a few lines of float64, and random tokens: what the real ones are compared with."""

from __future__ import annotations

import math

import torch

from hal_core.dtypes import torch_dtype
from hal_core.kv.scheme import KVScheme
from hal_core.spec import KVCacheSpec


def spec_of(text="bf16", **changes):
    """A small spec with the schemes of ``text``."""
    fields = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "page_size": 32, "dtype": "bf16", **changes}
    keys, values = KVScheme.pair(text)
    return KVCacheSpec(keys=keys, values=values, **fields)


def tokens(spec, count):
    """Keys and values with a channel that is larger than the others, as models have."""
    dtype = torch_dtype(spec.dtype)
    k, v = torch.randn(count, spec.num_kv_heads, spec.head_dim), torch.randn(count, spec.num_kv_heads, spec.v_dim)
    k[..., 3] *= 6
    return k.to(dtype), v.to(dtype)


def queries(spec, count):
    return (torch.randn(count, spec.num_heads, spec.head_dim) / 2).to(torch_dtype(spec.dtype))


def attention(spec, q, k, v, *, scale=None, causal=True, sinks=None):
    """Row by row and head by head, in float64: output and log-sum-exp of queries at the last positions."""
    out = torch.zeros(len(q), spec.num_heads, spec.v_dim, dtype=torch.float64)
    lse = torch.full((len(q), spec.num_heads), -math.inf, dtype=torch.float64)
    scale = spec.head_dim**-0.5 if scale is None else scale
    for row in range(len(q)):
        own = len(k) - len(q) + row
        seen = [
            at for at in range(len(k))
            if (at <= own or not causal) and (spec.window is None or at > own - spec.window or at < spec.sink_tokens)
        ]  # fmt: skip
        for head in range(spec.num_heads):
            kv = head // (spec.num_heads // spec.num_kv_heads)
            logits = k[seen, kv].double() @ q[row, head].double() * scale
            if spec.soft_cap is not None:
                logits = torch.tanh(logits / spec.soft_cap) * spec.soft_cap
            terms = logits if sinks is None else torch.cat((logits, sinks[head].double()[None]))
            if len(terms):
                lse[row, head] = torch.logsumexp(terms, 0)
                out[row, head] = torch.exp(logits - lse[row, head]) @ v[seen, kv].double()
    return out, lse


def relative(found, truth):
    """Relative L2 error."""
    return float((found.double() - truth).norm() / truth.norm())
