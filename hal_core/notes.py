"""What users should be told of selections: each distinct note once, with the layer that met it first, and a count of the others."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.errors import HalWarning

if TYPE_CHECKING:
    from hal_core.selection import Selection

__all__ = ["ToldNote", "forget_notes", "say", "tell", "told_notes"]

_log = logging.getLogger("hal_core")
_lock = threading.Lock()
_counts: dict[str, list[str | int]] = {}
_PACKAGE = __name__.partition(".")[0] + "."


@dataclass(frozen=True)
class ToldNote:
    """A note, the layer that met it first (empty when none was named), and how often it was met in all."""

    text: str
    layer: str
    count: int

    def __str__(self) -> str:
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        return f"{self.layer or 'a spec'}{more}: {self.text}"


def tell(selection: Selection, layer: str | None = None) -> None:
    """Log and warn of a selection's notes the first time that they are met; count them after that."""
    for note in selection.notes:
        say(note, layer)


def say(note: str, layer: str | None) -> None:
    """Log and warn of a note the first time that it is met; count it after that."""
    with _lock:
        known = _counts.get(note)
        if known is not None:
            known[1] = int(known[1]) + 1
            return
        _counts[note] = [layer or "", 1]
    text = f"layer {layer}: {note}" if layer else note
    _log.warning("%s", text)
    warnings.warn(text, HalWarning, stacklevel=_caller())


def _caller() -> int:
    """Stack level of the first frame outside this package, so that the warning points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


def told_notes() -> tuple[ToldNote, ...]:
    """Every note of this process with its count, in the order in which they were met."""
    with _lock:
        return tuple(ToldNote(text, str(layer), int(count)) for text, (layer, count) in _counts.items())


def forget_notes() -> None:
    """Tell everything once more, e.g. before another model is loaded."""
    with _lock:
        _counts.clear()
