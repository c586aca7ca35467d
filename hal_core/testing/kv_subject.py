"""One KV kernel with one spec: pages full of rubbish, sequences that lie in them out of order, and what is right, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hal_core.dtypes import torch_dtype
from hal_core.kv.op import KVParams
from hal_core.kv.quantizer import quantizer
from hal_core.kv.scheme import KV_GROUP
from hal_core.testing.measure import Ruler, allowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hal_core.kernel import KVKernel
    from hal_core.kv.op import KVOp
    from hal_core.spec import KVCacheSpec

__all__ = ["Call", "KVSubject"]

#: Tokens of the sequences, beside some that fill pages and groups in part.
_EXTRA = (7, 1, 3)


@dataclass(frozen=True, eq=False)
class Call:
    """Arguments of one ``attend``."""

    q: Tensor
    rows: tuple[int, ...]
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    causal: bool = True
    scale: float | None = None


class KVSubject:
    """Tokens, pages and truth. All random numbers come from ``seed``."""

    def __init__(self, kernel: KVKernel, spec: KVCacheSpec, seed: int, device: torch.device) -> None:
        self.kernel, self.spec, self.device = kernel, spec, device
        self.rng = torch.Generator().manual_seed(seed)
        page = spec.page_size
        self.lengths = (2 * page + _EXTRA[0], page + _EXTRA[1], _EXTRA[2])
        self.params = self.new_params()
        self.tokens = [self.new_tokens(length) for length in self.lengths]
        self.sinks = torch.randn(spec.num_heads, generator=self.rng).to(device) if spec.sinks else None
        counts = [-(-length // page) for length in self.lengths]
        self.num_pages = sum(counts) + 3
        order = torch.split(torch.randperm(self.num_pages, generator=self.rng), [*counts, 3])
        self.table = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)  # beyond a sequence's end nothing is read
        for row, own in enumerate(order[:-1]):
            self.table[row, : len(own)] = own.to(torch.int32)
        self.table = self.table.to(device)
        self.tail_ids = torch.tensor([3, 0, 2], dtype=torch.int32, device=device)

    @property
    def bound(self) -> float:
        return allowed(self.kernel, self.spec)

    def new_params(self) -> KVParams:
        """Static scales under which random tokens fit."""

        def scale(scheme: Any) -> Tensor | None:
            if not scheme.scaled:
                return None
            count = self.spec.num_kv_heads if scheme.granularity == "head" else 1
            return torch.rand(count, generator=self.rng) / 20 + 0.04

        return KVParams(scale(self.spec.keys), scale(self.spec.values), "calibrated")

    def new_tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values with a strong channel and some large tokens."""
        dtype, heads = torch_dtype(self.spec.dtype), self.spec.num_kv_heads
        k, v = (torch.randn(count, heads, dim, generator=self.rng) for dim in (self.spec.head_dim, self.spec.v_dim))
        k[..., 1] *= 5
        v[torch.rand(count, generator=self.rng) < 0.1] *= 4
        return k.to(dtype).to(self.device), v.to(dtype).to(self.device)

    def prepare(self) -> KVOp:
        return self.kernel.prepare(self.spec, self.params)

    def pages(self, op: KVOp) -> tuple[Tensor, Tensor | None]:
        """Pages and tails of random bytes: nothing may be read that was not written."""
        pages = torch.randint(0, 256, (self.num_pages, op.page_bytes), generator=self.rng, dtype=torch.uint8).to(self.device)
        tails = torch.randint(0, 256, (4, op.tail_bytes), generator=self.rng, dtype=torch.uint8).to(self.device) if op.tail_bytes else None
        return pages, tails

    def slots(self, row: int, start: int, end: int) -> Tensor:
        at = torch.arange(start, end, device=self.device)
        return self.table[row].long()[at // self.spec.page_size] * self.spec.page_size + at % self.spec.page_size

    def append(self, op: KVOp, pages: Tensor, tails: Tensor | None, spans: Sequence[tuple[int, int, int]]) -> None:
        """Tokens ``start`` to ``end`` of rows, all in one call."""
        k, v = (torch.cat([self.tokens[row][side][start:end] for row, start, end in spans]) for side in (0, 1))
        slots = torch.cat([self.slots(*span) for span in spans])
        owners = torch.cat([self.tail_ids[row].expand(end - start) for row, start, end in spans])
        op.append(pages, k, v, slots, tails, owners if op.tail_bytes else None)

    def fill(self, op: KVOp, pages: Tensor, tails: Tensor | None, steps: Sequence[int] = (5, 1, 40)) -> None:
        """All tokens of all rows, some of each at a time."""
        done, step = [0] * len(self.lengths), 0
        while any(at < length for at, length in zip(done, self.lengths, strict=True)):
            ends = [min(length, at + steps[step % len(steps)]) for at, length in zip(done, self.lengths, strict=True)]
            self.append(op, pages, tails, [(row, at, end) for row, (at, end) in enumerate(zip(done, ends, strict=True)) if end > at])
            done, step = ends, step + 1

    def filled(self, op: KVOp) -> tuple[Tensor, Tensor | None]:
        """Pages and tails with all tokens in them."""
        pages, tails = self.pages(op)
        self.fill(op, pages, tails)
        return pages, tails

    def calls(self) -> tuple[Call, ...]:
        """A decode of all rows, chunks of several queries, one over a whole prefix, none at all, and an empty row."""
        q, n = self.queries, self.lengths
        return (
            Call(q(3), (0, 1, 2), (1, 1, 1), n), Call(q(9), (0, 1, 2), (5, 1, 3), n, scale=0.17),
            Call(q(n[1]), (1,), (n[1],), (n[1],)), Call(q(4), (2, 0), (2, 2), (n[2], n[0] - 3), causal=False),
            Call(q(3), (1, 0, 2), (0, 2, 1), (n[1], n[0], 0)), Call(q(0), (0,), (0,), (n[0],)),
        )  # fmt: skip

    def queries(self, count: int) -> Tensor:
        q = torch.randn(count, self.spec.num_heads, self.spec.head_dim, generator=self.rng)
        return q.to(torch_dtype(self.spec.dtype)).to(self.device)

    def attend(self, op: KVOp, pages: Tensor, tails: Tensor | None, call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, table, lengths, starts, owners = self.arguments(op, call)
        return op.attend(
            q, pages, table, lengths, starts, scale=call.scale, causal=call.causal, tails=tails, tail_ids=owners,
            sinks=self.sinks, out=out,
        )  # fmt: skip

    def attend_only(self, op: KVOp, pages: Tensor, tails: Tensor | None, call: Call) -> Tensor:
        q, table, lengths, starts, owners = self.arguments(op, call)
        return op.attend_only(
            q, pages, table, lengths, starts, scale=call.scale, causal=call.causal, tails=tails, tail_ids=owners, sinks=self.sinks
        )

    def arguments(self, op: KVOp, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, block table, lengths, starts and tail ids of a call."""
        rows = torch.tensor(call.rows, device=self.device)
        lengths = torch.tensor(call.lengths, dtype=torch.int32, device=self.device)
        starts = torch.tensor([0, *call.counts], device=self.device).cumsum(0).to(torch.int32)
        return call.q, self.table[rows], lengths, starts, self.tail_ids[rows] if op.tail_bytes else None

    def read(self, op: KVOp, pages: Tensor, tails: Tensor | None, row: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        tail = int(self.tail_ids[row]) if op.tail_bytes else None
        return op.materialize(pages, self.table[row], length, tails, tail, dtype="fp32", start=start)

    def canonical(self, row: int) -> tuple[Tensor, Tensor]:
        """float32 keys and values as the canonical quantization reads them back."""
        k, v = (x.float() for x in self.tokens[row])
        keys, values = (quantizer(self.spec, side, self.params) for side in ("keys", "values"))
        v = values.dequantize(values.quantize(v))
        if not self.spec.keys.grouped:
            return keys.dequantize(keys.quantize(k)), v
        closed = len(k) // KV_GROUP * KV_GROUP
        groups = k[:closed].reshape(-1, KV_GROUP, *k.shape[1:])
        return torch.cat((keys.dequantize(keys.quantize(groups)).flatten(0, 1), k[closed:])), v

    def truth(self, call: Call, stored: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """float64 output and log of the denominator of a call over ``stored`` keys and values of each row."""
        outs, denominators = [], []
        for q, row, length in zip(torch.split(call.q, list(call.counts)), call.rows, call.lengths, strict=True):
            k, v = (x[:length].double() for x in stored[row])
            out, denominator = self._row_truth(q.double(), k, v, call)
            outs.append(out)
            denominators.append(denominator)
        return torch.cat(outs), torch.cat(denominators)

    def _row_truth(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        s, group = self.spec, self.spec.num_heads // self.spec.num_kv_heads
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q, k) * (s.head_dim**-0.5 if call.scale is None else call.scale)
        if s.soft_cap is not None:
            logits = torch.tanh(logits / s.soft_cap) * s.soft_cap
        own = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
        at = torch.arange(len(k), device=q.device)
        hidden = (at > own) & call.causal
        if s.window is not None:
            hidden = hidden | ((at <= own - s.window) & (at >= s.sink_tokens))
        logits = logits.masked_fill(hidden, -math.inf)
        extra = logits.new_full((s.num_heads, len(q), 1), -math.inf) if self.sinks is None else self.sinks.double()[:, None, None]
        denominator = torch.logsumexp(torch.cat((logits, extra.expand(-1, len(q), 1)), dim=-1), dim=-1)
        weights = torch.exp(logits - denominator[..., None]).nan_to_num(0.0)
        return torch.einsum("hqk,khd->qhd", weights, v), denominator.T

    def check(self, call: Call, found: tuple[Tensor, Tensor], stored: Sequence[tuple[Tensor, Tensor]], what: str) -> float:
        """Raise unless a result is the truth within the bound; returns the largest error."""
        from hal_core.testing.case import CheckFailedError

        out, lse = found
        truth, denominator = self.truth(call, stored)
        ruler = Ruler(truth, self.bound)
        ruler.check(out, what=what)
        # An error of a logit is one of its size times that of its operands.
        most = 20 * self.bound
        apart = (lse.double() - denominator).abs()
        wrong = ~((apart <= most) | (lse.double() == denominator))
        if lse.shape != denominator.shape or lse.dtype != torch.float32 or bool(wrong.any()):
            worst = float(apart[wrong].max()) if wrong.shape == lse.shape and bool(wrong.any()) else math.nan
            raise CheckFailedError(f"{what}: log-sum-exp {lse.dtype} {list(lse.shape)} is off by {worst:.3g}, allowed {most:.3g}")
        return ruler.largest
