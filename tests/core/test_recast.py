"""Bytes as elements of another size, whatever the strides and wherever they begin."""

from __future__ import annotations

import pytest
import torch

from hal_core.canonical import unpack_nibbles
from hal_core.fields import join_fields, split_fields
from hal_core.formats.bitstream import canonical_codes
from hal_core.formats.gguf_blocks import QUANTIZED, block_size, pack_blocks, unpack_blocks
from hal_core.recast import recast

DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


def shapes_of(flat: torch.Tensor):
    """The same bytes with odd strides in dimensions of one, turned, and at odd places."""
    yield flat
    yield flat[None]
    yield torch.cat([flat[:1], flat])[1:]
    yield flat.as_strided((1, 1, len(flat)), (3, 17, 1))
    yield torch.stack([flat, flat], dim=1)[:, 0]


@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
def test_bytes_are_kept_under_every_stride_and_offset(given, wanted):
    flat = torch.arange(64, dtype=torch.uint8).view(given)
    for tensor in shapes_of(flat):
        got = recast(tensor, wanted)
        assert torch.equal(got.flatten(), flat.view(wanted))
        assert got.shape == (*tensor.shape[:-1], 64 // wanted.itemsize)
    one = flat[:1].as_strided((1, 1), (3, 5))
    if wanted.itemsize <= given.itemsize:
        assert torch.equal(recast(one, wanted)[0], flat[:1].view(wanted))


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0,), (3, 0, 8)])
def test_nothing_has_a_shape_too(shape):
    for tensor in (torch.empty(shape, dtype=torch.int32), torch.empty(shape[::-1], dtype=torch.int32).permute(*range(len(shape))[::-1])):
        assert recast(tensor, torch.uint8).shape == (*shape[:-1], shape[-1] * 4)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(("n", "count"), [(1, 1), (3, 1), (1, 3)])
def test_gguf_tensors_of_one_block_or_row_are_read(kind, n, count):
    gguf = pytest.importorskip("gguf")
    number = gguf.GGMLQuantizationType[kind]
    nbytes = gguf.GGML_QUANT_SIZES[number][1]
    data = torch.randint(0, 60, (n, count * nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(n + count))
    weight = unpack_blocks(data, kind, (n, count * block_size(kind)), "weight")
    assert torch.equal(weight.dequantize(), torch.from_numpy(gguf.quants.dequantize(data.numpy(), number)))
    assert torch.equal(pack_blocks(weight, kind), data)


def test_nibbles_of_turned_bytes():
    packed = torch.arange(24, dtype=torch.uint8).view(4, 6)
    assert torch.equal(unpack_nibbles(packed.T, 8), unpack_nibbles(packed.T.contiguous(), 8))
    assert unpack_nibbles(torch.empty(6, 0, dtype=torch.uint8).T, 12).shape == (0, 12)


@pytest.mark.parametrize("bits", [2, 3, 5, 7])
def test_streams_that_begin_at_an_odd_byte(bits):
    codes = torch.arange(17, dtype=torch.uint8)[None] % (1 << bits)
    stream = join_fields(codes[:, 1:], bits)
    assert torch.equal(stream, join_fields(codes[:, 1:].clone(), bits))
    moved = torch.cat([stream[:, :1], stream], dim=1)[:, 1:]
    assert torch.equal(split_fields(moved, bits, 16), codes[:, 1:])


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0, 0)])
def test_streams_of_nothing(shape):
    nothing = torch.empty(shape, dtype=torch.uint8)
    assert join_fields(nothing, 3).shape == (shape[0], shape[1] // 8 * 3)
    assert not split_fields(nothing, 3, 8).any()
    assert canonical_codes(torch.empty(shape, dtype=torch.int32), 3, 0, signed=True).shape == (shape[0], 0)
