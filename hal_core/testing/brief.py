"""The least of a kernel's specs that still shows every behaviour: for suites that run at every change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import combinations
from typing import Any, TypeVar

__all__ = ["brief", "meetings"]

#: How weights or caches are stored: each way appears once, with whatever comes beside it.
_STORED = ("weights", "gate", "up", "down", "keys", "values")
T = TypeVar("T")


def meetings(spec: Any, scales: str) -> set[Any]:
    """What a spec shows: its storage, and every two of its other values together."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "numerics"}
    stored = tuple(values.pop(name, None) for name in _STORED)
    return {stored, *combinations((*values.items(), ("scales of", scales)), 2)}


def brief(tried: Sequence[T], shows: Callable[[T], set[Any]]) -> tuple[T, ...]:
    """Few of them, in their order, that together show all that all of them show; greedy, always the same."""
    left = {index: shows(each) for index, each in enumerate(tried)}
    missing, kept = set[Any]().union(*left.values()), list[int]()
    while missing:
        best = max(left, key=lambda index: len(left[index] & missing))
        missing -= left.pop(best)
        kept.append(best)
    return tuple(tried[index] for index in sorted(kept))
