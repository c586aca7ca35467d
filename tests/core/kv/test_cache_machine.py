"""Random lives of a cache: appends, forks, trims, clones, moves and attends, against plain float32 tensors for each sequence."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
import torch
from core.kv.plain import attention, queries, relative, spec_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule, run_state_machine_as_test

import hal_core as hal
from hal_core.errors import CapacityError, ShapeError
from hal_core.kv.cache import PagedKVCache
from hal_core.kv.op import KVParams
from hal_core.kv.quantizer import quantizer
from hal_core.kv.scheme import KV_GROUP
from hal_core.reference.kv import ReferenceKV

CAPACITY = 12 * 32
NATIVE = ("fp32", "fp8", "k=int8,v=int8:token", "k=int4,v=turboquant:3")
WORDS = ("fp32", "bf16", "fp8", "int8", "int4", "int8:token", "turboquant:4", "k=int4,v=turboquant:2.5", "turboquant:2:unbiased")


class Plain:
    """One sequence as the cache should read it back: every token quantized alone, keys of a closed group together."""

    def __init__(self, spec, k=None, v=None):
        self.keys, self.values = quantizer(spec, "keys"), quantizer(spec, "values")
        self.grouped = spec.keys.grouped
        self.k = torch.zeros(0, spec.num_kv_heads, spec.head_dim) if k is None else k
        self.v = torch.zeros(0, spec.num_kv_heads, spec.v_dim) if v is None else v

    def copy(self, spec):
        return Plain(spec, self.k.clone(), self.v.clone())

    def append(self, k, v):
        old = len(self.k)
        self.v = torch.cat((self.v, self.values.dequantize(self.values.quantize(v))))
        if not self.grouped:
            self.k = torch.cat((self.k, self.keys.dequantize(self.keys.quantize(k))))
            return
        self.k = torch.cat((self.k, k))
        for start in range(old // KV_GROUP * KV_GROUP, len(self.k) - KV_GROUP + 1, KV_GROUP):
            group = self.k[start : start + KV_GROUP]
            self.k[start : start + KV_GROUP] = self.keys.dequantize(self.keys.quantize(group))

    def trim(self, length):
        self.k, self.v = self.k[:length], self.v[:length]


def digest(cache, sequence):
    """Of what a sequence reads: the rows of its tokens, whatever lies behind its end in the last page."""
    k, v = cache.materialize_pages(sequence, dtype="fp32")
    return hashlib.sha256(k.numpy().tobytes() + v.numpy().tobytes()).hexdigest()


class Life(RuleBasedStateMachine):
    """One cache and what each of its sequences should hold."""

    text, budget, dim, value_dim = "bf16", 0, 16, 32
    sequences = Bundle("sequences")

    @initialize(window=st.sampled_from((None, 9)), sink=st.sampled_from((0, 3)), seed=st.integers(0, 1 << 30))
    def start(self, window, sink, seed):
        torch.manual_seed(seed)
        shapes = {"num_heads": 4, "head_dim": self.dim, "value_dim": self.value_dim, "dtype": "fp32"}
        self.spec = spec_of(self.text, window=window, sink_tokens=sink if window else 0, **shapes)
        self.cache = PagedKVCache(self.prepared(), capacity=CAPACITY, decode_cache=self.budget)
        self.plain, self.left = {}, []

    def prepared(self):
        return ReferenceKV().prepare(self.spec, KVParams())

    def tokens(self, count):
        return torch.randn(count, 2, self.dim), torch.randn(count, 2, self.value_dim)

    def others(self, *touched):
        return {sequence: digest(self.cache, sequence) for sequence in self.plain if sequence not in touched}

    @rule(target=sequences)
    def new(self):
        sequence = self.cache.new()
        self.plain[sequence] = Plain(self.spec)
        return sequence

    @rule(sequence=sequences, count=st.one_of(st.integers(0, 5), st.integers(0, 80)))
    def append(self, sequence, count):
        self.append_to([sequence], [count])

    @rule(chosen=st.lists(sequences, min_size=1, max_size=3, unique=True), count=st.integers(1, 40), step=st.integers(0, 3))
    def append_several(self, chosen, count, step):
        self.append_to(chosen, [count + step * index for index in range(len(chosen))])

    def append_to(self, chosen, counts):
        k, v = self.tokens(sum(counts))
        before, room = self.others(), self.cache.free_tokens
        try:
            self.cache.append(k, v, chosen, counts)
        except CapacityError:
            assert self.cache.free_tokens == room
            assert sum(counts) > room - 2 * 32 * len(chosen)
            assert self.others() == before
            return
        for sequence, own_k, own_v in zip(chosen, k.split(counts), v.split(counts), strict=True):
            self.plain[sequence].append(own_k, own_v)
            self.check(sequence)
        assert self.others(*chosen) == {s: old for s, old in before.items() if s not in chosen}

    def check(self, sequence, start=0):
        """What is read back, through the decode cache if there is one, is what was stored."""
        plain = self.plain[sequence]
        for found, wanted in zip(self.cache.materialize(sequence, start=start), (plain.k, plain.v), strict=True):
            assert found.shape == wanted[start:].shape
            if found.numel():
                apart = (found - wanted[start:]).abs().amax(-1) > 1e-5 * wanted.abs().max()
                # The order of sums in a rotation may move a coordinate into the next cell, once in very many.
                assert int(apart.sum()) <= ("turboquant" in self.text)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        room = self.cache.free_tokens
        made = self.cache.fork(sequence)
        assert self.cache.free_tokens == room
        self.plain[made] = self.plain[sequence].copy(self.spec)
        self.check(made)
        return made

    @rule(target=sequences, sequence=sequences, count=st.integers(1, 3))
    def branch(self, sequence, count):
        """A beam: the fork goes on, then the other one does."""
        made = self.fork(sequence)
        self.append_to([made], [count])
        self.append_to([sequence], [count])
        self.check(made)
        return made

    @rule(sequence=sequences, back=st.integers(1, 40), count=st.integers(1, 40))
    def write_anew(self, sequence, back, count):
        """A draft that was rejected: the last tokens are read, cut off, and others come in their place."""
        self.check(sequence)
        length = max(0, self.cache.length(sequence) - back)
        self.cache.trim(sequence, length)
        self.plain[sequence].trim(length)
        self.append_to([sequence], [count])

    @rule(sequence=sequences, part=st.floats(0, 1))
    def trim(self, sequence, part):
        before = self.others(sequence)
        length = round(part * self.cache.length(sequence))
        self.cache.trim(sequence, length)
        self.plain[sequence].trim(length)
        self.check(sequence)
        assert self.others(sequence) == before

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        before = self.others(sequence)
        self.cache.free(sequence)
        del self.plain[sequence]
        assert self.others() == before
        with pytest.raises(ShapeError, match="was freed"):
            self.cache.append(*self.tokens(1), sequence)

    @rule()
    def clone_and_go_on(self):
        """The old cache is left behind, and must never change again."""
        self.left = [*self.left[-2:], (self.cache, {sequence: digest(self.cache, sequence) for sequence in self.plain})]
        self.cache = self.cache.clone()
        for sequence in self.plain:
            self.check(sequence)

    @rule()
    def move(self):
        """To the device without memory: everything but the numbers arrives, and nothing that is done there is seen here."""
        before, room, here = self.others(), self.cache.free_tokens, self.cache
        there = here.to("meta")
        held = [there.pages, *([] if there.tails is None else [there.tails]), *there.op.buffers(), there.block_table(there.ids)]
        assert {x.device.type for x in held} == {there.device.type} == {"meta"}
        for name in ("ids", "nbytes", "used_bytes", "free_tokens"):
            assert getattr(there, name) == getattr(here, name)
        assert (there.pages.shape, there.pages.dtype) == (here.pages.shape, here.pages.dtype)
        assert [there.length(sequence) for sequence in there.ids] == [here.length(sequence) for sequence in here.ids]
        for sequence in there.ids:
            there.free(sequence)
        assert (there.used_bytes, there.free_tokens) == (0, CAPACITY)
        assert here.to("cpu") is here
        assert (self.others(), here.free_tokens) == (before, room)

    @rule(sequence=sequences, wrong=st.sampled_from(("nan", "dim", "dtype", "heads")))
    def append_badly(self, sequence, wrong):
        before = self.others()
        k, v = self.tokens(3)
        k = {"nan": k / 0 * 0, "dim": k[..., 1:], "dtype": k.half(), "heads": k[:, :1]}[wrong]
        with pytest.raises(ShapeError):
            self.cache.append(k, v, sequence)
        assert self.others() == before

    @rule(chosen=st.lists(sequences, min_size=1, max_size=3), count=st.integers(1, 4), causal=st.booleans())
    def attend(self, chosen, count, causal):
        chosen = [s for s in chosen if self.cache.length(s) == 0 or self.cache.length(s) >= count]
        q = queries(self.spec, count * len(chosen))
        if not chosen:
            return
        out, lse = self.cache.attend(q, chosen, causal=causal)
        for row, sequence in enumerate(chosen):
            own, plain = slice(row * count, (row + 1) * count), self.plain[sequence]
            if not len(plain.k):
                assert not bool(out[own].any())
                continue
            truth, denominator = attention(self.spec, q[own], plain.k, plain.v, causal=causal)
            assert relative(out[own], truth) < 0.02
            assert float((lse[own] - denominator).abs().max()) < 0.05

    @rule(sequence=sequences, part=st.floats(0, 1))
    def materialize(self, sequence, part):
        self.check(sequence, round(part * self.cache.length(sequence)))

    @invariant()
    def pages_are_counted(self):
        if not hasattr(self, "cache"):
            return
        users = Counter(page for sequence in self.plain for page in self.cache._get(sequence).pages)
        assert {row: count for row, count in enumerate(self.cache._pages.users) if count} == dict(users)
        assert self.cache.free_tokens == CAPACITY - 32 * len(users)
        for sequence, plain in self.plain.items():
            assert self.cache.length(sequence) == len(plain.k)
        if self.cache.decode_cache:
            assert self.cache.decode_cache.nbytes <= self.budget

    def teardown(self):
        for cache, digests in getattr(self, "left", []):
            assert {sequence: digest(cache, sequence) for sequence in digests} == digests


#: Lives of each scheme: some at every change, many before a release.
EXAMPLES = (8, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]))


def live(life, examples):
    checks = (HealthCheck.too_slow, HealthCheck.filter_too_much)
    run_state_machine_as_test(
        life, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=checks)
    )


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("budget", [0, 40_000])
@pytest.mark.parametrize("text", WORDS)
def test_any_life(text, budget, examples):
    live(type("Life", (Life,), {"text": text, "budget": budget}), examples)


class NativeLife(Life):
    """The same over the pages of the CPU kernels."""

    dim, value_dim = 64, 96

    def prepared(self):
        params = KVParams(torch.ones(1), torch.ones(1), "calibrated") if self.spec.keys.scaled else KVParams()
        return hal.kv_op(self.spec, params, policy="require:cpu")


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("text", NATIVE)
def test_any_life_over_native_pages(text, examples):
    pytest.importorskip("hal_backend_cpu", reason="the hal-backend-cpu wheel is not installed")
    live(type("Life", (NativeLife,), {"text": text}), examples)
