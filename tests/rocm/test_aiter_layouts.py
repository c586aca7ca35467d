"""AITER's order of weights: our formula against AITER's own function, there and back."""

from __future__ import annotations

import aiter_source
import pytest
import torch
from hal_backend_rocm.aiter_provider.layouts import shuffled, unshuffled

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
