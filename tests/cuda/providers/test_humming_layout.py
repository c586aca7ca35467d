"""Humming's input form: a bijection, bit for bit, and what it cannot hold is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hal_backend_cuda.providers.humming.layout import HummingLayout, humming_tensors, stacked_rows

from hal_core.canonical import QuantizedTensor
from hal_core.errors import FormatError, UnfitWeightsError
from hal_core.schemes import WeightScheme
from hal_core.testing.data import random_weight

SCHEMES = (
    "int4:g32", "int4:g128", "int4:channel", "int4:g64:zero", "int4:channel:zero", "int8:g128", "int8:channel", "int8:g32:zero",
    "fp8_e4m3:b128x128", "fp8_e4m3:channel", "mxfp4:g32", "nvfp4:g16",
)  # fmt: skip


def weight(text, shape=(256, 384), scales="bf16", seed=0):
    return random_weight(WeightScheme.parse(text), shape, torch.Generator().manual_seed(seed), scales)


def layout(of, dtype="bf16"):
    whole = torch.float32 if of.global_scale is None else of.global_scale.dtype
    return HummingLayout(dtype, of.scales.dtype, whole)


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    left, right = a.tensors(), b.tensors()
    bits = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}

    def raw(t):
        return t.contiguous().reshape(-1).view(bits[t.element_size() * 8])

    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and left[n].shape == right[n].shape and torch.equal(raw(left[n]), raw(right[n])) for n in left
    )


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("seed", [0, 1])
def test_unpack_inverts_pack(text, seed):
    found = weight(text, seed=seed)
    form = layout(found)
    assert same(form.unpack(form.pack(found), found.scheme, found.shape), found)


@pytest.mark.parametrize("text", SCHEMES)
def test_a_stack_is_its_matrices(text):
    stack = weight(text, (3, 256, 384))
    whole = humming_tensors(stack, "bf16")
    for index in range(3):
        for name, part in humming_tensors(stack.expert(index), "bf16").items():
            assert torch.equal(whole[name][index].reshape(-1).view(torch.uint8), part.reshape(-1).view(torch.uint8)), name


def test_codes_are_offset_binary_the_first_lowest():
    found = weight("int4:g32", (8, 32))
    words = humming_tensors(found, "bf16")["weight"]
    codes = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], dim=-1).reshape(8, 32)
    assert torch.equal(codes - 8, found.codes().int())


def test_zero_points_run_along_n():
    found = weight("int4:g32:zero", (16, 64))
    words = humming_tensors(found, "bf16")["zero_point"]
    assert tuple(words.shape) == (2, 2)
    codes = torch.stack([(words >> (4 * i)) & 15 for i in range(8)], dim=1).reshape(16, 2)
    assert torch.equal(codes, found.zeros.int())


def test_scales_round_to_the_dtype_of_activations_and_no_further():
    found = weight("int4:g128", scales="fp16")
    cast = humming_tensors(found, "bf16")["weight_scale"].double()
    stored = found.scales.double()
    assert ((cast - stored).abs() <= stored.abs() * 2.0**-8).all()
    assert not torch.equal(cast, stored), "random fp16 scales have more digits than bf16"


@pytest.mark.parametrize("bad", [1e30, 1e-12, float("inf"), float("nan")])
def test_scales_outside_fp16_are_refused(bad):
    found = weight("int4:g128")
    scales = found.scales.clone()
    scales[3, 1] = bad
    with pytest.raises(UnfitWeightsError, match="outside the range of fp16"):
        humming_tensors(replace(found, scales=scales), "fp16")


def test_gate_and_up_lie_one_below_the_other_with_a_global_scale_for_each_row():
    gate, up = weight("nvfp4:g16", (2, 128, 256), seed=1), weight("nvfp4:g16", (2, 64, 256), seed=2)
    parts = [humming_tensors(gate, "bf16"), humming_tensors(up, "bf16")]
    both = stacked_rows(parts, "bf16")
    assert tuple(both["weight"].shape) == (2, 192, 32)
    assert torch.equal(both["weight"][:, :128], parts[0]["weight"])
    wholes = torch.cat([gate.global_scale.float()[:, None].expand(2, 128), up.global_scale.float()[:, None].expand(2, 64)], dim=1)
    assert torch.equal(both["weight_scale_2"], wholes.bfloat16())


def test_global_scales_that_the_activations_dtype_cannot_hold_are_refused():
    parts = [humming_tensors(weight("nvfp4:g16", (2, 128, 256), seed=seed), "fp16") for seed in (1, 2)]
    parts[1]["weight_scale_2"] = parts[1]["weight_scale_2"] * 1e9
    with pytest.raises(UnfitWeightsError, match="outside the range of fp16"):
        stacked_rows(parts, "fp16")


@pytest.mark.parametrize(
    ("text", "shape", "told"),
    [
        ("int3:g32", (64, 64), "int4, int8"),
        ("int4:g32:min", (64, 64), "float minima"),
        ("int4:g32:act_order", (64, 64), "activation order"),
        ("int4:channel", (64, 60), "do not fill whole words"),
        ("int4:channel:zero", (60, 64), "zero points of 4 bits"),
        ("int4:g128", (64, 192), "K=192 is not a multiple of 128"),
        ("fp8_e4m3:b128x128", (192, 128), "N=192 is not a multiple of 128"),
        ("int8:tensor", (64, 64), "per channel, group and block"),
    ],
)
def test_what_has_no_form_is_refused(text, shape, told):
    with pytest.raises(FormatError, match=told):
        HummingLayout().pack(weight(text, shape))
