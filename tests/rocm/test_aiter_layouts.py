"""AITER's order of weights: our formula against AITER's own function, there and back."""

from __future__ import annotations

from types import SimpleNamespace

import aiter_source
import pytest
import torch
from hal_backend_rocm.aiter_provider.layouts import (
    interleaved,
    packed_int4,
    scale_tiles,
    separated,
    shuffled,
    unpacked_int4,
    unshuffled,
    unshuffled_scales,
)

from hal_core.canonical import pack_nibbles
from hal_core.errors import ShapeError

DTYPES = (torch.bfloat16, torch.int8, torch.float8_e4m3fnuz, torch.float8_e4m3fn, torch.uint8)


def weight(dtype, *shape):
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


def same(left, right):
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (3, 32, 128), (2, 160, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(dtype, shape):
    given = weight(dtype, *shape)
    found = shuffled(given)
    assert found.shape == given.shape
    assert same(unshuffled(found), given)
    assert not same(found, given)


@pytest.mark.parametrize("shape", [(16, 32), (3, 48, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_order_of_aiter(dtype, shape):
    given = weight(dtype, *shape)
    assert same(shuffled(given), aiter_source.executed("aiter.ops.shuffle.shuffle_weight", torch=torch)(given))


def test_a_view_is_shuffled_as_its_copy():
    given = weight(torch.bfloat16, 64, 32).t()
    assert same(shuffled(given), shuffled(given.contiguous()))


@pytest.mark.parametrize("shape", [(8, 32), (16, 48), (24, 64)], ids=str)
def test_other_sizes_are_refused(shape):
    for function in (shuffled, unshuffled):
        with pytest.raises(ShapeError, match="multiples of 16 rows and 32 columns"):
            function(torch.zeros(shape))


def their(path, **names):
    return aiter_source.executed(path, torch=torch, **names)


@pytest.mark.parametrize("shape", [(16, 32), (3, 32, 96)], ids=str)
def test_int4_comes_back_and_is_the_order_of_aiter(shape):
    codes = torch.randint(-8, 8, shape, dtype=torch.int8)
    found = packed_int4(pack_nibbles(codes))
    assert (found.dtype, found.shape) == (torch.uint32, (*shape[:-1], shape[-1] // 8))
    assert torch.equal(unpacked_int4(found), pack_nibbles(codes))
    types = SimpleNamespace(i8=torch.int8, i32=torch.int32)
    words = their("aiter.int4_utils.convert_int8_to_uint32_int4", dtypes=types)
    rearranged = their("aiter.int4_utils.rearrange_4bit_elements", dtypes=types)
    wide = codes.reshape(-1, *shape[-2:])
    theirs = rearranged(words(their("aiter.ops.shuffle.shuffle_weight")(wide, (16, 16), use_int4=True)))
    assert torch.equal(found.view(torch.int32), theirs.view(torch.int32).view(found.shape))


@pytest.mark.parametrize("shape", [(1, 32, 8), (3, 64, 24), (2, 256, 16)], ids=str)
def test_scales_come_back_and_are_in_the_order_of_aiter(shape):
    scales = torch.randint(0, 256, shape, dtype=torch.uint8)
    found = scale_tiles(scales)
    assert torch.equal(unshuffled_scales(found).view(shape), scales)
    assert not torch.equal(found.view(shape), scales)
    theirs = their("aiter.utility.fp4_utils.e8m0_shuffle")(scales.view(-1, shape[-1]))
    assert torch.equal(found, theirs.view(-1)[: found.numel()].view(found.shape)), "AITER pads to 256 rows"


def test_gate_and_up_in_stripes_are_the_order_of_aiter():
    gate, up = (torch.randint(0, 256, (3, 64, 128), dtype=torch.uint8) for _ in range(2))
    striped = interleaved(gate, up)
    assert all(torch.equal(back, given) for back, given in zip(separated(striped), (gate, up), strict=True))
    theirs = their("aiter.ops.shuffle.shuffle_weight_a16w4")
    assert torch.equal(shuffled(striped), theirs(torch.cat([gate, up], 1), 16, True))
    assert torch.equal(shuffled(gate), theirs(gate, 16, False))


def test_scales_in_stripes_are_the_order_of_aiter():
    gate, up = (torch.randint(0, 256, (3, 32, 8), dtype=torch.uint8) for _ in range(2))
    theirs = their("aiter.ops.shuffle.shuffle_scale_a16w4")
    assert torch.equal(scale_tiles(interleaved(gate, up)), theirs(torch.cat([gate, up], 1).view(-1, 8), 3, True))
    assert torch.equal(scale_tiles(gate), theirs(gate.reshape(-1, 8), 3, False))


@pytest.mark.parametrize("shape", [(16, 8), (32, 12), (48, 8)], ids=str)
def test_other_sizes_of_scales_are_refused(shape):
    for function in (scale_tiles, unshuffled_scales):
        with pytest.raises(ShapeError, match="multiples of 32 rows and 8 groups"):
            function(torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="equal shapes"):
        interleaved(torch.zeros(16, 8), torch.zeros(32, 8))
