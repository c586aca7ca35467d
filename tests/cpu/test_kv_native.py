"""The native cache against the reference: what is stored, what is read back, what attention gives."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import zlib
from dataclasses import replace

import pytest
import torch
from cpu.kv_cases import BOUND, LEVELS, PAIRS, Cache, both, cache, queries, relative, spec_of, tokens, truth
from torch import Tensor

from hal_backend_cpu import kv_kernels
from hal_backend_cpu.kv_ops import CpuKV
from hal_core.kv.codebook import midpoints
from hal_core.kv.make import kv_cache
from hal_core.kv.op import KVParams
from hal_core.kv.rotation import rotation_matrix
from hal_core.kv.turboquant import TurboQuantizer
from hal_core.reference.kv_attention import attention
from hal_core.spec import KVCacheSpec

DIMS = [(64, 64), (80, 80), (96, 64), (128, 128), (192, 128), (256, 256)]


def some(of: list, count: int, *words: str) -> list:
    """A few of a list, others for other words: together the tests see all."""
    first = zlib.crc32("".join(words).encode()) % len(of)
    return [of[(first + i) % len(of)] for i in range(count)]


def close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], dtype: str) -> None:
    assert relative(found[0].float(), wanted[0].float()) <= BOUND[dtype]
    rtol, atol = (1e-5, 2e-4) if dtype == "fp32" else (1e-3, 1e-2)
    torch.testing.assert_close(found[1], wanted[1], rtol=rtol, atol=atol)


def unsure(spec: KVCacheSpec, side: str, x: Tensor) -> Tensor:
    """Vectors with a rotated coordinate so near a midpoint that the order of a sum decides its code: ``[T, Hkv]``."""
    scheme, dim = (spec.keys, spec.head_dim) if side == "keys" else (spec.values, spec.v_dim)
    if scheme.kind != "turboquant":
        return torch.zeros(x.shape[:2], dtype=torch.bool)
    rotation = rotation_matrix(dim, TurboQuantizer(scheme, dim, 0, side).seeds[0]).double()
    rotated = x.double() / x.double().norm(dim=-1, keepdim=True) @ rotation.T
    return ((rotated[..., None] - midpoints(int(scheme.bits), dim).double()).abs() < 1e-6).any(-1).any(-1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pair", PAIRS)
def test_codes_are_the_references(pair, level):
    """Bit for bit, but for the sums of a rotation, whose order differs in the last place."""
    for dim, value_dim in some(DIMS, 3, pair, level):
        spec = spec_of(pair, dim=dim, value_dim=value_dim, dtype="fp32")
        filled = tokens(spec, 75)
        native, reference = both(spec, [75], level, filled)
        for side, x, found, wanted in zip(("keys", "values"), filled, native.read(0, 75), reference.read(0, 75), strict=True):
            if getattr(spec, side).kind != "turboquant":
                assert torch.equal(found, wanted)
                continue
            error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            # a code apart moves a vector by a hundredth and more
            assert not bool(((error > 2e-6) & ~unsure(spec, side, x)).any())
            assert float(error.median()) < 1e-6


def test_a_code_apart_is_one_at_a_midpoint():
    spec = spec_of("turboquant:4", dim=128, dtype="fp32")
    k, v = tokens(spec, 512)
    pair = cache(CpuKV(spec, KVParams(), LEVELS[-1]), [512]), both(spec, [1])[1]
    reference = cache(pair[1].op, [512])
    pair[0].append(0, 0, k, v)
    reference.append(0, 0, k, v)
    for side, x, found, wanted in zip(("keys", "values"), (k, v), pair[0].read(0, 512), reference.read(0, 512), strict=True):
        apart = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1) > 2e-6
        assert not bool((apart & ~unsure(spec, side, x)).any())


@pytest.mark.parametrize("pair", PAIRS)
def test_bytes_of_a_page_are_those_of_its_vectors(pair):
    for dim, value_dim in (*DIMS, (80, 64), (128, 80)):
        spec = spec_of(pair, dim=dim, value_dim=value_dim)
        assert CpuKV(spec, KVParams(), LEVELS[0]).page_bytes == spec.token_bytes * spec.page_size


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pair", PAIRS)
def test_attention_is_the_references(pair, level):
    shapes = [(*dims, *heads) for dims, heads in zip(DIMS, ((8, 2), (4, 4), (6, 2), (7, 1), (16, 2), (9, 3)), strict=True)]
    for (dim, value_dim, heads, kv), dtype in zip(some(shapes, 3, pair, level), ("fp32", "bf16", "fp16"), strict=True):
        spec = spec_of(pair, dim=dim, value_dim=value_dim, heads=heads, kv=kv, dtype=dtype)
        native, _ = both(spec, [70, 1, 33], level)
        q = queries(spec, 21)
        counts = [15, 1, 5]
        close(native.attend(q, [70, 1, 33], counts), truth(native, q, [70, 1, 33], counts), dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dim", "value_dim"), [(80, 80), (80, 64), (16, 48), (208, 240)])
def test_three_bits_of_an_odd_number_of_groups(dim, value_dim, level):
    """Their last line of third bits is half as long, and the next plane, tile or scale begins right behind it."""
    for dtype in ("fp32", "bf16"):
        spec = spec_of("turboquant:3", dim=dim, value_dim=value_dim, heads=6, page=16, dtype=dtype)
        native, reference = both(spec, [75, 20], level)
        assert native.op.page_bytes == spec.token_bytes * spec.page_size
        for found, wanted in zip(native.read(0, 75), reference.read(0, 75), strict=True):
            error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            assert int((error > 2e-6).sum()) <= 1
        # one row, as many as one pass over the codes serves, and enough that tiles are decoded first
        for counts in ([1, 1], [13, 2]):
            q = queries(spec, sum(counts))
            close(native.attend(q, [75, 20], counts), truth(native, q, [75, 20], counts), dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pair", ["bf16", "int8", "int4:token", "turboquant:3"])
def test_long_sequences(pair, level):
    """Over several splits, by one row on several threads, and by many rows."""
    for dtype in ("fp32", "bf16"):
        spec = spec_of(pair, dtype=dtype, page=64, heads=4)
        native, _ = both(spec, [3001], level)
        for count in (1, 40):
            q = queries(spec, count)
            close(native.attend(q, [3001], [count]), truth(native, q, [3001], [count]), dtype)


@pytest.mark.parametrize("pair", ["bf16", "int8", "int4:token", "turboquant:4"])
@pytest.mark.parametrize(
    ("more", "causal"),
    [
        ({"window": 17}, True),
        ({"window": 40, "sink_tokens": 3}, True),
        ({"window": 9, "sink_tokens": 20}, False),
        ({"soft_cap": 5.0}, True),
        ({"sinks": True}, False),
        ({"window": 1000, "sink_tokens": 4, "soft_cap": 30.0, "sinks": True}, True),
    ],
)
def test_windows_sinks_and_caps(pair, more, causal):
    spec = spec_of(pair, dtype="fp32", **more)
    native, _ = both(spec, [1500, 40])
    q, sinks = queries(spec, 27), torch.randn(8) * 2 if spec.sinks else None
    given = {"causal": causal, "sinks": sinks, "scale": 0.2}
    close(native.attend(q, [1500, 40], [25, 2], **given), truth(native, q, [1500, 40], [25, 2], **given), "fp32")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cap", [1e-3, 0.1, 1.0, 5.0, 30.0, 100.0, 1e3, 1e4, 1e6, 1e8])
def test_caps_of_any_size(cap, level):
    """Small against the logits, where tanh is flat, and large, where it is nearly the logit itself."""
    for pair, dtype in (("bf16", "fp32"), ("int8:token", "bf16"), ("int4", "fp32")):
        spec = spec_of(pair, dtype=dtype, soft_cap=cap)
        native, _ = both(spec, [70], level)
        q = queries(spec, 9)
        for scale in (0.02, 1.0):
            close(native.attend(q, [70], [9], scale=scale), truth(native, q, [70], [9], scale=scale), dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cap", [1e8, 3e38])
def test_a_cap_far_above_the_logits_changes_nothing(cap, level):
    spec = spec_of("int8:token", dtype="fp32")
    plain, _ = both(spec, [70], level)
    capped = Cache(CpuKV(replace(spec, soft_cap=cap), plain.op.params, level), plain.pages, plain.tails, plain.rows)
    q = queries(spec, 9)
    assert all(map(torch.equal, capped.attend(q, [70], [9]), plain.attend(q, [70], [9])))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("pair", ["bf16", "int8:token", "int4:token", "turboquant:3"])
def test_a_row_depends_on_its_cache_alone(pair, dtype):
    """The same bits alone or among others, in a chunk or as a decode step, on one thread or two."""
    spec = spec_of(pair, dtype=dtype, page=16, heads=6)
    native, _ = both(spec, [1300, 90])
    q = queries(spec, 40)
    out, lse = native.attend(q, [1300, 90], [30, 10])
    one = [native.attend(q[i : i + 1], [1271 + i, 90], [1, 0]) for i in (0, 13, 29)]
    for i, (alone, denominator) in zip((0, 13, 29), one, strict=True):
        assert torch.equal(alone[0], out[i])
        assert torch.equal(denominator[0], lse[i])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        again = native.attend(q, [1300, 90], [30, 10])
        alone = native.attend(q[:1], [1271, 90], [1, 0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)
    assert torch.equal(alone[0], one[0][0])


@pytest.mark.parametrize("pair", ["int8", "turboquant:4"])
def test_many_sequences(pair):
    """Enough of them that a task takes several heads: the same bits as one alone."""
    lengths = [int(n) for n in torch.randint(1, 1500, (12,))]
    spec = spec_of(pair, heads=8, kv=4)
    native, _ = both(spec, lengths)
    q, counts = queries(spec, 12), [1] * 12
    found = native.attend(q, lengths, counts)
    close(found, truth(native, q, lengths, counts), "bf16")
    for i in (0, 5, 11):
        alone = [0] * 12
        alone[i] = 1
        assert torch.equal(native.attend(q[i : i + 1], lengths, alone)[0][0], found[0][i])


@pytest.mark.skipif("avx512vnni" not in LEVELS, reason="this processor lacks AVX512 VNNI")
def test_levels_with_the_same_lanes_give_the_same_bits():
    for pair in PAIRS:
        spec = spec_of(pair, dim=96)
        given = both(spec, [300], "avx512")[0]
        other = Cache(CpuKV(spec, given.op.params, "avx512vnni"), given.pages, given.tails, given.rows)
        q = queries(spec, 9)
        assert all(map(torch.equal, given.attend(q, [300], [9]), other.attend(q, [300], [9])))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pair", ["int8:token", "int8", "int4", "int4:token"])
def test_channels_of_the_query_that_stand_out_drown_no_others(pair, level):
    """Two large channels meet keys that are zero there: what the others say decides."""
    spec = spec_of(pair, dtype="bf16", kv=1, heads=4)
    native, reference = cache(CpuKV(spec, KVParams(), level), [64]), cache(both(spec, [1])[1].op, [64])
    k, v = tokens(spec, 64)
    k[:, :, 5:7] = 0
    if pair == "int4:token":  # has no code for 0: let the two cancel
        k[:, :, 5:7] = k[:, :, 8:9]
    for each in (native, reference):
        each.append(0, 0, k, v)
    q = queries(spec, 3)
    q[:, :, 5], q[:, :, 6] = 20000.0, -20000.0
    close(native.attend(q, [64], [3]), reference.attend(q, [64], [3]), "bf16")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_where_it_is(pair, bad):
    """A token with NaN reaches those that see it; no other row, head or sequence."""
    spec = spec_of(pair, heads=4)
    native, _ = both(spec, [60, 60])
    q = queries(spec, 8)
    clean = native.attend(q, [60, 60], [4, 4])[0]
    k, v = tokens(spec, 60)
    k[58, 0, 5], v[58, 0, 5] = bad, bad
    fresh = cache(native.op, [60, 60])
    fresh.pages, fresh.tails = native.pages, native.tails
    fresh.append(0, 0, k[:58], v[:58])
    before = native.attend(q, [60, 60], [4, 4])[0]
    fresh.append(0, 58, k[58:], v[58:])
    after = native.attend(q, [60, 60], [4, 4])[0]
    assert torch.equal(after[4:], clean[4:]), "another sequence"
    assert bool(torch.isnan(after[2:4, :2]).any(-1).all()), "rows that see it"
    assert bool(torch.isfinite(after[:, 2:]).all()), "another head"
    if not spec.keys.grouped:  # a channel's scale is its group's
        assert torch.equal(after[:2], before[:2])
        assert bool(torch.isfinite(after[:2]).all()), "rows before it"


def test_rows_without_tokens():
    for more in ({}, {"sinks": True}):
        spec = spec_of("int8", **more)
        native, reference = both(spec, [40, 40])
        q, sinks = queries(spec, 3), torch.randn(8) if more else None
        found, wanted = (each.attend(q, [0, 40], [1, 2], sinks=sinks) for each in (native, reference))
        close(found, wanted, "bf16")
        assert bool((found[0][0] == 0).all())
    assert [tuple(t.shape) for t in native.attend(q[:0], [0, 40], [0, 0], sinks=sinks)] == [(0, 8, 64), (0, 8)]


@pytest.mark.parametrize("pair", ["int8", "int4"])
def test_a_cut_group_is_opened_again(pair):
    spec = spec_of(pair, dtype="fp32")
    native, reference = both(spec, [100])
    for each in (native, reference):
        each.op.reopen(each.pages, each.rows[0], 45, each.tails, 0)
    k, v = tokens(spec, 30)
    for each in (native, reference):
        each.append(0, 45, k, v)
    assert all(map(torch.equal, native.read(0, 75), reference.read(0, 75)))
    q = queries(spec, 2)
    close(native.attend(q, [75], [2]), reference.attend(q, [75], [2]), "fp32")


def test_part_of_a_sequence_is_read():
    spec = spec_of("int8")
    native, reference = both(spec, [75])
    for start in (0, 10, 64, 70, 75):
        assert all(map(torch.equal, native.read(0, 75, "bf16", start), reference.read(0, 75, "bf16", start)))


def test_other_scales_are_taken():
    spec = spec_of("fp8", dtype="fp32")
    native, reference = both(spec, [20])
    other = KVParams(torch.tensor(0.5), torch.tensor(0.25), "computed")
    for each in (native, reference):
        each.op.update(other)
        each.append(0, 0, *(t[:20] for t in (torch.ones(20, 2, 64), torch.ones(20, 2, 64))))
    assert all(map(torch.equal, native.read(0, 20), reference.read(0, 20)))


def test_compiles_without_a_graph_break():
    spec = spec_of("turboquant:4")
    native, _ = both(spec, [50])
    table, lengths, starts = native.table(), torch.tensor([50], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    q = queries(spec, 1)

    def step(q: Tensor) -> Tensor:
        return native.op.attend(q, native.pages, table, lengths, starts)[0] * 2

    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(q), step(q))


def test_each_kernel_runs_at_the_level_it_says():
    for kernel in kv_kernels.KERNELS:
        assert kernel.name == f"kv_{kernel._level}"
        if kernel._level in LEVELS:
            assert kernel.prepare(spec_of("bf16"), KVParams()).isa == kernel._level


def test_a_level_above_the_usable_raises():
    code = "from cpu.kv_cases import *; s = spec_of('bf16'); c = cache(CpuKV(s, KVParams(), 'avx512'), [4]); c.append(0, 0, *tokens(s, 4))"
    done = subprocess.run([sys.executable, "-c", code], env=environment("avx2"), capture_output=True, text=True, check=False)
    assert "isa 'avx512' is above the usable 'avx2'" in done.stderr


def environment(isa: str) -> dict[str, str]:
    return {**os.environ, "HAL_CPU_ISA": isa, "PYTHONPATH": ":".join(sys.path)}


@pytest.mark.parametrize("pair", ["bf16", "int8", "int4:token", "turboquant:3", "k4v3"])
def test_decoding_reads_the_pages_and_widens_none(pair, monkeypatch):
    """Prompt, steps and the closing of a group, through the paged cache: nothing is dequantized into memory."""
    spec, calls = spec_of(pair, page=32), []
    paged = kv_cache(spec, capacity=256, policy="require:cpu")
    read, attend = CpuKV.materialize, CpuKV.attend
    monkeypatch.setattr(CpuKV, "materialize", lambda *_, **__: pytest.fail("the cache was dequantized"))
    monkeypatch.setattr(CpuKV, "attend", lambda *given, **more: calls.append(1) or attend(*given, **more))
    sequence = paged.new()
    k, v = tokens(spec, 75)
    for begin, end in ((0, 61), *((at, at + 1) for at in range(61, 75))):
        paged.append(k[begin:end], v[begin:end], sequence)
        q = queries(spec, end - begin)
        found = paged.attend(q, [sequence])
    assert len(calls) == 15
    with pytest.raises(pytest.fail.Exception, match="dequantized"):
        paged.materialize(sequence)
    monkeypatch.setattr(CpuKV, "materialize", read)
    close(found, attention(spec, q.float(), *paged.materialize(sequence, dtype="fp32"), scale=None, causal=True, sinks=None), "bf16")
