"""FlashInfer's attention on an NVIDIA GPU: numerics against float32, and what this backend adds to FlashInfer's own launch.

    python benchmarks/cuda_attention.py [--parts attention,numerics,interleave] [--json FILE]

``graph``: CUDA graphs; ``call``: wall time of calls one after another.
"""

from __future__ import annotations

import functools
import math

import torch
from cuda_providers import BY_NAME, DEVICE, error, graphed, record, run, walled

from hal_core.kv.op import KVParams
from hal_core.kv.scheme import KVScheme
from hal_core.spec import KVCacheSpec


def attention_reference(q, k, v):
    """float32 ``[Hq, D]`` of one query row over ``k, v [n, Hkv, D]``, and its logarithms."""
    k, v = (t.float().repeat_interleave(q.shape[0] // k.shape[1], dim=1) for t in (k, v))
    logits = torch.einsum("hd,nhd->hn", q.float(), k) * q.shape[-1] ** -0.5
    return torch.einsum("hn,nhd->hd", logits.softmax(-1), v), logits.logsumexp(-1)


class Cache:
    """A filled cache, 32 query and 8 kv heads of 128 in pages of 16, and one query row a sequence."""

    def __init__(self, kind, batch, context, params=None):
        scheme, each = KVScheme.parse(kind), -(-context // 16)
        self.op = BY_NAME["kv_flashinfer"].prepare(KVCacheSpec(32, 8, 128, 16, scheme, scheme), params or KVParams())
        self.pages = torch.empty(batch * each, self.op.page_bytes, dtype=torch.uint8, device=DEVICE)
        self.table = torch.randperm(batch * each, device=DEVICE).int().view(batch, each)
        position = torch.arange(context, device=DEVICE)
        slots = (self.table.long()[:, position // 16] * 16 + position % 16).reshape(-1)
        for part in slots.split(1 << 16):
            k, v = (torch.randn(len(part), 8, 128, device=DEVICE).bfloat16() for _ in range(2))
            self.op.append(self.pages, k, v, part)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
        self.q = torch.randn(batch, 32, 128, device=DEVICE).bfloat16()
        self.out = torch.full_like(self.q, math.nan)

    def batch(self):
        return self.table, self.lengths, self.starts

    def plan(self, graph):
        self.op.plan(len(self.pages), *self.batch(), graph=graph)
        return self.op.given.wrapper

    def attend(self):
        return self.op.attend(self.q, self.pages, *self.batch(), out=self.out)

    def attend_only(self):
        return self.op.attend_only(self.q, self.pages, *self.batch(), out=self.out)


def attention_numerics(kind):
    scaled = KVParams(torch.tensor(0.02), torch.tensor(0.03)) if kind == "fp8" else None
    c = Cache(kind, 5, 333, scaled)
    c.lengths.copy_(torch.tensor([333, 1, 0, 16, 200]))
    _, lse = c.attend()
    for b, n in enumerate(c.lengths.tolist()):
        if not n:
            record("attention_numerics", kind=kind, n=0, zero=bool((c.out[b] == 0).all()), lse=str(lse[b, 0].item()))
            continue
        wanted, sums = attention_reference(c.q[b], *c.op.materialize(c.pages, c.table[b], n, dtype="fp32"))
        record("attention_numerics", kind=kind, n=n, error=error(c.out[b], wanted), lse_error=float((lse[b] - sums).abs().max()))
    lengths, starts = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in ([333, 50], [0, 40, 43]))
    q = torch.randn(43, 32, 128, device=DEVICE).bfloat16()
    out, lse = c.op.attend(q, c.pages, c.table[:2], lengths, starts)
    for b, row, last in ((0, 0, 40), (0, 39, 40), (1, 40, 43), (1, 42, 43)):
        n = int(lengths[b])
        k, v = c.op.materialize(c.pages, c.table[b], n, dtype="fp32")
        seen = n - (last - 1 - row)
        wanted, sums = attention_reference(q[row], k[:seen], v[:seen])
        far = float((lse[row] - sums).abs().max())
        record("attention_numerics", kind=kind, prefill_row=row, error=error(out[row], wanted), lse_error=far)


def attention_of(kind, batch, context):
    c = Cache(kind, batch, context)
    bare = functools.partial(c.plan(graph=False).run, c.q, c.op.cache(c.pages), k_scale=1.0, v_scale=1.0, out=c.out)
    calls = {"bare": bare, "bare_lse": functools.partial(bare, return_lse=True), "only": c.attend_only, "attend": c.attend}
    found = {f"{name}_call_us": walled(call) for name, call in calls.items()}
    c.op.forget()
    found["unplanned_call_us"] = walled(c.attend, 50)
    bare = functools.partial(c.plan(graph=True).run, c.q, c.op.cache(c.pages), k_scale=1.0, v_scale=1.0, out=c.out)
    calls = {"bare": bare, "bare_lse": functools.partial(bare, return_lse=True), "only": c.attend_only, "attend": c.attend}
    found |= {f"{name}_graph_us": graphed([call] * 4, 10) for name, call in calls.items()}
    moved = 2 * batch * context * c.op.width * c.op.elements.itemsize
    record("attention", kind=kind, batch=batch, context=context, **found, gb_s=moved / found["only_graph_us"] / 1e3)


def attention():
    for kind in ("bf16", "fp8"):
        for batch, context in ((64, 4096), (1, 32768), (1, 128)):
            attention_of(kind, batch, context)


def numerics():
    for kind in ("bf16", "fp8"):
        attention_numerics(kind)


def interleave():
    """FlashInfer's own interleave of scales, which needs a GPU, beside this backend's."""
    import flashinfer
    from hal_backend_cuda.providers.flashinfer.moe_layouts import interleaved

    for n, g, dtype in ((128, 4, torch.uint8), (256, 12, torch.uint8), (384, 64, torch.bfloat16)):
        scales = torch.randint(0, 100, (2, n, g), device=DEVICE).to(dtype)
        theirs = flashinfer.block_scale_interleave(scales)
        record("interleave", n=n, g=g, dtype=str(dtype), equal=torch.equal(theirs.reshape(-1), interleaved(scales).reshape(-1)))


PARTS = {"attention": attention, "numerics": numerics, "interleave": interleave}

if __name__ == "__main__":
    run(__doc__, PARTS, "numerics,attention")
