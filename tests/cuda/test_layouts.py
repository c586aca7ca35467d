"""Packed layouts give back what was packed, bit for bit."""

from __future__ import annotations

import pytest
import torch

from hal_core.errors import ShapeError, UnfitWeightsError
from hal_core.schemes import WeightScheme
from hal_core.testing.data import random_weight
from hal_core.triton.layout import StepMatrix, group_order, pack_steps, unpack_steps
from hal_core.triton.rows import RowMatrix, block_of

INTEGERS = (
    "int4:g32", "int4:g128:zero", "int4:channel:min", "int4:tensor", "int4:g32:zero:act_order", "int4:g96", "int8:channel", "int8:g64:min",
    "int8:g32:zero", "int8:tensor:zero", "int8:g128:act_order",
)  # fmt: skip
ROWS = ("bf16", "fp16", "fp8_e4m3:b128x128", "fp8_e4m3:channel", "fp8_e4m3:tensor")


def rng():
    return torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())


def same(left, right):
    assert left.tensors().keys() == right.tensors().keys()
    for name, tensor in left.tensors().items():
        other = right.tensors()[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        # as bytes: fp8 has no equality, and NaN none with itself
        assert torch.equal(*(t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (tensor, other))), name


@pytest.mark.parametrize("shape", [(1, 1), (3, 65, 160), (128, 256), (2, 33, 131), (64, 512)], ids=str)
@pytest.mark.parametrize("scales", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("scheme", INTEGERS)
def test_integers_come_back(scheme, scales, shape):
    weight = random_weight(WeightScheme.parse(scheme), shape, rng(), scales)
    same(StepMatrix(weight).unpack(), weight)


@pytest.mark.parametrize("shape", [(3, 65, 160), (128, 256), (1, 7)], ids=str)
@pytest.mark.parametrize("scales", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("scheme", ROWS)
def test_rows_come_back(scheme, scales, shape):
    weight = random_weight(WeightScheme.parse(scheme), shape, rng(), scales)
    same(RowMatrix(weight).unpack(), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_layout_is_what_it_says(bits):
    codes = torch.randint(0, 1 << bits, (70, 300), dtype=torch.uint8)
    words = pack_steps(codes, bits)
    step = 512 // bits
    assert words.shape == (-(-300 // step), 128, 16)
    for n, k in ((0, 0), (69, 299), (5, 131), (33, 64)):
        inside = k % step
        plane, column = divmod(inside, 32)
        word = int(words[k // step, n, column // 2])
        assert word >> (16 * (column % 2) + bits * plane) & ((1 << bits) - 1) == int(codes[n, k])
    assert torch.equal(unpack_steps(words, 70, 300, bits), codes)
    assert not words[:, 70:].any()


def test_update_writes_what_a_fresh_matrix_holds_at_the_same_place():
    scheme = WeightScheme.parse("int4:g32:zero")
    made, other = (StepMatrix(random_weight(scheme, (2, 40, 72), rng())) for _ in range(2))
    places = {name: buffer.data_ptr() for name, buffer in made.named_buffers()}
    made.update(other.unpack())
    assert places == {name: buffer.data_ptr() for name, buffer in made.named_buffers()}
    assert all(torch.equal(buffer, other.get_buffer(name)) for name, buffer in made.named_buffers())
    with pytest.raises(ShapeError, match="prepare a new op"):
        made.update(random_weight(scheme, (2, 40, 64), rng()))


@pytest.mark.parametrize("kind", [StepMatrix, RowMatrix])
def test_casting_a_model_leaves_packed_tensors_alone(kind):
    weight = random_weight(WeightScheme.parse("int8:channel" if kind is StepMatrix else "fp8_e4m3:channel"), (16, 64), rng(), "fp32")
    made = kind(weight)
    before = {name: (buffer.dtype, buffer.clone()) for name, buffer in made.named_buffers()}
    made.to(torch.bfloat16)
    assert all(buffer.dtype == before[name][0] and torch.equal(buffer, before[name][1]) for name, buffer in made.named_buffers())


def test_groups_that_are_not_full_are_refused():
    with pytest.raises(UnfitWeightsError, match="32 columns each"):
        group_order(torch.zeros(64, dtype=torch.int32), 32)


def test_a_block_is_the_same_as_list_and_as_tuple():
    assert block_of([128, 128]) == block_of((128, 128)) == (128, 128)
    assert block_of(None) is None
    for wrong in ([128], (128, 128, 1), "128x128", [128, 0], [128.0, 128], 128):
        with pytest.raises(ShapeError, match="weight block"):
            block_of(wrong)
