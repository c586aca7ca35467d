"""Each transform stays within the error that it states, and refuses what it cannot change within it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import random_weight
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_core.canonical import QuantizedTensor, stack
from hal_core.errors import ShapeError, UnfitWeightsError
from hal_core.schemes import Granularity, WeightScheme, ZeroKind
from hal_core.selection import Transform
from hal_core.transforms import Fnuz, GroupToChannel, Recast, ToFP8, added_error

MANY = settings(max_examples=100, deadline=None)


def fp8(granularity: Granularity, scales: torch.Tensor, n: int = 16, k: int = 16) -> QuantizedTensor:
    """Every finite byte of e4m3fn."""
    codes = torch.arange(256, dtype=torch.int16).repeat(-(-n * k // 256))[: n * k].to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    return QuantizedTensor(WeightScheme("fp8_e4m3", granularity), (n, k), codes.view(torch.float8_e4m3fn).view(n, k), scales)


@pytest.mark.parametrize(
    ("granularity", "grid"),
    [("tensor", (1, 1)), ("channel", (16, 1)), ("g8", (16, 2)), ("b8x16", (2, 1))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_fnuz_is_exact_for_every_finite_byte(granularity, grid, dtype):
    scales = torch.randint(100, 140, grid, dtype=torch.uint8) if dtype == torch.uint8 else torch.randn(grid).to(dtype)
    weight = replace(fp8(Granularity.parse(granularity), scales), input_scale=torch.tensor(0.25))
    changed = Fnuz().apply(weight)
    assert changed.values.dtype == torch.float8_e4m3fnuz
    assert torch.equal(changed.dequantize(), weight.dequantize())
    assert float(changed.input_scale) == 0.5
    assert not bool((changed.values.view(torch.uint8) == 0x80).any()), "the byte of minus zero is NaN there"
    assert bool((weight.values.view(torch.uint8) == 0x80).any()), "the input is left as it was"


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_fnuz_refuses_nan_bytes(byte):
    weight = fp8(Granularity.tensor(), torch.ones(1, 1))
    weight.values.view(torch.uint8)[3, 5] = byte
    with pytest.raises(ShapeError, match="1 values are NaN"):
        Fnuz().apply(weight)


@pytest.mark.parametrize("scale", [torch.full((1, 1), 40000.0).half(), torch.full((1, 1), 254, dtype=torch.uint8)])
def test_fnuz_refuses_scales_that_cannot_double(scale):
    with pytest.raises(ShapeError, match="not finite"):
        Fnuz().apply(fp8(Granularity.tensor(), scale))


@MANY
@given(st.integers(0, 2**32), st.sampled_from(["channel", "b128x128", "b16x48"]), st.floats(1e-20, 1e20), st.integers(1, 200))
def test_to_fp8_stays_within_its_bound(seed, granularity, size, k):
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(37, k, generator=draw) * size * torch.exp(3 * torch.randn(37, 1, generator=draw))
    values[torch.rand(37, k, generator=draw) < 0.02] *= 1000  # most of a row far below its largest
    values[5] = 0
    change = ToFP8(WeightScheme.parse(f"fp8_e4m3:{granularity}"))
    weight = QuantizedTensor(WeightScheme("fp32"), (37, k), values)
    changed = change.apply(weight)
    assert changed.scheme == change.to
    assert added_error(weight, changed) <= change.error_bound
    largest = changed.values.float().abs().amax(1) if granularity == "channel" else None
    assert largest is None or bool(((largest == 448) | (values.abs().amax(1) == 0)).all()), "the whole range is used"
    assert not bool(changed.rows(5, 6).dequantize().any()) if granularity == "channel" else True


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e-38])
def test_to_fp8_refuses_rows_without_a_scale(wrong):
    values = torch.ones(3, 8)
    values[1] = 0
    values[1, 2] = wrong
    with pytest.raises(ShapeError, match="not finite, or too small"):
        ToFP8(WeightScheme.parse("fp8_e4m3:channel")).apply(QuantizedTensor(WeightScheme("fp32"), (3, 8), values))
    with pytest.raises(ShapeError, match="it changes float weights"):
        ToFP8(WeightScheme.parse("fp8_e4m3:channel")).apply(fp8(Granularity.tensor(), torch.ones(1, 1)))


@MANY
@given(st.integers(0, 2**32), st.sampled_from([16, 32, 128]), st.integers(1, 300), st.booleans(), st.booleans())
def test_folded_groups_move_no_element_by_more_than_half_a_step_and_never_clip(seed, group, k, act_order, zero):
    scheme = WeightScheme("int4", Granularity.groups(group), ZeroKind.INTEGER if zero else ZeroKind.NONE, act_order=act_order)
    weight = random_weight(scheme, 8, k, seed)
    changed = GroupToChannel(error_bound=10.0).apply(weight)
    assert str(changed.scheme) == "int8:channel"
    reach = 8 if weight.zeros is None else torch.maximum(weight.zeros, 15 - weight.zeros)
    largest = (weight.scales.double().abs() * reach / 127).amax(-1, keepdim=True)
    assert torch.allclose(changed.scales.double(), largest, rtol=1e-6)
    assert int(changed.values.abs().max()) <= 127
    moved = (changed.dequantize().double() - weight.dequantize().double()).abs()
    assert bool((moved <= changed.scales.double() * (0.5 + 1e-5)).all())


@MANY
@given(st.integers(0, 2**32))
def test_folding_keeps_its_bound_for_weights_as_tools_write_them(seed):
    """Scales of either sign within a factor of four, as for layers without outlier channels."""
    weight = random_weight(WeightScheme("int4", Granularity.groups(32)), 32, 512, seed)
    draw = torch.Generator().manual_seed(seed)
    scales = (torch.rand(32, 16, generator=draw) * 0.75 + 0.25) * torch.where(torch.rand(32, 16, generator=draw) < 0.5, -1, 1)
    weight = replace(weight, scales=scales.half())
    assert added_error(weight, GroupToChannel().apply(weight)) <= GroupToChannel().error_bound


def test_folding_never_clips_with_zero_points_above_the_codes():
    """GPTQ files hold a 16 for every zero point of 15."""
    weight = random_weight(WeightScheme.parse("int4:g32:zero"), 4, 64, seed=3)
    weight = replace(weight, zeros=torch.tensor([[16, 16], [17, 40], [255, 255], [0, 16]], dtype=torch.uint8))
    changed = GroupToChannel(error_bound=10.0).apply(weight)
    reach = torch.maximum(weight.zeros.double(), 15 - weight.zeros.double())
    largest = (weight.scales.double().abs() * reach / 127).amax(-1, keepdim=True)
    assert torch.allclose(changed.scales.double(), largest, rtol=1e-6)
    moved = (changed.dequantize().double() - weight.dequantize().double()).abs()
    assert bool((moved <= changed.scales.double() * (0.5 + 1e-5)).all())


def test_folding_refuses_a_row_whose_scales_differ_too_much():
    weight = random_weight(WeightScheme("int4", Granularity.groups(32)), 4, 512, seed=1)
    scales = torch.full((4, 16), 0.001)
    scales[:, 3] = 1.0
    weight.values.view(4, 16, 16)[:, 3] = 0  # the group of the large scale holds nothing, so the small ones are all there is
    with pytest.raises(UnfitWeightsError, match="scales of a row differ too much"):  # another kernel then serves it
        GroupToChannel().apply(replace(weight, scales=scales))


def test_folding_takes_rows_of_zeros_and_stacks_of_experts():
    one = random_weight(WeightScheme("int4", Granularity.groups(32)), 4, 64, seed=2)
    one = replace(one, scales=torch.tensor([[0.0, 0.0], [0.1, -0.1], [0.2, 0.1], [1.0, 1.0]]))
    changed = GroupToChannel().apply(stack([one, one], 2))
    assert changed.shape == (2, 4, 64)
    assert not changed.dequantize()[:, 0].any()


@pytest.mark.parametrize("text", ["int8:g32", "int4:channel", "int4:g32:min", "fp8_e4m3:g32"])
def test_folding_says_what_it_is_for(text):
    assert GroupToChannel().obstacle(WeightScheme.parse(text))
    assert Fnuz().obstacle(WeightScheme.parse("mxfp8:g32"))


@MANY
@given(st.integers(0, 2**32), st.sampled_from(["int4:g32", "int8:channel", "int4:g32:zero", "int4:g16/256:min", "int6:g16/256"]))
def test_recast_to_bf16_keeps_its_bound(seed, text):
    weight = random_weight(WeightScheme.parse(text), 8, 256, seed)
    if weight.mins is not None:  # of one sign, so that scale and minimum cannot cancel
        weight = replace(weight, scales=weight.scales.abs(), mins=weight.mins.abs())
    changed = Recast("bf16").apply(weight)
    assert changed.scales.dtype == torch.bfloat16
    assert added_error(weight, changed) <= Recast("bf16").error_bound + 2**-22


def test_recast_refuses_a_weight_whose_scale_and_minimum_cancel():
    weight = random_weight(WeightScheme.parse("int4:g32:min"), 1, 32, 3)
    scale = torch.full((1, 1), 1.0 + 2**-10).half()
    weight.values.fill_(0x88)
    with pytest.raises(ShapeError, match="relative error"):
        Recast("bf16").apply(replace(weight, scales=scale, mins=torch.full((1, 1), -8.0).half()))


def test_recast_to_fp16_is_exact_or_refused():
    weight = random_weight(WeightScheme.parse("int4:g32"), 8, 64, 3, torch.bfloat16)
    weight = replace(weight, scales=weight.scales.clamp(min=0.01))
    assert torch.equal(Recast("fp16").apply(weight).dequantize(), weight.dequantize())
    for scale in (1e5, 1e-7):
        with pytest.raises(ShapeError, match="no equal in fp16"):
            Recast("fp16").apply(replace(weight, scales=torch.full((8, 2), scale, dtype=torch.bfloat16)))


def test_recast_leaves_what_is_there_already_and_refuses_other_dtypes():
    weight = random_weight(WeightScheme.parse("int4:g32"), 8, 64, 3)
    assert Recast("fp16").apply(weight).scales is weight.scales
    with pytest.raises(ShapeError, match="float32"):
        Recast("fp16").apply(replace(weight, scales=weight.scales.float()))
    with pytest.raises(ShapeError, match="known: bf16, fp16"):
        Recast("fp8")


def test_records_are_what_selections_hold():
    for each in (Fnuz(), GroupToChannel(), Recast("bf16")):
        assert each.record == Transform(each.name, each.error_bound)
