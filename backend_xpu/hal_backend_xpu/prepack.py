"""Weights in another form for long inputs, made once from those that are held, and kept as long as these do not change.

An entry belongs to the storages that it was made from: device type and index, address, shape, and version, which every in-place change
raises. The sources are held with it, so that their memory is not given to other tensors while the entry is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PHASES", "PrepackCache"]

#: ``both``: also what long inputs are multiplied with. ``decode``: only what is held anyway.
PHASES = ("both", "decode")

_Place = tuple[str, int | None, int, int, tuple[int, ...]]


def _place(tensor: Tensor) -> _Place:
    device = tensor.device
    return device.type, device.index, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, eq=False)
class _Entry:
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]
    made: tuple[Tensor, ...]


class PrepackCache:
    """Safe between threads."""

    def __init__(self) -> None:
        self._entries: dict[tuple[_Place, ...], _Entry] = {}
        self._lock = threading.Lock()

    def get(self, sources: tuple[Tensor, ...], make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What ``make`` gave for these sources as they are now."""
        key, versions = tuple(map(_place, sources)), tuple(map(_version, sources))
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.versions != versions:
                entry = self._entries[key] = _Entry(sources, versions, make())
            return entry.made

    def holds(self, sources: tuple[Tensor, ...]) -> bool:
        """Whether there is an entry for these storages, of whatever version."""
        with self._lock:
            return tuple(map(_place, sources)) in self._entries

    def forget(self, sources: tuple[Tensor, ...]) -> None:
        """Drop the entry, and the hold on its sources."""
        with self._lock:
            self._entries.pop(tuple(map(_place, sources)), None)

    def __len__(self) -> int:
        return len(self._entries)
