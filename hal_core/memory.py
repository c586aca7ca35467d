"""Giving freed memory back to the system while a large model loads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["Trimmer"]

#: Bytes read between two calls: seldom enough to cost nothing, often enough to bound what freed blocks hold.
_EVERY = 32 << 20


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The malloc_trim of glibc, or None on other C libraries, which need no such help or offer none."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


class Trimmer:
    """Counts bytes that passed through temporary buffers, and trims the heap each time enough have.

    glibc serves blocks of up to 32 MB from its heap once such blocks were freed, and a freed block below a kept one
    stays resident: a loader that reads, re-lays and frees would hold up to half of the model a second time.
    """

    def __init__(self) -> None:
        self._pending = 0

    def passed(self, count: int) -> None:
        """``count`` bytes of temporary buffers have been used; frees are given back when due."""
        self._pending += count
        if self._pending >= _EVERY:
            self.flush()

    def flush(self) -> None:
        """Give back what is free now."""
        self._pending = 0
        trim = _malloc_trim()
        if trim is not None:
            trim(0)
