"""How one call is timed: on the host by its clock, on a GPU by events around the replay of a captured graph."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

__all__ = ["EventTimer", "GraphTimer", "Sample", "Timer", "WallTimer", "timer_of"]

#: Cycles that a GPU idles before the first event, so that the host's launches are queued before they are measured.
_HEAD_START = 200_000


@dataclass(frozen=True)
class Sample:
    """Seconds of one call, and whether the system took a processor away from this process meanwhile (None: not known)."""

    seconds: float
    disturbed: bool | None = None


class Timer(Protocol):
    """Times calls on one device."""

    name: str

    def bind(self, call: Callable[[], object]) -> Callable[[], Sample]:
        """A function that runs ``call`` once, to its end, and times it. ``call`` reads and writes fixed tensors."""

    def settle(self) -> None:
        """Called before another contestant's turn: nothing of the one before may still be running."""


class WallTimer:
    """The host's monotonic clock."""

    name = "wall clock"

    def bind(self, call: Callable[[], object]) -> Callable[[], Sample]:
        def run() -> Sample:
            before = preemptions()
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            return Sample(seconds, None if before is None else preemptions() != before)

        return run

    def settle(self) -> None:
        # threads of an OpenMP team spin for some milliseconds after their work, on cores that the next contestant needs
        time.sleep(0.004)


class EventTimer:
    """Events of a device's stream around an ordinary call."""

    name = "events"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)

    def bind(self, call: Callable[[], object]) -> Callable[[], Sample]:
        call()
        return lambda: self._between(call)

    def _between(self, call: Callable[[], object]) -> Sample:
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        self._module.synchronize()
        if hasattr(self._module, "_sleep"):
            self._module._sleep(_HEAD_START)
        start.record()
        call()
        end.record()
        end.synchronize()
        return Sample(start.elapsed_time(end) / 1e3)

    def settle(self) -> None:
        self._module.synchronize()


class GraphTimer(EventTimer):
    """Events around replays of a CUDA graph of the call, as an engine runs it in decoding."""

    name = "CUDA graph"

    def bind(self, call: Callable[[], object]) -> Callable[[], Sample]:
        stream = self._module.Stream()
        stream.wait_stream(self._module.current_stream())
        with self._module.stream(stream):  # a capture must find everything loaded and allocated
            for _ in range(3):
                call()
        self._module.current_stream().wait_stream(stream)
        graph = self._module.CUDAGraph()
        with self._module.graph(graph):
            call()
        return partial(self._replayed, graph, call)

    def _replayed(self, graph: Any, call: Callable[[], object]) -> Sample:
        """``call`` is here only to be kept: a graph does not keep the tensors that it reads."""
        return self._between(graph.replay)


def timer_of(device: torch.device) -> Timer:
    """The timer of a device."""
    if device.type == "cpu":
        return WallTimer()
    return GraphTimer(device) if device.type == "cuda" else EventTimer(device)


def preemptions() -> int | None:
    """How often the system took a processor away from this process; None where it does not say."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if sys.platform != "win32" else None
