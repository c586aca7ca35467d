"""What a kernel does against what the asker tolerates."""

from __future__ import annotations

import pytest
from core import strategies as gen
from hypothesis import given
from hypothesis import strategies as st

from hal_core.errors import ValueDecodeError
from hal_core.numerics import ActivationQuant, Numerics, combined, numerics_from_word, outside
from hal_core.schemes import ActivationScheme, Granularity

INT8 = ActivationQuant("int8", "token")


def codes(request, does, dtype="bf16"):
    return [refusal.code for refusal in outside(request, does, dtype)]


@given(gen.numerics, gen.floats)
def test_a_request_tolerates_itself(numerics, dtype):
    if numerics.operand == "own":
        assert codes(numerics, numerics, dtype) == []


def test_int8_activations_do_not_pass_as_exact():
    does = Numerics(activations=(INT8,))
    assert codes(Numerics(), does) == ["numerics.activations"]
    assert codes(numerics_from_word("int8"), does) == []
    assert codes(does, Numerics()) == []


def test_all_mismatches_are_given_at_once():
    request = Numerics(deterministic=True, batch_invariant=True)
    does = Numerics(activations=(INT8,), weights="rescaled", operand="bf16", accumulation="bf16")
    assert codes(request, does, "fp32") == [
        "numerics.activations", "numerics.weights", "numerics.operand", "numerics.accumulation", "numerics.deterministic",
        "numerics.batch_invariant",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "does", "dtype", "refused"),
    [
        ("own", "own", "bf16", False),
        ("own", "bf16", "bf16", False),
        ("own", "fp32", "bf16", False),
        ("own", "tf32", "bf16", False),
        ("own", "tf32", "fp32", True),
        ("own", "bf16", "fp32", True),  # AMX-bf16 given fp32 inputs
        ("bf16", "bf16", "fp32", False),
        ("own", "bf16", "fp16", True),
        ("own", "fp16", "bf16", True),
        ("bf16", "fp16", "fp32", True),
    ],
)
def test_operands_are_not_rounded_more_coarsely_than_tolerated(asked, does, dtype, refused):
    assert (codes(Numerics(operand=asked), Numerics(operand=does), dtype) == ["numerics.operand"]) is refused


def test_words_of_the_command_line():
    assert numerics_from_word("exact") == Numerics()
    assert numerics_from_word("checkpoint") == Numerics()
    scheme = ActivationScheme("int8", Granularity.tensor(), dynamic=False)
    assert numerics_from_word("checkpoint", scheme).activations == (ActivationQuant("int8", "tensor", dynamic=False),)
    assert ActivationQuant("int8", "g32") in numerics_from_word("int8", group=32).activations
    assert numerics_from_word("bf16", group=32) == Numerics(operand="bf16")
    assert numerics_from_word("int8:rescaled").weights == "rescaled"
    assert numerics_from_word("int8:token", group=32).activations == (ActivationQuant("int8", "token"),)
    groups = (ActivationQuant("int8", "g128"), ActivationQuant("int8", "g32"))
    assert numerics_from_word("int8:group", group=32) == Numerics(activations=groups)
    with pytest.raises(ValueDecodeError, match="numerics 'fast'"):
        numerics_from_word("fast")


@given(st.lists(gen.numerics, min_size=2, max_size=4))
def test_combined_is_no_stricter_than_any_part(parts):
    whole = combined(parts)
    assert not whole.batch_invariant
    for part in parts:
        assert set(part.activations) <= set(whole.activations)
        assert part.deterministic or not whole.deterministic


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"activations": (INT8, INT8)}, "not sorted and unique"),
        ({"weights": "rounded"}, "numerics.weights"),
        ({"operand": "int8"}, "numerics.operand"),
        ({"accumulation": "own"}, "numerics.accumulation"),
    ],
)
def test_numerics_that_cannot_be(changes, shown):
    with pytest.raises(ValueDecodeError, match=shown):
        Numerics(**changes)
