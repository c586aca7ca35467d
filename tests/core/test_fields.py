"""Bit streams, transposed copies and mapped tensors: the steps that readers are made of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_core.errors import FormatError
from hal_core.fields import join_fields, split_fields
from hal_core.formats.files import map_tensor
from hal_core.formats.packing import all_finite
from hal_core.turn import turn

MANY = settings(max_examples=150, deadline=None)


@MANY
@given(st.integers(1, 8), st.lists(st.integers(1, 5), max_size=2), st.integers(1, 70), st.integers(0, 2**32))
def test_split_of_join_is_the_codes_and_the_stream_is_little_endian(bits, lead, count, seed):
    codes = torch.randint(0, 1 << bits, (*lead, count), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    stream = join_fields(codes, bits)
    assert torch.equal(split_fields(stream, bits, count), codes)
    first = sum(code << (bits * index) for index, code in enumerate(codes.reshape(-1, count)[0].tolist()))
    assert int.from_bytes(bytes(stream.reshape(-1, stream.shape[-1])[0].tolist()), "little") == first


@MANY
@given(
    st.sampled_from([torch.uint8, torch.int32, torch.float32, torch.float16, torch.int64]),
    st.lists(st.integers(1, 3), max_size=1), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32),
)  # fmt: skip
def test_turn_moves_every_bit_pattern_and_never_aliases(dtype, lead, rows, columns, seed):
    size = torch.empty(0, dtype=dtype).element_size()
    words = torch.randint(0, 256, (*lead, rows, columns * size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    matrix = words.view(dtype)
    turned = turn(matrix)
    assert turned.is_contiguous()
    assert turned.data_ptr() != matrix.data_ptr()
    apart = words.view(*lead, rows, columns, size).transpose(-3, -2).contiguous()
    assert torch.equal(turned.contiguous().flatten().view(torch.uint8), apart.flatten())


@pytest.mark.parametrize(("offset", "count"), [(0, 100_000), (4096, 100_000), (12, 50_000), (3, 50_000), (8, 10)])
def test_mapped_tensors_equal_the_bytes_of_the_file(tmp_path, offset, count):
    data = torch.randint(0, 256, (offset + 4 * count + 5,), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(bytes(data.tolist()))
    got = map_tensor(tmp_path / "file", offset, (2, count // 2), torch.int32, "tensor a")
    assert torch.equal(got.view(torch.uint8).flatten(), data[offset : offset + 4 * count])


@pytest.mark.parametrize("count", [10, 1_000_000])
def test_a_file_that_ends_early_is_an_error_of_the_tensor(tmp_path, count):
    (tmp_path / "file").write_bytes(b"12345678")
    with pytest.raises(FormatError, match="tensor a: the file ends"):
        map_tensor(tmp_path / "file", 0, (count,), torch.int32, "tensor a")
    with pytest.raises(FormatError, match="cannot be read"):
        map_tensor(tmp_path / "none", 0, (count,), torch.int32, "tensor a")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_finite_agrees_with_isfinite(dtype):
    top = torch.finfo(dtype)
    good = torch.tensor([[0.0, -0.0, 1.0], [top.max, top.min, top.tiny]], dtype=dtype)
    assert all_finite(good)
    assert all_finite(good.t())
    assert all_finite(good[:0])
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not all_finite(torch.cat([good, torch.full((1, 3), bad, dtype=dtype)]))
