"""Embedding rows are the definition itself, bit for bit."""

from __future__ import annotations

import pytest
import torch
from cpu.native_cases import activations, linear, make

from hal_backend_cpu import _native

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def lookup(ids, m, dtype=torch.float32, perm=None):
    return _native.ops.lookup(ids, *m.packed, perm, m.n, m.k, m.group, m.bits, dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", ["none", "zeros", "mins"])
@pytest.mark.parametrize("scale_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_are_bit_exact(bits, zero, scale_dtype, dtype):
    for n, k, group in ((50, 96, 32), (17, 33, 33), (21, 200, 64)):
        m = make(n, k, group, bits, zero, scale_dtype=scale_dtype)
        ids = torch.tensor([[0, n - 1, 3], [3, 5, 16]])
        assert torch.equal(lookup(ids, m, dtype), m.weight(torch.float32).to(dtype)[ids])


def test_every_half_scale_converts_exactly():
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    scales = bits.view(torch.float16)
    scales = scales[scales.isfinite()][:, None]
    n = scales.shape[0]
    m = make(n, 8, 8, 4)
    m.scales = scales
    for dtype in FLOATS:
        assert torch.equal(lookup(torch.arange(n), m, dtype), m.weight(torch.float32).to(dtype))


def test_rounding_to_each_dtype_is_torchs():
    # Products across the range of the results: subnormal and overflowing ones too.
    g = torch.Generator().manual_seed(3)
    m = make(512, 64, 8, 4)
    m.scales = torch.randn(512, 8, generator=g) * torch.exp2(torch.randint(-45, 20, (512, 8), generator=g).float())
    for dtype in FLOATS:
        assert torch.equal(lookup(torch.arange(512), m, dtype), m.weight(torch.float32).to(dtype))


def test_perm_puts_columns_back():
    m = make(20, 64, 32, 4, "zeros")
    perm = torch.randperm(64).to(torch.int32)
    plain = lookup(torch.arange(20), m)
    assert torch.equal(lookup(torch.arange(20), m, perm=perm)[:, perm.long()], plain)


def test_table_and_tied_head_agree():
    m = make(40, 64, 32, 8)
    x = activations(3, 64)
    table = lookup(torch.arange(40), m)
    torch.testing.assert_close(linear(x, m), x @ table.T, rtol=1e-5, atol=1e-4)


def test_empty_and_scalar_ids():
    m = make(20, 64, 32, 4)
    assert lookup(torch.zeros(0, dtype=torch.int64), m).shape == (0, 64)
    assert lookup(torch.tensor(7), m).shape == (64,)


@pytest.mark.parametrize("wrong", [20, -1, 2**40])
def test_id_out_of_range_names_position_and_id(wrong):
    with pytest.raises(RuntimeError, match=rf"ids\[2\] .* is {wrong}; expected 0 to 19"):
        lookup(torch.tensor([0, 1, wrong]), make(20, 64, 32, 4))


@pytest.mark.parametrize(
    ("ids", "dtype", "perm", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), torch.float32, None, "int32; expected int64"),
        (torch.zeros(2, 2, dtype=torch.int64)[:, 0], torch.float32, None, "not contiguous"),
        (torch.zeros(2, dtype=torch.int64), torch.float64, None, "dtype is float64"),
        (torch.zeros(2, dtype=torch.int64), torch.float32, torch.full((64,), 64, dtype=torch.int32), r"perm\[0\] is 64"),
    ],
)
def test_wrong_arguments_raise(ids, dtype, perm, message):
    with pytest.raises(RuntimeError, match=message):
        lookup(ids, make(20, 64, 32, 4), dtype, perm)
