"""The op that unpacks a checkpoint's words equals torch's definition bit for bit, on every shape and at any address."""

from __future__ import annotations

import pytest
import torch
from golden import goldens
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_backend_cpu import _native
from hal_backend_cpu.unpack import CpuUnpacker
from hal_core.errors import FormatError
from hal_core.formats import open_checkpoint, unpack
from hal_core.formats.unpack import torch_codes, turned, unpacked
from hal_core.registry import default_registry

ISAS = ("plain", "avx2")
#: Sides around the kernels' blocks of 8, 16, 32, 64, 96 and 128.
SIDES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 96, 100, 127, 128, 129, 260)
sides = st.sampled_from(SIDES)


def words_of(shape, seed, shift=0):
    """Random int32; ``shift`` bytes off the start of an allocation."""
    size = 4 * shape[0] * shape[1]
    data = torch.randint(0, 256, (size + 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if shift % 4:
        # torch makes no such view itself; a tensor over a mapped file can lie like this
        return torch.frombuffer(memoryview(data.numpy())[shift : shift + size], dtype=torch.int32).view(shape)
    return data[shift : shift + size].view(torch.int32).view(shape)


def same(found, wanted):
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.is_contiguous()
    return torch.equal(found.flatten().view(torch.uint8), wanted.flatten().view(torch.uint8))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_codes_equal_the_definition(isa, data):
    order, bits = data.draw(st.sampled_from(["rows", "columns", "awq"])), data.draw(st.sampled_from([2, 3, 4, 8]))
    signed, seed, shift = data.draw(st.booleans()), data.draw(st.integers(0, 2**31)), data.draw(st.sampled_from([0, 4, 1, 3]))
    if order == "rows":
        count = data.draw(sides)
        shape = data.draw(sides), -(-count * bits // 32)
    elif order == "columns":
        count = data.draw(sides) * 32
        shape = count * bits // 32, data.draw(sides)
    else:
        bits, count = 4, data.draw(sides)
        shape = count, data.draw(sides)
    words = words_of(shape, seed, shift)
    found = _native.unpack_words(words, order, bits, count, signed=signed, isa=isa)
    assert same(found, torch_codes(words.clone(), order, bits, count, signed))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.int32])
@settings(max_examples=60, deadline=None)
@given(rows=sides, columns=sides, seed=st.integers(0, 2**31))
def test_transposed_copies(isa, dtype, rows, columns, seed):
    data = torch.randint(0, 256, (rows * columns * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    matrix = data.view(dtype).view(rows, columns)
    assert same(_native.turn(matrix, isa), matrix.t().clone(memory_format=torch.contiguous_format))


@pytest.mark.parametrize("order", ["rows", "columns", "awq"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_large_matrix_in_threads(order, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shape, k = {"rows": ((1500, 333), 2661), "columns": ((333, 1500), 2664), "awq": ((1003, 700), 1003)}[order]
        words = words_of(shape, 5)
        assert same(_native.unpack_words(words, order, 4, k, signed=True), torch_codes(words, order, 4, k, True))
        assert same(_native.turn(words), words.t().contiguous())
    finally:
        torch.set_num_threads(before)


def test_readers_use_it(monkeypatch):
    assert "cpu.words" in [each.name for each in default_registry().unpackers()]
    called = []
    real = CpuUnpacker.codes

    def codes(self, *args):
        called.append(args[1])
        return real(self, *args)

    monkeypatch.setattr(CpuUnpacker, "codes", codes)
    monkeypatch.setattr(unpack, "_verdicts", {})
    words = words_of((512, 640), 3)
    assert same(unpacked(words, "columns", 4, 4096, True), torch_codes(words, "columns", 4, 4096, True))
    assert called == ["columns", "columns"], "a trial and the question"
    assert same(turned(words), words.t().contiguous())


@pytest.mark.parametrize("name", goldens.names())
def test_checkpoints_read_the_same_with_and_without_it(name, monkeypatch):
    try:
        checkpoint = open_checkpoint(goldens.folder(name))
    except FormatError:
        pytest.skip("a format that is refused, as tests/core/test_format_goldens.py holds")
    plain = {key: checkpoint.read(key) for key, entry in checkpoint.entries.items() if entry.quantized}
    monkeypatch.setattr(unpack, "_LEAST", 1)
    for key, weight in plain.items():
        found = checkpoint.read(key)
        assert all(same(found.tensors()[field], tensor) for field, tensor in weight.tensors().items()), key


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _native.unpack_words(ints(2, 3), "diagonal", 4, 8), "order is 'diagonal'"),
        (lambda: _native.unpack_words(ints(2, 3), "rows", 5, 8), "bits is 5"),
        (lambda: _native.unpack_words(ints(2, 3), "awq", 8, 2), "bits is 8; expected 4"),
        (lambda: _native.unpack_words(ints(2, 3), "rows", 4, 25), "expected 4 columns for 25 codes of 4 bits"),
        (lambda: _native.unpack_words(ints(2, 3), "rows", 4, 16), "expected 2 columns"),
        (lambda: _native.unpack_words(ints(2, 3), "columns", 4, 15), "fill whole words"),
        (lambda: _native.unpack_words(ints(2, 3), "columns", 4, 24), "expected 3 rows"),
        (lambda: _native.unpack_words(ints(2, 3), "awq", 4, 3), "expected 3 rows"),
        (lambda: _native.unpack_words(ints(2, 3), "rows", 4, 0), "count is 0"),
        (lambda: _native.unpack_words(ints(2, 3), "rows", 4, 2**62), "count is"),
        (lambda: _native.unpack_words(ints(0, 3), "rows", 4, 24), "number of rows is 0"),
        (lambda: _native.unpack_words(ints(2, 3, 1), "rows", 4, 24), "two dimensions"),
        (lambda: _native.unpack_words(ints(2, 3).float(), "rows", 4, 24), "float32; expected int32"),
        (lambda: _native.unpack_words(ints(3, 2).t(), "rows", 4, 24), "not contiguous"),
        (lambda: _native.unpack_words(ints(2, 3), "rows", 4, 24, isa="avx9"), "isa is 'avx9'"),
        (lambda: _native.turn(ints(2, 3).double()), "float64; expected elements"),
        (lambda: _native.turn(ints(3, 2).t()), "not contiguous"),
        (lambda: _native.turn(ints(3, 0)), "number of columns is 0"),
    ],
)
def test_wrong_arguments_raise(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()


def test_fake_kernels_give_the_same_shapes():
    for order, shape, bits, count in (("rows", (5, 4), 4, 27), ("columns", (6, 9), 3, 64), ("awq", (7, 3), 4, 7)):
        for signed in (False, True):
            real = _native.unpack_words(ints(*shape), order, bits, count, signed=signed)
            meta = torch.ops.hal_cpu.unpack_words(ints(*shape).to("meta"), order, bits, count, signed, "auto")
            assert (meta.shape, meta.dtype) == (real.shape, real.dtype)
    meta = torch.ops.hal_cpu.turn(ints(3, 4).to("meta"), "auto")
    assert tuple(meta.shape) == (4, 3)
