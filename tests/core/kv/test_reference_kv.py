"""The reference op over a caller's pages: what is stored, what attention sees, and that bad arguments change nothing."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import replace

import pytest
import torch
from core.kv.plain import attention, queries, relative, spec_of, tokens

from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError, ValueDecodeError
from hal_core.kv.op import KVParams
from hal_core.kv.quantizer import quantizer
from hal_core.kv.scheme import KV_GROUP, KV_SCHEMES
from hal_core.reference.kv import ReferenceKV
from hal_core.spec import KVCacheSpec

TEXTS = (
    "bf16", "fp32", "fp8:head", "int8", "int4", "int8:token", "turboquant:4", "k4v3", "turboquant:2.5", "turboquant:3:unbiased",
    "k=int4,v=bf16",
)  # fmt: skip


class Caller:
    """Owns pages of rubbish and one sequence in pages out of order."""

    def __init__(self, spec, count=150, params=None):
        self.spec, self.op = spec, ReferenceKV().prepare(spec, params or KVParams())
        pages = -(-count // spec.page_size)
        self.pages = torch.randint(0, 256, (pages + 3, self.op.page_bytes), dtype=torch.uint8)
        self.tails = torch.randint(0, 256, (3, self.op.tail_bytes), dtype=torch.uint8) if self.op.tail_bytes else None
        self.row = (torch.randperm(pages + 3)[:pages]).to(torch.int32)
        self.k, self.v = tokens(spec, count)
        self.length = 0

    def slots(self, start, end):
        at = torch.arange(start, end)
        return self.row.long()[at // self.spec.page_size] * self.spec.page_size + at % self.spec.page_size

    def append(self, count, **changes):
        end = self.length + count
        arguments = {
            "k": self.k[self.length : end], "v": self.v[self.length : end], "slots": self.slots(self.length, end),
            "tails": self.tails, "tail_ids": torch.full((count,), 1, dtype=torch.int32),
        } | changes  # fmt: skip
        self.op.append(self.pages, **arguments)
        self.length = end

    def attend(self, q, **changes):
        arguments = {
            "block_table": self.row[None], "lengths": torch.tensor([self.length], dtype=torch.int32), "tails": self.tails,
            "query_starts": torch.tensor([0, len(q)], dtype=torch.int32), "tail_ids": torch.tensor([1], dtype=torch.int32),
        } | changes  # fmt: skip
        return self.op.attend(q, self.pages, **arguments)

    def read(self, **more):
        return self.op.materialize(self.pages, self.row, self.length, self.tails, 1, **more)

    def digest(self):
        parts = [self.pages, *([self.tails] if self.tails is not None else [])]
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def same_vectors(a, b):
    """Equal but for the order of sums in a rotation, which moves a coordinate over the edge of its cell once in a great while."""
    apart = (a - b).abs().amax(-1) > 1e-5 * a.abs().max()
    return float(apart.float().mean()) < 0.02


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("page_size", [32, 64])
def test_what_is_read_back_is_the_canonical_quantization(text, page_size):
    caller = Caller(spec_of(text, page_size=page_size, value_dim=96))
    for count in (1, 30, 2, 40, 0, 77):
        caller.append(count)
    k, v = caller.read(dtype="fp32")
    values = quantizer(caller.spec, "values")
    assert same_vectors(v, values.dequantize(values.quantize(caller.v.float())))
    keys, wide = quantizer(caller.spec, "keys"), caller.k.float()
    if not caller.spec.keys.grouped:
        assert same_vectors(k, keys.dequantize(keys.quantize(wide)))
        return
    closed = 150 // KV_GROUP * KV_GROUP
    groups = wide[:closed].reshape(-1, KV_GROUP, 2, 64)
    assert torch.equal(k[:closed], keys.dequantize(keys.quantize(groups)).flatten(0, 1))
    assert torch.equal(k[closed:], wide[closed:])


@pytest.mark.parametrize("scheme", KV_SCHEMES, ids=str)
def test_appending_at_once_or_token_by_token_is_the_same(scheme):
    spec = KVCacheSpec(4, 2, 16, 32, scheme, scheme)
    whole, parts = Caller(spec, 70), Caller(spec, 70)
    parts.row, parts.k, parts.v = whole.row, whole.k, whole.v
    whole.append(70)
    for count in (1,) * 35 + (35,):
        parts.append(count)
    for a, b in zip(whole.read(dtype="fp32"), parts.read(dtype="fp32"), strict=True):
        assert same_vectors(a, b)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_kv_heads": 6}, {"value_dim": 32}, {"window": 20}, {"window": 7, "sink_tokens": 3}, {"soft_cap": 3.0}, {"sinks": True},
     {"window": 33, "sink_tokens": 40, "soft_cap": 5.0, "sinks": True, "head_dim": 96, "value_dim": 80, "dtype": "fp16"}],
    ids=str,
)  # fmt: skip
def test_attention_is_that_over_what_is_read_back(text, changes):
    caller = Caller(spec_of(text, **changes))
    sinks = torch.randn(6) if caller.spec.sinks else None
    for count, asked in ((3, 3), (60, 1), (1, 1), (70, 12)):
        caller.append(count)
        q = queries(caller.spec, asked)
        for causal, scale in ((True, None), (False, 0.3)):
            out, lse = caller.attend(q, sinks=sinks, causal=causal, scale=scale)
            truth, denominator = attention(caller.spec, q, *caller.read(dtype="fp32"), sinks=sinks, causal=causal, scale=scale)
            assert out.dtype == q.dtype
            assert relative(out, truth) < {"bf16": 4e-3, "fp16": 6e-4}[caller.spec.dtype]
            assert float((lse - denominator).abs().max()) < 1e-4


def test_every_feature_changes_the_result():
    plain = Caller(spec_of("bf16"))
    plain.append(150)
    q = queries(plain.spec, 5)
    first, _ = plain.attend(q)
    for changes in ({"window": 20}, {"window": 20, "sink_tokens": 5}, {"soft_cap": 0.5}, {"sinks": True}):
        other = ReferenceKV().prepare(replace(plain.spec, **changes), KVParams())
        plain.op = other
        found, _ = plain.attend(q, sinks=torch.full((6,), 3.0) if changes.get("sinks") else None)
        assert relative(found, first.double()) > 0.05
        first = found


def test_rows_of_several_lengths_and_none_at_all():
    caller = Caller(spec_of("turboquant:4", sinks=False))
    caller.append(100)
    table = torch.stack((caller.row, caller.row, caller.row.flip(0)))
    lengths, starts = torch.tensor([100, 0, 0], dtype=torch.int32), torch.tensor([0, 2, 3, 3], dtype=torch.int32)
    q = queries(caller.spec, 3)
    out = torch.full((3, 6, 64), math.nan, dtype=torch.bfloat16)
    found, lse = caller.attend(q, block_table=table, lengths=lengths, query_starts=starts, out=out, tail_ids=None)
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(out[:2], caller.attend(q[:2])[0])
    assert not bool(out[2].any())
    assert bool(torch.isneginf(lse[2]).all())
    sunk = Caller(spec_of("bf16", sinks=True))
    sinks = torch.randn(6)
    out, lse = sunk.attend(queries(sunk.spec, 1), sinks=sinks)
    assert not bool(out.any())
    assert torch.equal(lse[0], sinks)


@pytest.mark.parametrize("text", ["bf16", "fp8", "int8", "turboquant:4"])
def test_a_token_that_is_not_finite_spoils_only_what_sees_it(text):
    """Here its own sequence, from its position on; another sequence in the same pages' tensor does not change."""
    caller = Caller(spec_of(text, window=8), 64)
    caller.v[40] = math.nan
    caller.k[41, 0, 5] = math.inf
    caller.append(64)
    k, v = caller.read()
    assert bool(torch.isnan(v[40]).all())
    assert bool(torch.isfinite(v[:40]).all())
    q = queries(caller.spec, 24)  # positions 40 to 63
    out, _ = caller.attend(q)
    assert bool(torch.isnan(out[:8]).all())  # 40 to 47 see the value at 40
    if text != "int8":  # where a channel's group shares its scale with the key at 41
        assert bool(torch.isfinite(out[9:]).all())
    early = torch.tensor([40], dtype=torch.int32)
    if not caller.spec.keys.grouped:
        assert bool(torch.isfinite(caller.attend(q[:1], lengths=early)[0]).all())
    assert bool(torch.isfinite(k[:32]).all())


@pytest.mark.parametrize("text", ["int8", "int4"])
def test_a_group_that_was_closed_opens_again(text):
    caller = Caller(spec_of(text, page_size=64), 128)
    caller.append(100)
    k, _ = caller.read()
    caller.op.reopen(caller.pages, caller.row, 40, caller.tails, 1)
    caller.length = 40
    again, _ = caller.read()
    assert torch.equal(again, k[:40])
    caller.append(60)
    assert relative(caller.read()[0], caller.k[:100].double()) < 0.2


def bad_appends():
    """Changes of the arguments of an append of 5 tokens after 40, and what the error says."""
    return [
        ({"k": torch.zeros(5, 2, 63, dtype=torch.bfloat16)}, "keys.*63"), ({"v": torch.zeros(4, 2, 64, dtype=torch.bfloat16)}, "values"),
        ({"k": torch.zeros(5, 2, 64)}, "torch.float32"), ({"k": [1.0]}, "list"), ({"slots": torch.tensor([0, 1, 2, 3, 4])}, None),
        ({"slots": torch.tensor([0, 1, 2, 3, 999])}, "999"), ({"slots": torch.tensor([0, 1, 2, 3, -2])}, "-2"),
        ({"slots": torch.tensor([0, 1, 2, 3, 3])}, "slot 3 given twice"), ({"slots": torch.arange(4)}, "slots"),
        ({"slots": torch.arange(5, dtype=torch.int32)}, "int32"),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["turboquant:4", "int8"])
@pytest.mark.parametrize(("changes", "problem"), [case for case in bad_appends() if case[1]])
def test_bad_appends_change_no_byte(text, changes, problem):
    caller = Caller(spec_of(text))
    caller.append(40)
    before = caller.digest()
    with pytest.raises(ShapeError, match=problem):
        caller.append(5, **changes)
    assert caller.digest() == before


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tails": None}, "tails.*missing"), ({"tail_ids": None}, "tail_ids"), ({"tail_ids": torch.full((5,), 3, dtype=torch.int32)}, "3"),
        ({"slots": torch.tensor([5, 4, 6, 7, 8])}, "in order"), ({"slots": torch.tensor([5, 6, 8, 9, 10])}, "in order"),
        ({"tails": torch.zeros(3, 7, dtype=torch.uint8)}, "tails"),
    ],
)  # fmt: skip
def test_bad_tails_change_no_byte(changes, problem):
    caller = Caller(spec_of("int8"))
    caller.append(40)
    before = caller.digest()
    with pytest.raises(ShapeError, match=problem):
        caller.append(5, **changes)
    assert caller.digest() == before


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lengths": torch.tensor([161], dtype=torch.int32)}, "161"), ({"lengths": torch.tensor([-1], dtype=torch.int32)}, "-1"),
        ({"lengths": torch.tensor([2], dtype=torch.int32)}, "3 queries over 2 tokens"), ({"lengths": torch.tensor([2.0])}, "lengths"),
        ({"block_table": torch.full((1, 5), 99, dtype=torch.int32)}, "block_table.*99"), ({"sinks": torch.zeros(6)}, "sinks"),
        ({"block_table": torch.zeros(2, 5, dtype=torch.int32)}, "block_table"),
        ({"query_starts": torch.tensor([0, 2], dtype=torch.int32)}, "rising"),
        ({"query_starts": torch.tensor([1, 3], dtype=torch.int32)}, "rising"), ({"out": torch.zeros(3, 6, 64)}, "out"),
        ({"query_starts": torch.tensor([0, 4, 3], dtype=torch.int32)}, "query_starts"),
    ],
)  # fmt: skip
def test_bad_attends_are_told(changes, problem):
    caller = Caller(spec_of("turboquant:4"))
    caller.append(40)
    before = caller.digest()
    with pytest.raises(ShapeError, match=problem):
        caller.attend(queries(caller.spec, 3), **changes)
    with pytest.raises(ShapeError, match="queries"):
        caller.attend(queries(caller.spec, 3)[..., 1:])
    assert caller.digest() == before


def test_other_bad_arguments():
    caller = Caller(spec_of("bf16"))
    caller.append(40)
    for pages, problem in ((caller.pages[:, 1:], "pages"), (caller.pages.float(), "pages"), (caller.pages[::2], "contiguous")):
        caller.pages, kept = pages, caller.pages
        with pytest.raises(ShapeError, match=problem):
            caller.append(1)
        caller.pages = kept
    for start, length, problem in ((3, 2, "positions 3 to 2"), (0, 1000, "positions 0 to 1000"), (-1, 4, "positions -1")):
        with pytest.raises(ShapeError, match=problem):
            caller.op.materialize(caller.pages, caller.row, length, start=start)
    with pytest.raises(ShapeError, match="block_row"):
        caller.op.materialize(caller.pages, caller.row + 99, 40)
    with pytest.raises(ValueDecodeError, match="guessed"):
        KVParams(source="guessed")
    with pytest.raises(ShapeError, match="2 scales"):
        ReferenceKV().prepare(spec_of("fp8"), KVParams(torch.ones(2)))


def test_skipped_tokens_are_not_stored():
    caller = Caller(spec_of("int8"), 64)
    slots = caller.slots(0, 5)
    slots[2] = -1
    slots[3:] = caller.slots(2, 4)
    caller.append(5, slots=slots)
    caller.length = 4
    k, v = caller.read()
    assert torch.equal(k, caller.k[[0, 1, 3, 4]])
    assert relative(v, caller.v[[0, 1, 3, 4]].double()) < 0.02


@pytest.mark.parametrize("text", ["fp8", "fp8:head"])
def test_fp8_scales_reach_both_sides(text):
    heads = 2 if text == "fp8:head" else 1
    params = KVParams(torch.full((heads,), 0.05), torch.full((heads,), 0.5), "calibrated")
    caller = Caller(spec_of(text, scales="calibrated"), params=params)
    caller.append(150)
    k, v = caller.read(dtype="fp32")
    for found, stored, scale in ((k, caller.k, 0.05), (v, caller.v, 0.5)):
        wanted = (stored.float() * (1 / torch.tensor(scale))).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        assert torch.equal(found, wanted)


def test_materialized_dtypes():
    for dtype, start in itertools.product(("fp32", "bf16", "fp16"), (0, 1, 33)):
        caller = Caller(spec_of("int4", dtype=dtype), 70)
        caller.append(70)
        k, v = caller.read(start=start)
        assert k.dtype == v.dtype == torch_dtype(dtype)
        assert torch.equal(k, caller.read()[0][start:])
        assert len(v) == 70 - start
