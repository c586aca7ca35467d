"""Strict JSON for frozen dataclasses: unknown fields, wrong types and missing fields are errors with a path.

Nothing is coerced: a float is not an int, a string is not a number. Non-finite floats are refused.
A class may name one of its class attributes in ``__json_tag__``: it is written as a field, and tells the arms of a
union apart, so that an error is reported against the right one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
import types
import typing
from enum import Enum
from typing import Any, TypeVar, Union, cast

from hal_core.errors import HalError, ValueDecodeError

__all__ = ["JsonValue", "dumps", "from_json", "loads", "to_json"]

JsonValue = Any
T = TypeVar("T")


def to_json(value: object) -> JsonValue:
    """Plain JSON types of a value made of frozen dataclasses, enums, tuples and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        tag = getattr(value, "__json_tag__", None)
        tagged = {tag: getattr(value, tag)} if tag else {}
        return {**tagged, **{f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueDecodeError(f"value of type {type(value).__name__}", "has no JSON form", "keep tensors and objects out of values")


def dumps(value: object, indent: int | None = None) -> str:
    """JSON text of a value; deterministic, so equal values give equal text."""
    return json.dumps(to_json(value), indent=indent, sort_keys=True, allow_nan=False)


def loads(cls: type[T], text: str) -> T:
    """Decode JSON text into ``cls``.

    Raises:
        ValueDecodeError: not JSON, or not the JSON of a ``cls``.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueDecodeError(f"JSON of {cls.__name__}", str(error), "give the text that dumps() wrote") from error
    return from_json(cls, data)


def from_json(cls: type[T], data: JsonValue, where: str = "$") -> T:
    """Decode plain JSON types into the frozen dataclass ``cls``; ``where`` is the path shown in errors."""
    if not isinstance(data, dict):
        raise _mismatch(where, f"an object ({cls.__name__})", data)
    hints = _hints(cast(Any, cls))
    fields = {f.name: f for f in dataclasses.fields(cast(Any, cls))}
    data = _without_tag(cls, data, where)
    for key in data:
        if key not in fields:
            raise ValueDecodeError(f"{where}.{key}", f"unknown field of {cls.__name__}", f"known fields: {', '.join(fields)}")
    kwargs: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            kwargs[name] = _decode(hints[name], data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueDecodeError(f"{where}.{name}", "missing", f"{cls.__name__} needs it")
    try:
        return cls(**kwargs)
    except HalError as error:
        raise ValueDecodeError(where, str(error)) from error


def _without_tag(cls: type, data: dict[str, JsonValue], where: str) -> dict[str, JsonValue]:
    tag = getattr(cls, "__json_tag__", None)
    if tag is None or tag not in data:
        return data
    if data[tag] != getattr(cls, tag):
        raise _mismatch(f"{where}.{tag}", repr(getattr(cls, tag)), data[tag])
    return {key: value for key, value in data.items() if key != tag}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _mismatch(where: str, wanted: str, data: JsonValue) -> ValueDecodeError:
    # reprlib bounds depth and length: the data may be hostile.
    return ValueDecodeError(where, f"expected {wanted}, found {reprlib.repr(data)}")


def _decode(hint: Any, data: JsonValue, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is Union or origin is types.UnionType:
        return _decode_optional(hint, data, where)
    if origin is tuple:
        return _decode_tuple(hint, data, where)
    if dataclasses.is_dataclass(hint):
        return from_json(cast(type, hint), data, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(data)
        except ValueError as error:
            raise _mismatch(where, "one of " + ", ".join(repr(m.value) for m in hint), data) from error
    return _decode_scalar(hint, data, where)


def _decode_optional(hint: Any, data: JsonValue, where: str) -> Any:
    arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
    if data is None and len(arms) < len(typing.get_args(hint)):
        return None
    tags = {getattr(arm, "__json_tag__", None) for arm in arms}
    if len(arms) > 1 and None not in tags:
        return from_json(_tagged_arm(arms, data, where), data, where)
    errors = []
    for arm in arms:
        try:
            return _decode(arm, data, where)
        except ValueDecodeError as error:
            errors.append(error)
    raise errors[0]


def _tagged_arm(arms: list[Any], data: JsonValue, where: str) -> type:
    tag = arms[0].__json_tag__
    known = {getattr(arm, tag): arm for arm in arms}
    word = data.get(tag) if isinstance(data, dict) else None
    if not isinstance(word, str) or word not in known:
        raise _mismatch(f"{where}.{tag}", "one of " + ", ".join(map(repr, known)), word if isinstance(data, dict) else data)
    return cast(type, known[word])


def _decode_tuple(hint: Any, data: JsonValue, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _mismatch(where, "a list", data)
    args = typing.get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if len(args) != len(data):
        raise _mismatch(where, f"a list of {len(args)}", data)
    return tuple(_decode(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, data, strict=True)))


def _decode_scalar(hint: Any, data: JsonValue, where: str) -> Any:
    if hint is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        try:
            number = float(data)
        except OverflowError as error:
            raise _mismatch(where, "a number that fits a double", data) from error
        if not math.isfinite(number):
            raise _mismatch(where, "a finite number", data)
        return number
    if hint in (int, str, bool) and type(data) is hint:
        return data
    raise _mismatch(where, getattr(hint, "__name__", str(hint)), data)
