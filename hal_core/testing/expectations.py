"""What a backend does not do by nature, and what it does not do yet: two lists, and they must not go stale.

An *unsupported* case is never run: the kernel cannot do it and will not. An *expected failure* is run and must fail: the list is
there to shrink, and a case that passes is reported. Keys are case ids or globs of them, values are reasons.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hal_core.errors import ValueDecodeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from importlib import metadata

__all__ = ["FILE_NAME", "NOTHING_EXPECTED", "REFERENCE_EXPECTATIONS", "Expectations", "expectations_of"]

#: A wheel may carry its lists beside hal_backend.json in its metadata.
FILE_NAME = "hal_conformance.json"


@dataclass(frozen=True)
class Expectations:
    """Case id or glob to reason."""

    unsupported: Mapping[str, str] = field(default_factory=dict)
    expected_failures: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("unsupported", "expected_failures"):
            table = getattr(self, name)
            wrong = [key for key, reason in table.items() if not (isinstance(key, str) and isinstance(reason, str) and reason.strip())]
            if wrong:
                raise ValueDecodeError(f"{name} of {wrong[0]!r}", "has no reason", "say why in a sentence")

    @classmethod
    def parse(cls, text: str) -> Expectations:
        """Decode ``{"unsupported": {id: reason}, "expected_failures": {id: reason}}``.

        Raises:
            ValueDecodeError: not JSON, an unknown key, or an entry without a reason.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            fix = f"see the example of {FILE_NAME} in docs/conformance.md"
            raise ValueDecodeError("conformance lists", f"not JSON: {error}", fix) from error
        if not isinstance(data, dict) or not all(isinstance(table, dict) for table in data.values()):
            raise ValueDecodeError("conformance lists", "not an object of objects", "use unsupported and expected_failures")
        unknown = set(data) - {"unsupported", "expected_failures"}
        if unknown:
            raise ValueDecodeError("conformance lists", f"unknown {', '.join(sorted(unknown))}", "use unsupported and expected_failures")
        return cls(**data)

    def merged(self, other: Expectations) -> Expectations:
        """Both; ``other`` wins."""
        return Expectations({**self.unsupported, **other.unsupported}, {**self.expected_failures, **other.expected_failures})

    def unsupported_reason(self, case: str) -> str:
        """Empty when the case is to run."""
        return _reason(self.unsupported, case)

    def failure_reason(self, case: str) -> str:
        """Empty when the case is to pass."""
        return _reason(self.expected_failures, case)

    def unmatched(self, cases: Iterable[str]) -> tuple[str, ...]:
        """Entries that no case has: the kernel was renamed, or the case is gone."""
        known = tuple(cases)
        entries = (*self.unsupported, *self.expected_failures)
        return tuple(entry for entry in entries if not any(_matches(case, entry) for case in known))


def _matches(case: str, entry: str) -> bool:
    # fnmatch reads [..] as a set of characters; ids have none, so a plain id is compared as it stands
    return case == entry or fnmatchcase(case, entry)


def _reason(table: Mapping[str, str], case: str) -> str:
    return next((reason for entry, reason in table.items() if _matches(case, entry)), "")


NOTHING_EXPECTED = Expectations()
#: Of the built-in backend, which has no wheel of its own.
REFERENCE_EXPECTATIONS = Expectations(
    unsupported={
        "reference.moe/compile/*": "the definition walks over experts in Python; it is read and compared with, not compiled",
        "reference.kv/compile/*": "the definition walks over sequences in Python; it is read and compared with, not compiled",
        "reference.embedding/compile/lookup,*": "the definition looks at the ids to name a wrong one, which a graph cannot",
    }
)


def expectations_of(distribution: metadata.Distribution | None) -> Expectations:
    """The lists in a wheel's metadata; none is fine.

    Raises:
        ValueDecodeError: they cannot be read.
    """
    text = distribution.read_text(FILE_NAME) if distribution is not None else None
    return Expectations.parse(text) if text else NOTHING_EXPECTED
