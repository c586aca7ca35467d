"""What differs between two saved explanations: of one op, or of a checkpoint, layer by layer with equal changes together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal_core.errors import ValueDecodeError
from hal_core.explain import Explanation
from hal_core.explain_checkpoint import CheckpointExplanation, LayerGroup, layer_pattern
from hal_core.jsonable import from_json, to_json
from hal_core.reading import read_small_text, short
from hal_core.selection import Candidate, Change, changes_between

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hal_core.jsonable import JsonValue

__all__ = ["ExplanationDiff", "LayerChanges", "diff_explanations", "read_explanation"]

_MOST_BYTES = 64 << 20
Saved = Explanation | CheckpointExplanation


@dataclass(frozen=True)
class LayerChanges:
    """layers: patterns of names, or ``whole`` for what concerns all. count: layers that change alike."""

    layers: tuple[str, ...]
    count: int
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        return "\n".join([f"{', '.join(self.layers)} ({self.count})", *(f"  {change}" for change in self.changes)])


@dataclass(frozen=True)
class ExplanationDiff:
    """False when nothing differs."""

    parts: tuple[LayerChanges, ...]

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __str__(self) -> str:
        return "\n".join(map(str, self.parts)) or "no difference"


def read_explanation(path: Path) -> Saved:
    """What ``hal explain ... --json`` wrote.

    Raises:
        ValueDecodeError: not such a file; says where.
    """
    what = f"explanation {path}"
    text = read_small_text(path, _MOST_BYTES, what)
    try:
        data: Any = json.loads(text)
        if isinstance(data, dict) and "groups" in data:
            return from_json(CheckpointExplanation, data)
        return from_json(Explanation, data)
    except (ValueError, RecursionError, ValueDecodeError) as error:
        raise ValueDecodeError(what, short(error), "write it with 'hal explain ... --json > FILE'") from error


def diff_explanations(before: Saved, after: Saved) -> ExplanationDiff:
    """What changes from one to the other; layers are matched by name.

    Raises:
        ValueDecodeError: one of a checkpoint and one of a single op.
    """
    if isinstance(before, CheckpointExplanation) and isinstance(after, CheckpointExplanation):
        return ExplanationDiff(tuple(_checkpoint_parts(before, after)))
    if isinstance(before, Explanation) and isinstance(after, Explanation):
        changes = _changes(before, after)
        return ExplanationDiff((LayerChanges(("whole",), 1, changes),) if changes else ())
    raise ValueDecodeError("difference", "one explanation is of a checkpoint, the other of one op", "give two of the same kind")


def _checkpoint_parts(before: CheckpointExplanation, after: CheckpointExplanation) -> Iterator[LayerChanges]:
    heads = ({key: value for key, value in to_json(part).items() if key != "groups"} for part in (before, after))
    changes = changes_between(*heads)
    if changes:
        yield LayerChanges(("whole",), 1, changes)
    old, new = _by_module(before), _by_module(after)
    pairs: dict[tuple[int | None, int | None], list[str]] = {}
    for module in (*old, *(module for module in new if module not in old)):
        pairs.setdefault((old.get(module), new.get(module)), []).append(module)
    for (a, b), modules in pairs.items():
        sides = None if a is None else before.groups[a], None if b is None else after.groups[b]
        changes = _changes(*(None if group is None else group.explanation for group in sides), *map(_frame, sides))
        if changes:
            yield LayerChanges(tuple(dict.fromkeys(map(layer_pattern, modules))), len(modules), changes)


def _by_module(explanation: CheckpointExplanation) -> dict[str, int]:
    return {module: index for index, group in enumerate(explanation.groups) for module in group.modules}


def _frame(group: LayerGroup | None) -> JsonValue:
    """What holds for each layer of a group beside its explanation; its sizes depend on which layers are in it."""
    if group is None:
        return {}
    return {"shard": group.shard, "notes": list(group.notes), "refusals": [str(refusal) for refusal in group.refusals]}


def _changes(before: Explanation | None, after: Explanation | None, *frames: JsonValue) -> tuple[Change, ...]:
    """Changes in words, one line each: a spec that is another one is not taken apart, unless its words are the same."""
    first, second = frames or ({}, {})
    old, new = {**first, **_told(before)}, {**second, **_told(after)}
    if before is not None and after is not None and before.spec != after.spec and old["spec"] == new["spec"]:
        old["spec"], new["spec"] = to_json(before.spec), to_json(after.spec)
    return changes_between(old, new)


def _told(explanation: Explanation | None) -> dict[str, JsonValue]:
    if explanation is None:
        return {}
    data: dict[str, JsonValue] = {"spec": str(explanation.spec), "policy": explanation.policy, "problem": explanation.problem or None}
    s = explanation.selection
    data["kernel"] = "none" if s is None else ", ".join(map(str, s.intervals))
    if s is not None:
        data |= {"layout": s.layout, "numerics": str(s.numerics), "tuned": s.tuned, "adapters": list(s.adapters)}
        data["changes"] = {t.name: f"adds at most {t.error_bound:g} relative L2" for t in s.transforms}
        data["padding"] = {p.dim: f"{p.asked} to {p.padded}" for p in s.padding}
    data["candidates"] = {
        candidate.kernel: {
            "verdict": "chosen" if candidate.chosen else "accepted" if candidate.accepted else "refused",
            "refusals": _by_code(candidate),
        }
        for candidate in explanation.candidates
    }
    return data


def _by_code(candidate: Candidate) -> dict[str, str]:
    found: dict[str, str] = {}
    for reason in candidate.refusals:
        text = f"asked {reason.asked}, found {reason.found}; {reason.fix}"
        found[reason.code] = f"{found[reason.code]} | {text}" if reason.code in found else text
    return found
