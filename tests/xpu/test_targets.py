"""How near rescaled int8 comes to the truth, on Gaussian experts of a real size: in decibels, and against torch doing the same."""

from __future__ import annotations

import pytest
import torch
from hal_backend_xpu.ops import Int4Experts
from hal_backend_xpu.products import CACHE, int8_weights
from hal_backend_xpu.session import session

from hal_core.bench.problem import quantized, snr_db
from hal_core.kernel import MoEWeights
from hal_core.numerics import numerics_from_word
from hal_core.ops import Routed
from hal_core.schemes import WeightScheme
from hal_core.spec import MoESpec

pytestmark = pytest.mark.usefixtures("sycl_device")

SCHEME = WeightScheme.parse("int4:g32")
EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 128, 2048, 768, 8, 16


def coded(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def rows_of(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return words.t().contiguous().view(torch.int8).double() * scales.double()[:, None]


@pytest.fixture(scope="module")
def case():
    rng = torch.Generator().manual_seed(20)
    few = [quantized(SCHEME, (8, *shape), rng) for shape in ((INNER, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN))]
    chosen = torch.randint(0, 8, (EXPERTS,), generator=rng)
    up, down, gate = (type(w)(SCHEME, (EXPERTS, *w.shape[1:]), **{n: t[chosen] for n, t in w.tensors().items()}) for w in few)
    spec = MoESpec(EXPERTS, TOP_K, HIDDEN, INNER, up=SCHEME, down=SCHEME, gate=SCHEME, numerics=numerics_from_word("int8:rescaled"),
                   out_dtype="fp32")  # fmt: skip
    x = torch.randn(TOKENS, HIDDEN, generator=rng).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:TOP_K] for _ in range(TOKENS)]).int()
    return spec, MoEWeights(up, down, gate), x, ids, torch.rand(TOKENS, TOP_K, generator=rng)


def expected(weights, x, ids, scores, matrix, round_):
    """float64: ``matrix(role, expert)`` gives weights, ``round_`` treats rows before each product."""
    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        row = round_(x[token].double())
        for expert, score in zip(ids[token].tolist(), scores[token].double(), strict=True):
            inner = torch.nn.functional.silu(matrix("gate", expert) @ row) * (matrix("up", expert) @ row)
            out[token] += score * (matrix("down", expert) @ round_(inner))
    return out


def test_the_whole_op_is_as_good_as_its_numerics_allow(case):
    spec, weights, x, ids, scores = case
    op = Int4Experts(spec, weights, rescaled=True)
    found = op.apply(x, Routed(ids, scores))
    made = CACHE.get(op.block.sources, lambda: int8_weights(op.block))
    folded = {role: made[2 * i : 2 * i + 2] for i, role in enumerate(("gate", "up", "down"))}
    truth = expected(weights, x, ids, scores, lambda role, e: getattr(weights, role).expert(e).dequantize().double(), lambda row: row)
    same = expected(weights, x, ids, scores, lambda role, e: rows_of(folded[role][0][e], folded[role][1][e]), coded)
    reached, possible = snr_db(found, truth), snr_db(same, truth)
    print(f"whole op {reached:.2f} dB, torch with the same numerics {possible:.2f} dB")
    assert reached >= 31
    assert abs(reached - possible) <= 0.3


def test_one_grouped_product_keeps_38_decibels(case):
    _, weights, x, *_ = case
    here, weight = session(torch.device("cpu")), weights.up
    op = Int4Experts(case[0], weights, rescaled=True)
    words, scales = int8_weights(op.block)[2:4]
    offsets = torch.tensor([0, 7, TOKENS] + [TOKENS] * (EXPERTS - 2), dtype=torch.int32)
    codes, x_scales = torch.zeros(TOKENS + 64, HIDDEN, dtype=torch.int8), torch.zeros(TOKENS + 64)
    found, lanes = torch.full((TOKENS, INNER), float("nan")), 4 * here.engine("int8").sub_group
    rows = (x, 1, HIDDEN, None, 1, None, None, TOKENS, codes, x_scales)
    here.launch(here.kernel("rows.hpp", "quantize_rows"), (1, TOKENS, 1), (1, 1, 64), rows)
    here.launch(here.kernel("grouped_int8.hpp", "grouped_int8_0", "int8"), (1, 1, 8), (1, 1, lanes), (
        codes, x_scales, offsets, EXPERTS, None, None, None, words, scales, None, INNER, HIDDEN, found, 0, 0, 0.0, float("inf"),
    ))  # fmt: skip
    here.finish()
    parts = ((x[:7], 0), (x[7:], 1))
    truth = torch.cat([part.double() @ weight.expert(e).dequantize().double().t() for part, e in parts])
    reached = snr_db(found, truth)
    print(f"one grouped product {reached:.2f} dB")
    assert reached >= 38
