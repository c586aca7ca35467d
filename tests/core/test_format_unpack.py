"""Readers' ops of backends: found through the registry, tried before they are used, never trusted over torch."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from core import fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_core.contract import checked_unpackers
from hal_core.formats import unpack
from hal_core.formats.bitstream import pack_fields
from hal_core.formats.nibble_pairs import COLUMNS
from hal_core.formats.unpack import ORDERS, torch_codes, turned, turned_fields, turned_words, unpacked
from hal_core.notes import forget_notes, told_notes
from hal_core.registry import RegisteredUnpacker, Registry


class Torch:
    """An unpacker that is right, and counts its calls."""

    name = "torch"

    def __init__(self):
        self.calls = 0

    def codes(self, words, order, bits, count, signed):
        self.calls += 1
        return torch_codes(words, order, bits, count, signed)

    def turn(self, matrix):
        self.calls += 1
        return matrix.t().contiguous()


class Late(Torch):
    """Right in its trial only."""

    def codes(self, words, order, bits, count, signed):
        if words.numel() > 1 << 14:
            raise MemoryError("too large for me")
        return super().codes(words, order, bits, count, signed)


class Wrong(Torch):
    def codes(self, words, order, bits, count, signed):
        return super().codes(words, order, bits, count, signed) ^ 1

    def turn(self, matrix):
        return matrix


class Raising(Torch):
    def codes(self, words, order, bits, count, signed):
        raise SystemError("no such instruction")


@pytest.fixture
def offered(monkeypatch):
    """Makes a list of unpackers those of the installed backends."""

    def offer(*unpackers):
        class Fake:
            def unpackers(self):
                return tuple(RegisteredUnpacker(f"fake.{each.name}", each) for each in unpackers)

        monkeypatch.setattr("hal_core.registry.default_registry", Fake)
        monkeypatch.setattr(unpack, "_verdicts", {})
        forget_notes()

    yield offer
    forget_notes()


def large(*shape, seed=1):
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 90), st.sampled_from([2, 3, 4, 8]), st.booleans(), st.integers(0, 2**31))
def test_rows_give_back_the_codes_that_were_packed(n, k, bits, signed, seed):
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    found = torch_codes(pack_fields(codes, bits), "rows", bits, k, signed)
    assert torch.equal(_plain(found, bits, k, signed), codes)


def _plain(found, bits, k, signed):
    half = 1 << (bits - 1)
    if bits == 4:
        codes = torch.stack([found & 15, found >> 4], dim=-1).flatten(-2)[:, :k]
        return codes ^ 8 if signed else codes
    return (found.int() + half).to(torch.uint8) if signed else found


@pytest.mark.parametrize(("n", "k"), [(8, 1), (16, 2), (24, 77), (320, 130)])
@pytest.mark.parametrize("signed", [False, True])
def test_awq_words_give_each_column_its_codes(n, k, signed):
    codes = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    words = pack_fields(codes.view(k, n // 8, 8)[..., COLUMNS].reshape(k, n), 4)
    assert torch.equal(_plain(torch_codes(words, "awq", 4, k, signed), 4, k, signed), codes.t())


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9), st.sampled_from([2, 3, 4, 8]), st.integers(0, 2**31))
def test_zero_points_along_either_dimension(n, groups, bits, seed):
    zeros = torch.randint(0, 1 << bits, (groups, n), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    words = pack_fields(zeros, bits)
    for found in (turned_fields(words, bits, n), turned_words(words.t().contiguous(), bits, n)):
        assert found.dtype == torch.uint8
        assert found.is_contiguous()
        assert torch.equal(found, zeros.t())


def test_a_backends_op_serves_large_tensors_only(offered):
    mine = Torch()
    offered(mine)
    unpacked(large(10, 20), "rows", 4, 160, False)
    assert mine.calls == 0
    words = large(300, 400)
    assert torch.equal(unpacked(words, "columns", 4, 2400, True), torch_codes(words, "columns", 4, 2400, True))
    assert mine.calls == 2, "its trial and the question"
    unpacked(words, "columns", 4, 2400, True)
    assert mine.calls == 3
    assert torch.equal(turned(words), words.t())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("broken", "told"), [(Wrong, "other bytes"), (Raising, "no such instruction"), (Late, "too large")])
def test_a_broken_op_is_told_and_torch_serves(offered, broken, told, order):
    offered(broken(), good := Torch())
    words = large(512, 256)
    k = {"rows": 2048, "columns": 4096, "awq": 512}[order]
    with pytest.warns(UserWarning, match=told):
        found = unpacked(words, order, 4, k, False)
    assert torch.equal(found, torch_codes(words, order, 4, k, False))
    assert good.calls == 2, "the next one is asked"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unpacked(words, order, 4, k, False)
    assert [note.count for note in told_notes()] == [1]


def test_a_transposed_copy_that_is_wrong_is_not_used(offered):
    offered(Wrong())
    matrix = torch.randn(300, 400).half()
    with pytest.warns(UserWarning, match="other bytes"):
        assert torch.equal(turned(matrix), matrix.t())


@pytest.mark.parametrize(
    ("offer", "problem"),
    [
        ("7", "unpackers is 7"),
        ("lambda: (object(),)", "has no method codes"),
        ("lambda: (type('U', (), {}),)", "is a class"),
        ("lambda: (type('U', (), {'name': 'a b', 'codes': print, 'turn': print})(),)", "letters, digits"),
        ("lambda: (type('U', (), {'name': 'a', 'codes': print, 'turn': print})(),) * 2", "registered 2 times"),
    ],
)
def test_an_invalid_offer_is_refused_when_it_registers(tmp_path, monkeypatch, offer, problem):
    code = fakes.PLUGIN.format(manifest=_manifest("odd"), devices=("cpu",), kernels="[kernel('fast')]")
    fakes.install(tmp_path, "odd", code=code + f"\nbackend.unpackers = {offer}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry(machine=fakes.MACHINE)
    row = next(row for row in registry.rows() if row.name == "odd")
    assert row.status == "failed"
    assert any(problem in refusal.found for refusal in row.refusals), row.refusals
    assert not any(each.name.startswith("odd.") for each in registry.unpackers())


def _manifest(name):
    import json

    return json.dumps(fakes.manifest(name))


def test_a_valid_offer_is_registered_under_its_backend(tmp_path, monkeypatch):
    code = fakes.PLUGIN.format(manifest=_manifest("fine"), devices=("cpu",), kernels="[kernel('fast')]")
    offer = "backend.unpackers = lambda: (type('U', (), {'name': 'words', 'codes': print, 'turn': print})(),)"
    fakes.install(tmp_path, "fine", code=f"{code}\n{offer}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "fine.words" in [each.name for each in Registry(machine=fakes.MACHINE).unpackers()]


def test_a_backend_need_not_offer_any():
    assert checked_unpackers(object()) == ((), ())


def test_a_verdict_is_not_that_of_an_unpacker_that_is_gone(offered, monkeypatch):
    """A registry that is made anew may put its unpackers where others were."""
    offered()
    held, words = [], large(512, 256)

    class Refreshed:
        def unpackers(self):
            return tuple(held)

    # patched once: a patch would hold what it replaces
    monkeypatch.setattr("hal_core.registry.default_registry", Refreshed)
    for round_of in range(5):
        held[:] = [RegisteredUnpacker(f"fake.{round_of}", Wrong())]
        with pytest.warns(UserWarning, match="other bytes"):
            unpacked(words, "rows", 4, 2048, False)
        held.clear()
        gc.collect()
        for good in [Torch() for _ in range(20)]:
            held[:] = [RegisteredUnpacker("fake.good", good)]
            unpacked(words, "rows", 4, 2048, False)
            assert good.calls == 2, "its trial and the question"
        held.clear()
