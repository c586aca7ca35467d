"""Packing is a bijection, on every shape, and refuses what does not fit."""

from __future__ import annotations

import pytest
import torch
from cpu.native_cases import make

from hal_backend_cpu import _native

SHAPES = [(1, 1), (16, 8), (17, 9), (5, 3), (48, 256), (130, 514), (33, 127)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("lead", [(), (3,), (2, 2)])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_values_round_trip(n, k, lead, bits):
    values = torch.randint(0, 256, (*lead, n, -(-k * bits // 8)), dtype=torch.uint8)
    packed = _native.pack(values, k, bits)
    assert packed.shape == (*lead, *_native.packed_shape(n, k, bits))
    assert torch.equal(_native.unpack(packed, n, k, bits), values)


def test_signed_bytes_round_trip():
    values = torch.randint(-128, 128, (19, 37), dtype=torch.int8)
    assert torch.equal(_native.unpack(_native.pack(values, 37, 8), 19, 37, 8, signed=True), values)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lead", [(), (4,)])
def test_groups_round_trip_bit_for_bit(dtype, lead):
    groups = torch.randn(*lead, 21, 5).mul(50).abs().to(dtype)
    packed = _native.pack_groups(groups)
    assert packed.shape == (*lead, *_native.groups_shape(21, 5))
    assert packed.dtype == dtype
    assert torch.equal(_native.unpack_groups(packed, 21), groups)


def test_padding_is_zero():
    packed = _native.pack(torch.full((3, 5), 255, dtype=torch.uint8), 10, 4)
    assert (packed[0, :, 3:] == 0).all()
    assert (packed[0, 1] == torch.where(torch.arange(16) < 3, 0x0F0F, 0)).all(), "k=8 and k=9 are codes 0 and 2 of word 1"
    assert (_native.pack_groups(torch.ones(3, 2))[0, :, 3:] == 0).all()


def test_nibble_order_gives_quads_of_consecutive_k():
    word = _native.pack(make(16, 8, 8, 4).values, 8, 4)[0, 0]
    plain = make(16, 8, 8, 4).codes
    for j in range(4):
        assert torch.equal((word >> 8 * j & 15).long(), plain[:, j])
        assert torch.equal((word >> (8 * j + 4) & 15).long(), plain[:, j + 4])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _native.pack(torch.zeros(4, 4, dtype=torch.uint8), 10, 4), "last dimension of 5"),
        (lambda: _native.pack(torch.zeros(4, 4, dtype=torch.int8), 8, 4), "int8; expected uint8"),
        (lambda: _native.pack(torch.zeros(4, 4), 8, 4), "float32; expected uint8"),
        (lambda: _native.pack(torch.zeros(4, dtype=torch.uint8), 8, 4), "dimensions"),
        (lambda: _native.pack(torch.zeros(4, 4, dtype=torch.uint8), 8, 3), "bits is 3"),
        (lambda: _native.pack(torch.zeros(0, 4, dtype=torch.uint8), 8, 4), "n is 0"),
        (lambda: _native.unpack(torch.zeros(1, 1, 16, dtype=torch.int32), 17, 8, 4), r"expected \[..., 2, 1, 16\]"),
        (lambda: _native.unpack(torch.zeros(1, 1, 16, dtype=torch.int32), 16, 2**62, 4), "k is"),
        (lambda: _native.unpack(torch.zeros(1, 1, 16, dtype=torch.int32), 16, 8, 4, signed=True), "signed"),
        (lambda: _native.pack_groups(torch.zeros(4, 4, dtype=torch.int64)), "int64; expected"),
        (lambda: _native.unpack_groups(torch.zeros(1, 1, 16), 17), "n=17"),
        (lambda: _native.ops.pack(torch.zeros(4, 8, dtype=torch.uint8).T, 8, 4), "not contiguous"),
    ],
)
def test_wrong_arguments_raise(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()
