"""Strict JSON: nothing is coerced, nothing unknown is dropped, and hostile data gives one clear error."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

import pytest

from hal_core.errors import ValueDecodeError
from hal_core.jsonable import dumps, from_json, loads, to_json
from hal_core.schemes import WeightScheme
from hal_core.selection import Parameter, Selection
from hal_core.spec import LinearSpec, spec_from_json, spec_to_json


class Colour(str, Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    size: int
    ratio: float = 0.5


@dataclass(frozen=True)
class Outer:
    colour: Colour
    inner: Inner
    pair: tuple[int, int]
    many: tuple[Inner, ...] = ()
    maybe: str | None = None
    flag: bool = False


OUTER = Outer(Colour.RED, Inner(3), (1, 2), (Inner(4, 1.0),), "x", True)


def test_round_trip_keeps_types():
    assert loads(Outer, dumps(OUTER)) == OUTER
    assert dumps(OUTER) == dumps(loads(Outer, dumps(OUTER)))


@pytest.mark.parametrize(
    ("path", "value", "shown"),
    [
        ("colour", "blue", "'red'"),
        ("flag", 1, "bool"),
        ("flag", "true", "bool"),
        ("pair", [1], "a list of 2"),
        ("pair", [1, 2.0], "int"),
        ("pair", "12", "a list"),
        ("many", {"0": 1}, "a list"),
        ("inner", None, "an object (Inner)"),
        ("maybe", 3, "str"),
    ],
)
def test_wrong_types_name_the_path(path, value, shown):
    data = {**to_json(OUTER), path: value}
    with pytest.raises(ValueDecodeError, match=rf"\$\.{path}") as caught:
        from_json(Outer, data)
    assert shown in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", str(10**400)])
def test_numbers_that_are_no_finite_double_are_refused(number):
    with pytest.raises(ValueDecodeError):
        loads(Inner, f'{{"size": 1, "ratio": {number}}}')


def test_unknown_and_missing_fields():
    with pytest.raises(ValueDecodeError, match=r"\$\.inner\.colour: unknown field of Inner; known fields: size, ratio"):
        from_json(Outer, {**to_json(OUTER), "inner": {"size": 1, "colour": "red"}})
    with pytest.raises(ValueDecodeError, match=r"\$\.size: missing"):
        loads(Inner, "{}")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '"x"', "[" * 100_000, "{" * 500, '{"a":' * 100_000, "\x00", '{"size": 1' + "0" * 5000 + "}"]
)
def test_hostile_text_is_one_error(text):
    with pytest.raises(ValueDecodeError):
        loads(Outer, text)


def test_deep_or_huge_values_are_not_echoed():
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    for bad in (deep, "x" * 10_000, {"k" * 5000: 1}):
        with pytest.raises(ValueDecodeError) as caught:
            from_json(Inner, {"size": bad})
        assert len(str(caught.value)) < 300


def test_errors_of_the_value_itself_carry_the_path():
    with pytest.raises(ValueDecodeError, match=r"\$\.candidates\[0\]: candidate x: verdict and refusals contradict"):
        from_json(Selection, {"candidates": [{"kernel": "x", "backend": "x", "accepted": False}], **_selection_rest()})


def _selection_rest():
    spec = {"op": "linear", "n": 1, "k": 1, "weights": {"dtype": "int8"}}
    return {
        "spec": spec, "policy": "auto", "layout": "l", "numerics": {},
        "intervals": [{"m_min": 1, "m_max": None, "kernel": "x.y"}],
    }  # fmt: skip


def test_a_tag_tells_the_arms_of_a_union_apart():
    rest = {**_selection_rest(), "candidates": []}
    assert isinstance(from_json(Selection, rest).spec, LinearSpec)
    with pytest.raises(ValueDecodeError, match=r"\$\.spec\.num_experts: missing; MoESpec needs it"):
        from_json(Selection, {**rest, "spec": {"op": "moe"}})
    for op in ({}, {"op": "conv"}, {"op": ["moe"]}, 3):
        with pytest.raises(ValueDecodeError, match=r"\$\.spec\.op"):
            from_json(Selection, {**rest, "spec": op})
    with pytest.raises(ValueDecodeError, match="expected 'linear', found 'moe'"):
        from_json(LinearSpec, {"op": "moe", "n": 1, "k": 1, "weights": {"dtype": "int8"}})


def test_scalars_of_a_union_keep_their_type():
    for value in (3, 3.5, True, "3", 3.0):
        again = loads(Parameter, dumps(Parameter("p", value))).value
        assert again == value
        assert type(again) is type(value)


def test_objects_have_no_json_form():
    with pytest.raises(ValueDecodeError, match="value of type object"):
        dumps(object())


@pytest.mark.parametrize("data", [None, [], "linear", {}, {"op": 3}, {"op": "conv"}, {"op": {}}])
def test_spec_without_a_known_op(data):
    with pytest.raises(ValueDecodeError, match=r"spec\.op"):
        spec_from_json(data)


def test_a_stored_spec_says_its_op():
    spec = LinearSpec(8, 8, WeightScheme("int8"))
    assert json.loads(dumps(spec))["op"] == "linear"
    assert spec_from_json(spec_to_json(spec)) == spec
