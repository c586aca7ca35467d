"""The native linear op against float64, on every instruction set this machine has."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from cpu.native_cases import USABLE, activations, error, linear, make

from hal_backend_cpu import _native

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
# Half an ulp of the result's dtype in the mean; what comes before it is float32.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}
# n, k, group: whole, odd tails, a partial last group, per channel, longer than a block.
SHAPES = [(64, 256, 32), (80, 512, 128), (37, 200, 64), (5, 17, 17), (33, 600, 600), (96, 1024, 512), (20, 104, 24)]


@pytest.mark.parametrize("isa", USABLE)
@pytest.mark.parametrize("zero", ["none", "zeros", "mins"])
@pytest.mark.parametrize("bits", [4, 8])
def test_equals_float64(bits, zero, isa):
    for i, (n, k, group) in enumerate(SHAPES):
        m = make(n, k, group, bits, zero, scale_dtype=FLOATS[i % 3], seed=i)
        bias = torch.randn(n).to(FLOATS[(i + 1) % 3]) if i % 2 else None
        for rows in (1, 3, 17, 64):
            for dtype in FLOATS:
                x = activations(rows, k, dtype)
                truth = x.double() @ m.weight().T + (0 if bias is None else bias.double())
                y = linear(x, m, isa, bias=bias)
                assert y.dtype == dtype
                assert error(y, truth) < TOLERANCE[dtype], (n, k, group, rows, dtype)


@pytest.mark.parametrize("isa", USABLE)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", ["none", "zeros", "mins"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_row_does_not_depend_on_its_batch_or_on_threads(isa, bits, zero, dtype):
    m = make(112, 384, 64, bits, zero)
    x = activations(71, 384, dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = linear(x, m, isa)
        torch.set_num_threads(1)
        assert torch.equal(linear(x, m, isa), whole)
        for start, rows in ((0, 1), (5, 2), (7, 3), (11, 4), (20, 7), (30, 8), (40, 13)):
            assert torch.equal(linear(x[start : start + rows].contiguous(), m, isa), whole[start : start + rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("isa", USABLE)
@pytest.mark.parametrize("zero", ["none", "zeros", "mins"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_non_finite_row_stays_alone_and_shows(isa, zero, dtype):
    m = make(48, 256, 32, 4, zero)
    x = activations(19, 256, dtype)
    clean = linear(x, m, isa)
    for bad in (float("nan"), float("inf"), float("-inf")):
        for row in (0, 9, 18):
            dirty = x.clone()
            dirty[row, 77] = bad
            y = linear(dirty, m, isa)
            assert not y[row].isfinite().all()
            if math.isnan(bad):
                assert y[row].isnan().all()
            keep = torch.arange(19) != row
            assert torch.equal(y[keep], clean[keep])


def test_nan_with_a_low_payload_stays_nan():
    x = activations(1, 64)
    x.view(torch.int32)[0, 3] = 0x7F800001
    for isa in USABLE:
        assert linear(x, make(16, 64, 32, 4), isa).isnan().all()


@pytest.mark.parametrize("isa", USABLE)
def test_perm_gathers_the_activations(isa):
    m = make(48, 256, 32, 4, "zeros")
    perm = torch.randperm(256).to(torch.int32)
    for dtype in FLOATS:
        x = activations(5, 256, dtype)
        assert torch.equal(linear(x, m, isa, perm=perm), linear(x[:, perm.long()].contiguous(), m, isa))


@pytest.mark.parametrize("isa", USABLE)
def test_out_variant_fills_a_poisoned_tensor_in_its_own_dtype(isa):
    m = make(37, 200, 64, 4, "zeros")
    x = activations(9, 200, torch.bfloat16)
    exact = linear(x.float(), m, isa)
    for dtype in FLOATS:
        out = torch.full((9, 37), float("nan"), dtype=dtype)
        _native.ops.linear_out(x, *m.packed, None, None, 37, 200, 64, 4, isa, out)
        assert error(out, exact) < TOLERANCE[dtype]


def test_shapes_of_x():
    m = make(32, 64, 32, 4)
    x = activations(6, 64)
    assert linear(x[:0], m).shape == (0, 32)
    assert torch.equal(linear(x.reshape(2, 3, 64), m).reshape(6, 32), linear(x, m))
    assert torch.equal(linear(x[0], m), linear(x, m)[0])


def test_more_rows_than_the_scratch_memory_holds():
    m = make(16, 32768, 128, 4)
    x = activations(131, 32768, torch.bfloat16)
    y = linear(x, m)
    assert torch.equal(y[-3:], linear(x[-3:].contiguous(), m))


def test_two_python_threads_share_the_op():
    m = make(256, 512, 64, 4, "zeros")
    packed = m.packed
    inputs = [activations(rows, 512, seed=rows) for rows in (3, 40)]
    truths = [linear(x, m) for x in inputs]
    wrong = []

    def work(which):
        for _ in range(30):
            y = _native.ops.linear(inputs[which], *packed, None, None, 256, 512, 64, 4, "auto")
            if not torch.equal(y, truths[which]):
                wrong.append(which)

    workers = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def replaced(**changes):
    """The arguments of a good call with some exchanged."""
    m = make(32, 64, 32, 4, "zeros")
    codes, scales, zeros, _ = m.packed
    arguments = {
        "x": activations(2, 64), "packed": codes, "scales": scales, "zeros": zeros, "mins": None, "perm": None, "bias": None,
        "n": 32, "k": 64, "group": 32, "bits": 4, "isa": "auto",
    }  # fmt: skip
    return {**arguments, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 63)}, r"\[2, 63\].*k=64"),
        ({"x": torch.zeros(2, 64, dtype=torch.float64)}, "float64; expected float32"),
        ({"x": torch.zeros(64, 2).T}, "not contiguous"),
        ({"x": torch.tensor(1.0)}, "dimensions"),
        ({"packed": torch.zeros(2, 8, 16)}, "packed is float32; expected int32"),
        ({"packed": torch.zeros(2, 7, 16, dtype=torch.int32)}, r"packed has shape \[2, 7, 16\]; expected \[2, 8, 16\]"),
        ({"packed": torch.zeros(2, 16, 16, dtype=torch.int32)[:, ::2]}, "not contiguous"),
        ({"scales": torch.zeros(2, 1, 16)}, r"scales has shape \[2, 1, 16\]; expected \[2, 2, 16\]"),
        ({"scales": torch.zeros(2, 2, 16, dtype=torch.int32)}, "scales is int32"),
        ({"zeros": torch.zeros(1, 2, 16, dtype=torch.uint8)}, "zeros has shape"),
        ({"zeros": torch.zeros(2, 2, 16, dtype=torch.int8)}, "zeros is int8; expected uint8"),
        ({"mins": torch.zeros(2, 2, 16)}, "exclude each other"),
        ({"mins": torch.zeros(2, 2, 15), "zeros": None}, "mins has shape"),
        ({"perm": torch.zeros(63, dtype=torch.int32)}, "perm has shape"),
        ({"perm": torch.arange(64)}, "perm is int64"),
        ({"perm": torch.full((64,), 64, dtype=torch.int32)}, "perm has an index outside 0 to 63"),
        ({"perm": torch.full((64,), -1, dtype=torch.int32)}, "perm has an index outside"),
        ({"bias": torch.zeros(31)}, "bias has shape"),
        ({"n": 33}, "expected"),
        ({"n": 2**62}, "n is 4611686018427387904"),
        ({"n": -16}, "n is -16"),
        ({"k": 2**40}, "k is 1099511627776"),
        ({"group": 0}, "group is 0"),
        ({"group": 12}, "group 12 does not divide"),
        ({"group": 64}, "scales has shape"),
        ({"bits": 3}, "bits is 3"),
        ({"bits": 8}, "expected"),
        ({"isa": "sse2"}, "isa is 'sse2'"),
    ],
)
def test_wrong_arguments_raise_with_their_numbers(changes, message):
    with pytest.raises(RuntimeError, match=message):
        _native.ops.linear(*replaced(**changes).values())


@pytest.mark.parametrize("out", [torch.zeros(2, 31), torch.zeros(32, 2).T, torch.zeros(2, 32, dtype=torch.int32)])
def test_wrong_out_raises(out):
    with pytest.raises(RuntimeError, match="out"):
        _native.ops.linear_out(*replaced().values(), out)
