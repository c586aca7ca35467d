"""Linear and experts with int8 activations, against float64 that quantizes alike and against the exact result."""

from __future__ import annotations

import math

import pytest
import torch
from cpu.native_cases import activations, error, linear, make
from cpu.native_int8 import WORDS, decibels, float_experts, gaussian_experts, quantized, span_of
from cpu.native_moe import experts, routing

from hal_backend_cpu import _native

pytestmark = pytest.mark.skipif(not WORDS, reason="this processor has no AVX512 VNNI")
ZEROS = ["none", "zeros", "mins"]
# n, k, group: whole, odd tails, a partial last group, per channel, groups longer than a span and not of whole ones.
SHAPES = [(64, 256, 32), (80, 512, 128), (37, 200, 64), (5, 17, 17), (33, 600, 600), (96, 1024, 512), (20, 104, 24), (48, 640, 320)]


def off(y: torch.Tensor, truth: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """Each row's distance, relative to what was summed where the sum cancels."""
    return (y.double() - truth).norm(dim=1) / torch.maximum(truth.norm(dim=1), terms.norm(dim=1) / 20)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("bits", [4, 8])
def test_equals_float64_of_the_same_codes(bits, zero, word):
    for i, (n, k, group) in enumerate(SHAPES):
        m = make(n, k, group, bits, zero, scale_dtype=(torch.float32, torch.bfloat16, torch.float16)[i % 3], seed=i)
        bias = torch.randn(n) if i % 2 else None
        w = m.weight()
        for rows in (1, 3, 17, 64, 131):
            x = activations(rows, k)
            codes = quantized(x, span_of(word, m))
            y = linear(x, m, word, bias=bias)
            found = off(y - (0 if bias is None else bias), codes @ w.T, codes.abs() @ w.abs().T)
            assert found.median() < 1e-5, (n, k, group, rows)
            # a value in the middle of two codes may take either
            assert found.max() < 2e-2, (n, k, group, rows)


@pytest.mark.parametrize("word", WORDS)
def test_long_rows_do_not_overflow(word):
    m = make(16, 40000, 40000, 8, "zeros")
    m.codes[:], m.values[:] = 255, 255
    m.zeros[:] = 0
    x = torch.ones(9, 40000)
    assert error(linear(x, m, word), x.double() @ m.weight().T) < 1e-5


@pytest.mark.parametrize("word", WORDS)
def test_small_and_zero_rows_keep_their_scale(word):
    m = make(32, 256, 64, 4)
    x = torch.randn(4, 256) * torch.tensor([[1.0], [1e-36], [1e30], [0.0]])
    y = linear(x, m, word)
    for r, scale in enumerate((1.0, 1e-36, 1e30)):
        assert error(y[r] / scale, (x[r].double() / scale) @ m.weight().T) < 3e-2
    assert torch.equal(y[3], torch.zeros(32))


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_shows_it_and_stays_alone(word, zero, value):
    m = make(48, 256, 32, 4, zero)
    x = activations(21, 256)
    whole = linear(x, m, word)
    x[6, 77] = value
    y = linear(x, m, word)
    assert not torch.isfinite(y[6]).any()
    rest = torch.arange(21) != 6
    assert torch.equal(y[rest], whole[rest])


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", ZEROS)
def test_a_row_depends_on_no_other_row_and_on_no_thread(word, bits, zero):
    m = make(112, 384, 64, bits, zero)
    x = activations(171, 384, torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = linear(x, m, word)
        torch.set_num_threads(1)
        assert torch.equal(linear(x, m, word), whole)
        for start, rows in ((0, 1), (5, 2), (7, 3), (11, 4), (20, 7), (30, 8), (40, 13), (50, 33), (1, 128)):
            assert torch.equal(linear(x[start : start + rows].contiguous(), m, word), whole[start : start + rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("way", _native.INT8_WAYS)
def test_levels_have_equal_bits(bits, zero, way):
    words = [word for word in WORDS if word.endswith(way)]
    for n, k, group in SHAPES:
        m = make(n, k, group, bits, zero)
        for rows in (1, 16, 40, 131):
            x = activations(rows, k)
            results = [linear(x, m, word) for word in words]
            for word, y in zip(words, results, strict=True):
                assert torch.equal(y, results[0]), (word, n, k, group, rows)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("reduce", [True, False])
def test_experts_are_near_the_exact_result(word, reduce):
    for tokens, choices in ((1, 6), (9, 6), (300, 6), (200, 1), (0, 6)):
        block = experts()
        ids, weights = routing(tokens, 6, 2)
        ids = torch.where(ids < 0, ids, ids % choices)
        found = []
        # The error of a single token varies by half; that of eight does not.
        for _ in range(8 if tokens == 1 else 1):
            x = torch.randn(tokens, 96)
            y = block.native(x, ids, weights, reduce=reduce, isa=word)
            truth = block.truth(x, ids, weights, reduce=reduce)
            assert y.shape == truth.shape
            found.append((y, truth))
        y, truth = (torch.cat(each) for each in zip(*found, strict=True))
        assert tokens == 0 or error(y, truth) < 3e-2


@pytest.mark.parametrize("word", WORDS)
def test_a_token_depends_on_no_other_token_and_on_no_thread(word):
    block = experts()
    ids, weights = routing(200, 6, 2)
    x = activations(200, 96, torch.bfloat16)
    x[50, 3] = math.nan
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = block.native(x, ids, weights, isa=word)
        torch.set_num_threads(1)
        assert torch.equal(torch.nan_to_num(block.native(x, ids, weights, isa=word)), torch.nan_to_num(whole))
    finally:
        torch.set_num_threads(threads)
    assert whole[50].isnan().all()
    assert whole.isnan().any(1).sum() == 1
    for start, rows in ((0, 1), (5, 2), (20, 7), (60, 140)):
        part = slice(start, start + rows)
        y = block.native(x[part].contiguous(), ids[part].contiguous(), weights[part].contiguous(), isa=word)
        assert torch.equal(y, whole[part])


def test_ids_out_of_range_and_unknown_words_raise():
    block = experts()
    ids, weights = routing(3, 6, 2)
    ids[2, 1] = 6
    with pytest.raises(RuntimeError, match="token 2, slot 1"):
        block.native(torch.zeros(3, 96), ids, weights, isa=WORDS[0])
    m = make(16, 32, 32, 4)
    for word in ("avx512vnni:row", "avx2:token", ":", "avx512vnni:"):
        with pytest.raises(RuntimeError, match="it takes"):
            linear(torch.zeros(1, 32), m, word)


#: The least decibels of the whole block on normal data, at groups of 128 and of 32.
FLOORS = {"token": (32.5, 32.5), "group": (35.5, 38.0)}


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("group", [128, 32])
def test_signal_to_noise_of_a_block_of_real_size(word, group):
    block = gaussian_experts(8, 2048, 768, group)
    ids = torch.stack([torch.randperm(8)[:4] for _ in range(48)]).to(torch.int32)
    weights = torch.softmax(torch.randn(48, 4), -1)
    x = torch.randn(48, 2048)
    floor = FLOORS[word.split(":")[1]][group == 32]
    assert decibels(block.native(x, ids, weights, isa=word), float_experts(block, x, ids, weights)) >= floor
