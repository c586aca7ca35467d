"""What only matrix tiles do: operands rounded to bf16, and weights rescaled to one int8 scale a row."""

from __future__ import annotations

import math

import pytest
import torch
from cpu.native_cases import activations, error, linear, make
from cpu.native_int8 import TILES, decibels, float_experts, gaussian_experts
from cpu.native_moe import experts, routing

pytestmark = pytest.mark.skipif(not TILES, reason="this processor has no AVX512 BF16, which emulated tiles need too")
ZEROS = ["none", "zeros", "mins"]
SHAPES = [(64, 256, 32), (80, 512, 128), (37, 200, 64), (5, 17, 17), (33, 600, 600), (96, 1024, 512), (20, 104, 24), (16, 3000, 3000)]
ROWS = (1, 8, 16, 17, 33, 131)


@pytest.mark.parametrize("level", TILES)
@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("bits", [4, 8])
def test_bf16_tiles_are_exact_for_bf16_inputs(bits, zero, level):
    for i, (n, k, group) in enumerate(SHAPES):
        m = make(n, k, group, bits, zero, scale_dtype=(torch.float32, torch.bfloat16, torch.float16)[i % 3], seed=i)
        bias = torch.randn(n) if i % 2 else None
        w = m.weight()
        for rows in ROWS:
            x = activations(rows, k).bfloat16().float()
            truth = x.double() @ w.T + (0 if bias is None else bias)
            assert error(linear(x, m, f"{level}:bf16", bias=bias), truth) < 1e-5, (n, k, group, rows)


@pytest.mark.parametrize("level", TILES)
def test_bf16_tiles_round_other_inputs_to_bf16(level):
    m, x = make(64, 256, 32, 4), activations(40, 256)
    assert error(linear(x, m, f"{level}:bf16"), x.bfloat16().double() @ m.weight().T) < 1e-5


@pytest.mark.parametrize("level", TILES)
def test_rescaled_weights_are_those_of_the_transform(level):
    for n, k, group in SHAPES:
        m = make(n, k, group, 4, seed=k)
        whole = m.scales.double().abs().amax(-1, keepdim=True) * 8 / 127
        w = m.weight()
        for rows in (64, 81, 131):
            # rows of one value: each result is one weight, a whole number of steps and the nearest one
            at = torch.arange(rows) % k
            found = linear(torch.eye(k)[at], m, f"{level}:rescaled").double()
            assert ((found / whole.T) - (found / whole.T).round()).abs().max() < 1e-3
            assert ((found - w.T[at]) / whole.T).abs().max() < 0.503
            assert (found / whole.T).abs().max() < 127.5
            x = torch.randn(rows, k)
            assert error(linear(x, m, f"{level}:rescaled"), x.double() @ m.weight().T) < 4e-2, (n, k, group)


@pytest.mark.parametrize("level", TILES)
@pytest.mark.parametrize(("bits", "zero"), [(8, "none"), (4, "zeros"), (4, "mins")])
def test_weights_that_cannot_be_rescaled_are_refused(level, bits, zero):
    with pytest.raises(RuntimeError, match="cannot be rescaled"):
        linear(torch.randn(9, 64), make(16, 64, 32, bits, zero), f"{level}:rescaled")


@pytest.mark.parametrize("level", TILES)
@pytest.mark.parametrize("way", ["bf16", "rescaled"])
def test_experts_are_near_the_exact_result_and_a_row_that_is_not_finite_stays_alone(level, way):
    for tokens, choices in ((1, 6), (9, 6), (300, 6), (200, 1), (0, 6)):
        block = experts(zero="none")
        ids, weights = routing(tokens, 6, 2)
        ids = ids % choices
        x = torch.randn(tokens, 96).bfloat16().float()
        y = block.native(x, ids, weights, isa=f"{level}:{way}")
        assert tokens == 0 or error(y, block.truth(x, ids, weights)) < (4e-2 if way == "rescaled" else 4e-3)
        if tokens > 5:
            x[5, 7] = math.nan
            y = block.native(x, ids, weights, isa=f"{level}:{way}")
            assert y[5].isnan().all()
            assert y.isnan().any(1).sum() == 1


@pytest.mark.slow
@pytest.mark.parametrize("level", TILES)
@pytest.mark.parametrize("group", [128, 32])
@pytest.mark.parametrize(("way", "floor"), [("bf16", 48.0), ("rescaled", 31.0)])
def test_signal_to_noise_of_a_block_of_real_size(level, group, way, floor):
    block = gaussian_experts(8, 2048, 768, group)
    # enough rows an expert that weights are rescaled
    ids = torch.stack([torch.randperm(8)[:4] for _ in range(144)]).to(torch.int32)
    weights = torch.softmax(torch.randn(144, 4), -1)
    x = torch.randn(144, 2048)
    found = decibels(block.native(x, ids, weights, isa=f"{level}:{way}"), float_experts(block, x, ids, weights))
    assert found >= floor
    assert way != "rescaled" or found < 32.5  # and it is that kernel which was measured
