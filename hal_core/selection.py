"""What was chosen for a spec, and every reason why not for all the others; a value that can be stored and compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.errors import ValueDecodeError
from hal_core.jsonable import JsonValue, dumps, loads, to_json
from hal_core.numerics import Numerics
from hal_core.refusal import Refusal
from hal_core.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Candidate",
    "Change",
    "Interval",
    "Padding",
    "Parameter",
    "Selection",
    "SelectionDiff",
    "Transform",
    "candidates_text",
    "changes_between",
    "diff",
    "keyed_candidates",
    "widened",
]


@dataclass(frozen=True)
class Parameter:
    """A tunable of a kernel and the value it runs with."""

    name: str
    value: str | int | float | bool


@dataclass(frozen=True)
class Interval:
    """Batch sizes ``m_min <= M <= m_max`` (None: no upper end) and the kernel that serves them, by its full name."""

    m_min: int
    m_max: int | None
    kernel: str
    parameters: tuple[Parameter, ...] = ()

    def __post_init__(self) -> None:
        if self.m_min < 1 or (self.m_max is not None and self.m_max < self.m_min):
            raise ValueDecodeError("interval", f"{self.m_min} to {self.m_max} holds no batch size")

    def __str__(self) -> str:
        span = f"M >= {self.m_min}" if self.m_max is None else f"M = {self.m_min} to {self.m_max}"
        return f"{self.kernel} ({', '.join([span, *(f'{p.name}={p.value}' for p in self.parameters)])})"


@dataclass(frozen=True)
class Transform:
    """A change of the stored weights that loses information, with the largest relative L2 error it adds."""

    name: str
    error_bound: float

    def __str__(self) -> str:
        return f"{self.name} (adds at most {self.error_bound:g} relative L2)"


@dataclass(frozen=True)
class Padding:
    """A dimension that the kernel widens in its packed form."""

    dim: str
    asked: int
    padded: int


def widened(*dims: tuple[str, int, int]) -> tuple[Padding, ...]:
    """Of ``(name, size, multiple)`` those that are widened to the next multiple."""
    return tuple(Padding(name, size, -(-size // multiple) * multiple) for name, size, multiple in dims if size % multiple)


@dataclass(frozen=True)
class Candidate:
    """One kernel (or a backend without kernels for this op, then ``kernel`` is its name) and its verdict.

    ``accepted`` and not ``chosen``: it could serve, and another ranks higher or shares the chosen layout.
    """

    kernel: str
    backend: str
    accepted: bool
    chosen: bool = False
    priority: int = 0
    refusals: tuple[Refusal, ...] = ()

    def __post_init__(self) -> None:
        if self.accepted == bool(self.refusals) or (self.chosen and not self.accepted):
            raise ValueDecodeError(f"candidate {self.kernel}", "verdict and refusals contradict each other", "accepted means no refusal")


@dataclass(frozen=True)
class Selection:
    """One layout, the intervals of M with the kernels that share it, and all candidates.

    numerics: what is done at whatever batch size. notes: what the user should be told once. tuned: where a tuned row came from.
    """

    spec: Spec
    policy: str
    layout: str
    intervals: tuple[Interval, ...]
    candidates: tuple[Candidate, ...]
    numerics: Numerics
    transforms: tuple[Transform, ...] = ()
    padding: tuple[Padding, ...] = ()
    adapters: tuple[str, ...] = ()
    tuned: str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ends: list[int | None] = [0, *(interval.m_max for interval in self.intervals)]
        starts = [interval.m_min for interval in self.intervals]
        if ends[-1] is not None or any(end is None or end + 1 != start for end, start in zip(ends, starts)):  # noqa: B905
            raise ValueDecodeError("selection.intervals", f"{list(map(str, self.intervals))} do not cover every M >= 1 once")

    @property
    def kernel(self) -> str:
        """Full name of the kernel that prepares the weights: the one for the largest batches."""
        return self.intervals[-1].kernel

    @property
    def backend(self) -> str:
        return self.kernel.partition(".")[0]

    @property
    def kernels(self) -> tuple[str, ...]:
        """Full names of all kernels that run, each once, by rising M."""
        return tuple(dict.fromkeys(interval.kernel for interval in self.intervals))

    @classmethod
    def from_json(cls, text: str) -> Selection:
        """Decode the JSON text that :meth:`dumps` wrote."""
        return loads(cls, text)

    def to_json(self) -> JsonValue:
        """Plain JSON types."""
        return to_json(self)

    def dumps(self, indent: int | None = 2) -> str:
        """JSON text; equal selections give equal text."""
        return dumps(self, indent)

    def __str__(self) -> str:
        lines = [str(self.spec), f"  policy:   {self.policy}", f"  chosen:   {', '.join(map(str, self.intervals))}"]
        lines += [f"  layout:   {self.layout}", f"  numerics: {self.numerics}"]
        lines += [f"  changes:  {transform}" for transform in self.transforms]
        lines += [f"  padding:  {p.dim} {p.asked} to {p.padded}" for p in self.padding]
        lines += [f"  adapters: {', '.join(self.adapters)}"] if self.adapters else []
        lines += [f"  tuned:    {self.tuned}"] if self.tuned else []
        # A note's further lines repeat the reasons that follow below.
        lines += [f"  note:     {note.splitlines()[0].rstrip(':')}" for note in self.notes]
        return "\n".join([*lines, *candidates_text(self.candidates)])


def candidates_text(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Lines for those that were not chosen: the accepted ones, then each refused one with all its reasons."""
    lines = [f"  accepted: {c.kernel} (priority {c.priority})" for c in candidates if c.accepted and not c.chosen]
    for candidate in candidates:
        if not candidate.accepted:
            lines.append(f"  refused:  {candidate.kernel}")
            lines += [f"    {reason}" for reason in candidate.refusals]
    return tuple(lines)


@dataclass(frozen=True)
class Change:
    """A field of two selections that differs; an empty text means that one of them does not have it."""

    field: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.field}: {self.before or '(none)'} -> {self.after or '(none)'}"


@dataclass(frozen=True)
class SelectionDiff:
    """All changes between two selections; false when there are none."""

    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or "no difference"


def diff(a: Selection, b: Selection) -> SelectionDiff:
    """What differs from ``a`` to ``b``; candidates are matched by name and refusals by code, not by position."""
    return SelectionDiff(changes_between(keyed_candidates(to_json(a)), keyed_candidates(to_json(b))))


def changes_between(before: JsonValue, after: JsonValue) -> tuple[Change, ...]:
    """Every leaf of plain JSON data that differs, by its dotted path."""
    old, new = dict(_flat("", before)), dict(_flat("", after))
    paths = [*old, *(path for path in new if path not in old)]
    return tuple(Change(path, old.get(path, ""), new.get(path, "")) for path in paths if old.get(path, "") != new.get(path, ""))


def keyed_candidates(data: JsonValue) -> JsonValue:
    """The JSON form of a selection or explanation with its candidates by name and their refusals by code."""
    keyed = {}
    for candidate in data["candidates"]:
        reasons: dict[str, list[JsonValue]] = {}
        for reason in candidate["refusals"]:
            reasons.setdefault(reason["code"], []).append(reason)
        keyed[candidate["kernel"]] = {**candidate, "refusals": reasons}
    return {**data, "candidates": keyed}


def _flat(path: str, data: JsonValue) -> Iterator[tuple[str, str]]:
    if isinstance(data, (dict, list)):
        for key, item in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _flat(f"{path}.{key}" if path else str(key), item)
    elif data is not None:
        yield path, str(data)
