"""The ops of this process by layer, reached from a compiled graph by the layer's name, with what they are and how often they ran.

A graph that vLLM compiled once serves later processes and engines too, so it may hold no number that depends on what was made before:
the key of a layer is a digest of what is served and the layer's name.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from hal_core.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.ops import Op

__all__ = ["HeldLayer", "get", "hold", "serving_key"]

_log = logging.getLogger("vllm.hal_core")
#: Each is owned by its layer: those of an engine that is gone are gone too.
_held: WeakValueDictionary[str, HeldLayer] = WeakValueDictionary()
#: All that live, by key and in order: engines that serve alike share keys, since they share compiled graphs, and the newest answers.
_living: WeakValueDictionary[tuple[str, int], HeldLayer] = WeakValueDictionary()
_numbers = itertools.count()
_told: set[tuple[str, str]] = set()


@dataclass(eq=False)
class HeldLayer:
    """A layer of this rank. pad: columns of zeros beyond the op's. expert_map: local ids, under expert parallelism."""

    layer: str
    ops: tuple[Op, ...]
    rank: tuple[int, int]
    notes: tuple[str, ...] = ()
    pad: int = 0
    expert_map: Tensor | None = None
    calls: int = field(default=0)

    def report(self) -> dict[str, Any]:
        """What serves this layer, as JSON."""
        selections = [op.selection for op in self.ops if op.selection is not None]
        return {
            "layer": self.layer, "rank": list(self.rank), "specs": [str(s.spec) for s in selections],
            "kernels": [s.kernel for s in selections], "layouts": [s.layout for s in selections],
            "numerics": [str(s.numerics) for s in selections], "notes": [*self.notes, *(note for s in selections for note in s.notes)],
            "calls": self.calls,
        }  # fmt: skip


def serving_key(*parts: object) -> str:
    """A short digest of what an engine serves, the first half of its layers' keys."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


def hold(key: str, held: HeldLayer) -> str:
    """Keep a layer and say which kernels serve it, once for equal ones; returns its key."""
    name = f"{key}:{held.layer}"
    _held[name] = _living[name, next(_numbers)] = held
    for op in held.ops:
        selection = op.selection
        if selection is not None and (str(selection.spec), selection.kernel) not in _told:
            _told.add((str(selection.spec), selection.kernel))
            rank, ranks = held.rank
            _log.info("rank %d of %d: %s -> %s, numerics %s", rank, ranks, selection.spec, selection.kernel, selection.numerics)
    return name


def get(key: str) -> HeldLayer:
    """The layer of a key.

    Raises:
        ShapeError: no such layer in this process.
    """
    held = _held.get(key)
    if held is None:  # never, or the newest is gone and an older one serves on
        numbered = [(number, layer) for (name, number), layer in _living.items() if name == key]
        held = max(numbered, key=lambda pair: pair[0])[1] if numbered else None
        if held is not None:
            _held[key] = held
    if held is None:
        raise ShapeError(
            f"hal layer {key}", "not prepared in this process", "serve the model in one engine, or remove vLLM's compile cache"
        )
    return held
