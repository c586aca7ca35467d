"""Caches for the tests of the native KV ops: a reference and a native one that were given the same tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from hal_backend_cpu import _native
from hal_backend_cpu.kv_ops import CpuKV
from hal_core.dtypes import torch_dtype
from hal_core.kv.op import KVOp, KVParams
from hal_core.kv.scheme import parse_pair
from hal_core.reference.kv import ReferenceKVOp
from hal_core.reference.kv_attention import attention
from hal_core.spec import KVCacheSpec

KV_LEVELS = ("avx2", "avx512", "avx512vnni")
LEVELS = tuple(level for level in _native.ISA_LEVELS[: _native.ISA_LEVELS.index(_native.usable_isa()) + 1] if level in KV_LEVELS)
PAIRS = (
    "bf16", "fp16", "fp32", "fp8", "fp8:head", "int8", "int8:token", "int4", "int4:token", "turboquant:2", "turboquant:3", "turboquant:4",
    "turboquant:3:raw", "k4v2", "k=int4,v=bf16", "k=bf16,v=int4",
)  # fmt: skip
#: Relative L2 of ``attend``: rounding of the output, and of queries and weights to 11 bits or more.
BOUND = {"fp32": 2e-5, "bf16": 4e-3, "fp16": 2e-3}


def relative(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-300))


def spec_of(pair: str, *, heads: int = 8, kv: int = 2, dim: int = 64, page: int = 32, dtype: str = "bf16", **more) -> KVCacheSpec:
    keys, values = parse_pair(pair)
    return KVCacheSpec(heads, kv, dim, page, keys, values, dtype=dtype, **more)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Cache:
    """One op and its memory; ``order`` are the pages of sequence 0, then those of sequence 1, ..."""

    op: KVOp
    pages: Tensor
    tails: Tensor | None
    rows: list[Tensor]

    def append(self, sequence: int, start: int, k: Tensor, v: Tensor) -> None:
        position = torch.arange(start, start + len(k))
        size = self.op.spec.page_size
        slots = self.rows[sequence][position // size].long() * size + position % size
        self.op.append(self.pages, k, v, slots, self.tails, torch.full((len(k),), sequence, dtype=torch.int32))

    def table(self) -> Tensor:
        longest = max(len(row) for row in self.rows)
        # what lies beyond a sequence must not be looked at
        return torch.stack([torch.cat((row, torch.full((longest - len(row),), -7, dtype=torch.int32))) for row in self.rows])

    def attend(self, q: Tensor, lengths: list[int], counts: list[int], **more) -> tuple[Tensor, Tensor]:
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        ids = torch.arange(len(lengths), dtype=torch.int32)
        return self.op.attend(q, self.pages, self.table(), ints(*lengths), starts, tails=self.tails, tail_ids=ids, **more)

    def read(self, sequence: int, length: int, dtype: str = "fp32", start: int = 0) -> tuple[Tensor, Tensor]:
        return self.op.materialize(self.pages, self.rows[sequence], length, self.tails, sequence, dtype=dtype, start=start)


def truth(of: Cache, q: Tensor, lengths: list[int], counts: list[int], **more) -> tuple[Tensor, Tensor]:
    """The reference's attention over what the cache reads back, so that a code at a rounding border is the same in both."""
    given = {"scale": None, "causal": True, "sinks": None} | more
    found = []
    for sequence, (part, length) in enumerate(zip(q.split(counts), lengths, strict=True)):
        if len(part):
            found.append(attention(of.op.spec, part.float(), *of.read(sequence, length), **given))
    return torch.cat([out for out, _ in found]).to(q.dtype), torch.cat([lse for _, lse in found])


def cache(op: KVOp, lengths: list[int]) -> Cache:
    """Pages in random order, of random bytes: nothing may depend on what was never written."""
    size = op.spec.page_size
    counts = [-(-length // size) for length in lengths]
    pages = torch.randint(0, 256, (sum(counts) + 2, op.page_bytes), dtype=torch.uint8)
    tails = torch.randint(0, 256, (len(lengths), op.tail_bytes), dtype=torch.uint8) if op.tail_bytes else None
    generator = torch.Generator().manual_seed(len(pages))
    return Cache(op, pages, tails, list(torch.randperm(len(pages), generator=generator)[: sum(counts)].int().split(counts)))


def tokens(spec: KVCacheSpec, count: int) -> tuple[Tensor, Tensor]:
    """Keys with a channel that stands out and one with an offset; values with a large token."""
    k, v = torch.randn(count, spec.num_kv_heads, spec.head_dim), torch.randn(count, spec.num_kv_heads, spec.v_dim)
    k[:, :, 3] *= 6
    k[:, :, -1] += 3
    v[count // 2] *= 10
    return k.to(torch_dtype(spec.dtype)), v.to(torch_dtype(spec.dtype))


def queries(spec: KVCacheSpec, count: int) -> Tensor:
    return torch.randn(count, spec.num_heads, spec.head_dim).to(torch_dtype(spec.dtype))


def params(spec: KVCacheSpec) -> KVParams:
    """Static scales where the scheme has them, one for each head."""
    if not (spec.keys.scaled or spec.values.scaled):
        return KVParams()
    count = spec.num_kv_heads if spec.keys.granularity == "head" else 1
    return KVParams(torch.rand(count) * 0.1 + 0.02, torch.rand(count) * 0.1 + 0.05, "calibrated")


def both(
    spec: KVCacheSpec, lengths: list[int], level: str = LEVELS[-1], filled: tuple[Tensor, Tensor] | None = None
) -> tuple[Cache, Cache]:
    """The native cache and the reference's, filled by the same appends: a long one, single tokens, the rest."""
    given = params(spec)
    pair = cache(CpuKV(spec, given, level), lengths), cache(ReferenceKVOp(spec, given), lengths)
    for sequence, length in enumerate(lengths):
        k, v = tokens(spec, max(length, 2)) if filled is None else filled
        cuts = sorted({0, length // 2, min(length, length // 2 + 1), min(length, length // 2 + 2), length})
        for begin, end in itertools.pairwise(cuts):
            for each in pair:
                each.append(sequence, begin, k[begin:end], v[begin:end])
    return pair
