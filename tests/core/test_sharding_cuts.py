"""Parts of canonical weights: each rank's part dequantizes to its slice of the whole, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hal_core.errors import ShapeError
from hal_core.schemes import WeightScheme
from hal_core.sharding import Cut, cut_weight, join_rows, rank_cut
from hal_core.testing.data import random_weight

#: A family each; sizes below are odd, and cut most of these groups and blocks.
SCHEMES = (
    "int4:g32", "int4:g32:zero", "int4:g128:zero:act_order", "int3:g32:zero", "int2:g32:min", "int8:channel", "int8:tensor", "int4:channel",
    "int5:g32:zero", "fp8_e4m3:tensor", "fp8_e4m3:channel", "fp8_e4m3:b128x128", "mxfp4:g32", "mxfp8:g32", "nvfp4:g16", "iq4_nl:g32",
    "int4:g32/256:min", "int6:g16/256", "bf16",
)  # fmt: skip


def weight(scheme, n, k, seed=0):
    return random_weight(WeightScheme.parse(scheme), (n, k), torch.Generator().manual_seed(seed))


def same(a, b):
    return torch.equal(a.nan_to_num(7e8), b.nan_to_num(7e8))


def part_of(whole, rows, columns):
    """The part, or None where it is refused for groups that would be too fine, as no other reason may be given."""
    try:
        part = cut_weight("w", whole, rows, columns)
    except ShapeError as error:
        if "cut groups of" in error.found and "degrees 1" in error.fix:
            return None
        raise
    assert part.shape == (rows.size, columns.size)
    assert same(part.dequantize(), whole.dequantize()[rows.start : rows.stop, columns.start : columns.stop])
    return part


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("n", "k", "degree"), [(96, 768, 2), (90, 768, 3), (264, 1536, 4)])
def test_a_part_dequantizes_to_its_slice(scheme, n, k, degree):
    whole = weight(scheme, n, k)
    for rank in range(degree):
        rows, columns = rank_cut("w n", n, n // degree, rank, degree), rank_cut("w k", k, k // degree, rank, degree)
        for cuts in ((rows, Cut.all_of(k)), (Cut.all_of(n), columns), (rows, columns)):
            # parts of 66 rows of blocks of 128 are the only ones here that would have groups of two
            assert part_of(whole, *cuts) is not None or (scheme == "fp8_e4m3:b128x128" and cuts[0].step == 66)


@given(st.sampled_from(SCHEMES), st.integers(1, 40), st.integers(1, 300), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_parts_of_any_size_are_right_or_refused(scheme, n, k, across, along, seed):
    n, k = n * across, k * along
    assume("/256" not in scheme or k % 256 == 0)
    whole = weight(scheme, n, k, seed)
    rows, columns = (rank_cut("w", size, size // d, seed % d, d) for size, d in ((n, across), (k, along)))
    part_of(whole, rows, columns)


@pytest.mark.parametrize(
    "scheme", ["int4:g32:zero", "int3:g32:zero", "fp8_e4m3:b32x32", "int8:channel", "nvfp4:g16", "int4:g32:zero:act_order"]
)
def test_rows_joined_again_are_the_whole(scheme):
    whole = weight(scheme, 96, 128)
    parts = [cut_weight("w", whole, rank_cut("w", 96, 32, rank, 3), Cut.all_of(128)) for rank in range(3)]
    joined = join_rows(parts)
    assert joined.scheme == whole.scheme
    assert all(torch.equal(tensor, joined.tensors()[name]) for name, tensor in whole.tensors().items())


def test_rows_that_share_no_order_or_number_stay_apart():
    assert join_rows([weight("int4:g32", 8, 64), weight("int4:g64", 8, 64)]) is None
    assert join_rows([weight("int8:tensor", 8, 64), weight("int8:tensor", 8, 64, 1)]) is None
    assert join_rows([weight("int4:g32:act_order", 8, 64), weight("int4:g32:act_order", 8, 64, 1)]) is None
    assert join_rows([weight("nvfp4:g16", 8, 64), weight("nvfp4:g16", 8, 64, 1)]) is None
    assert join_rows([weight("fp8_e4m3:b32x32", 40, 64), weight("fp8_e4m3:b32x32", 40, 64)]) is None
    assert join_rows([weight("int4:g32", 8, 64)]).shape == (8, 64)


def test_key_heads_fewer_than_ranks_are_held_by_several():
    assert [rank_cut("k_proj", 64, 32, rank, 4).start for rank in range(4)] == [0, 0, 32, 32]
    assert rank_cut("gate", 64, 64, 3, 4) == Cut.all_of(64)  # replicated
    with pytest.raises(ShapeError, match=r"100 in 3 shards: each rank is to hold 33; use a degree that divides it: 1, 2, 4, 5, 10"):
        rank_cut("k_proj", 100, 33, 0, 3)


def test_a_cut_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match="a cut of 8x32: the weight is"):
        cut_weight("w", weight("int4:g32", 8, 64), Cut.all_of(8), Cut(0, 16, 32, 16))
