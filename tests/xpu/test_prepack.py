"""int8 weights that are made from four-bit ones and kept: for these storages, as they are, and no others."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from hal_backend_xpu.layout import WordMatrix, int8_rows
from hal_backend_xpu.ops import Int4Experts
from hal_backend_xpu.prepack import PrepackCache
from hal_backend_xpu.products import CACHE
from hypothesis import given
from hypothesis import strategies as st

from hal_core.canonical import QuantizedTensor
from hal_core.errors import ShapeError, UnfitWeightsError
from hal_core.kernel import MoEWeights
from hal_core.numerics import numerics_from_word
from hal_core.ops import Routed
from hal_core.schemes import Granularity, WeightScheme, ZeroKind
from hal_core.spec import MoESpec
from hal_core.testing.data import random_weight

pytestmark = pytest.mark.usefixtures("sycl_device")

SCHEME = WeightScheme.parse("int4:g32")


def made(numerics: str = "int8:rescaled"):
    rng = torch.Generator().manual_seed(5)
    spec = MoESpec(4, 2, 64, 64, up=SCHEME, down=SCHEME, gate=SCHEME, numerics=numerics_from_word(numerics))
    weights = MoEWeights(*(random_weight(SCHEME, (4, 64, 64), rng) for _ in range(3)))
    return Int4Experts(spec, weights, rescaled=numerics == "int8:rescaled"), weights


def test_memory_of_a_source_is_not_given_to_another_while_its_entry_is_kept():
    cache, calls = PrepackCache(), []

    def entry(value: int) -> float:
        source = torch.full((1 << 16,), float(value))
        (found,) = cache.get((source,), lambda: (calls.append(value) or source.clone(),))
        return float(found[0])

    # freed and allocated again: without a hold, the next tensor comes to lie where the last one was
    assert [entry(value) for value in range(8)] == list(range(8))
    assert calls == list(range(8))
    gc.collect()
    assert len(cache) == 8


def test_an_entry_follows_changes_in_place():
    cache, source = PrepackCache(), torch.zeros(4)
    assert cache.get((source,), lambda: (source + 1,))[0].sum() == 4
    source.fill_(5)
    assert cache.get((source,), lambda: (source + 1,))[0].sum() == 24
    assert len(cache) == 1
    cache.forget((source,))
    assert len(cache) == 0


def test_two_views_of_one_storage_are_two_sources():
    cache, whole = PrepackCache(), torch.arange(8.0)
    first, second = whole[:4], whole[4:]
    assert cache.get((first,), lambda: (first.clone(),))[0].tolist() != cache.get((second,), lambda: (second.clone(),))[0].tolist()


def test_phases_say_what_is_held_and_an_op_takes_its_entry_with_it():
    op, _ = made()
    sources = op.block.sources
    assert CACHE.holds(sources)
    op.prepack("decode")
    assert not CACHE.holds(sources)
    op.prepack("both")
    assert CACHE.holds(sources)
    with pytest.raises(ShapeError, match="phase 'prefill'"):
        op.prepack("prefill")
    del op
    gc.collect()
    assert not CACHE.holds(sources)


def test_what_is_asked_exact_is_never_rescaled():
    op, _ = made("exact")
    with pytest.raises(ShapeError, match="both is for kernels that rescale"):
        op.prepack("both")


def test_rows_that_int8_cannot_hold_are_unfit_so_that_the_exact_kernel_serves_them():
    op, weights = made()
    scales, values = weights.up.scales.clone(), weights.up.values.clone()
    scales[:, :, 0] *= 1e4  # of a group that holds nothing: the other one is all there is
    values.view(4, 64, 2, 16)[:, :, 0] = 0
    unfit = replace(weights, up=replace(weights.up, scales=scales, values=values))
    with pytest.raises(UnfitWeightsError, match="scales of a row differ too much"):
        Int4Experts(op.spec, unfit, rescaled=True)


def test_long_inputs_follow_an_update():
    op, weights = made()
    x, routed = torch.randn(40, 64).bfloat16(), Routed(torch.randint(0, 4, (40, 2)).int(), torch.rand(40, 2))
    before = op.apply(x, routed).clone()
    other = MoEWeights(weights.down, weights.up, weights.gate)
    op.update(other)
    fresh = Int4Experts(op.spec, other, rescaled=True)
    assert torch.equal(op.apply(x, routed), fresh.apply(x, routed))
    assert not torch.equal(op.apply(x, routed), before)


@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([8, 32, 64]))
def test_folded_words_are_the_rows_they_stand_for_and_never_clip(seed, zero, group):
    rng = torch.Generator().manual_seed(seed)
    scheme = WeightScheme("int4", Granularity.groups(group), ZeroKind.INTEGER if zero else ZeroKind.NONE)
    grid = (2, 16, 64 // group)
    # every code at its end, scales of either sign within a factor of two
    codes = torch.where(torch.rand(2, 16, 32, generator=rng) < 0.5, 0x88, 0x77).to(torch.uint8)
    sign = torch.where(torch.rand(grid, generator=rng) < 0.5, -1.0, 1.0)
    scales = ((torch.rand(grid, generator=rng) + 1) * sign).half()
    zeros = torch.randint(0, 16, grid, generator=rng).to(torch.uint8) if zero else None
    weight = QuantizedTensor(scheme, (2, 16, 64), codes, scales, zeros)
    held = WordMatrix(weight)._buffers
    words, rows = int8_rows(held["codes"], held["scales"], held["zeros"], 64, group)
    values = words.transpose(-1, -2).contiguous().view(torch.int8)
    assert int(values.short().abs().max()) <= 127
    off = (values.double() * rows.double()[..., None] - weight.dequantize().double()).abs()
    assert bool((off <= rows.double()[..., None] * (0.5 + 1e-5)).all())
