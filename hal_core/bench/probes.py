"""The machine's limits as contestants: reading memory, and arithmetic. Native where the CPU backend is installed, else by torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from hal_core.bench.contestants import About, ContestantError
from hal_core.bench.problem import threads_of
from hal_core.bench.timer import Sample

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.bench.problem import Batch, Distance, Problem
    from hal_core.bench.timer import Timer

__all__ = ["ProbeContestant", "ceilings_of"]

#: Bytes of one reading, and of the memory that readings rotate through: more than caches hold.
_READ, _BUFFER = 1 << 27, 1 << 30
#: One run of arithmetic should take about so long: longer than a thread takes to wake, shorter than a processor's phases.
_PEAK_SECONDS = 0.008
#: Numbers of runs read side by side by each thread. Which one is fastest differs between processors.
_STREAMS = (1, 2, 4, 8)
_SIDE = 2048
#: Steps of arithmetic from which a run's length is found.
_TRIAL = 20000


class ProbeContestant:
    """One limit. ``start`` makes a function of the call's number that does ``amount`` bytes or operations.

    Args:
        name: e.g. ``read memory`` or ``amx int8``.
        kind: ``read``, ``float`` or ``int8``.
        start: called when the run begins; gives the function and its amount.
    """

    def __init__(self, name: str, kind: str, timer: Timer, start: Callable[[], tuple[Callable[[int], object], float]]) -> None:
        self.name, self.kind, self.timer, self._start = name, kind, timer, start
        self._timed: Callable[[], Sample] | None = None
        self.alive, self._index = True, 0

    def prepare(self, problem: Problem, copies: int) -> About:
        try:
            work, amount = self._start()
        except (RuntimeError, NotImplementedError) as error:
            raise ContestantError(self.name, str(error).splitlines()[0]) from error
        self._timed = self.timer.bind(lambda: work(self._index))
        return About(self.name, "ceiling", "", self.kind, amount)

    def load(self, batch: Batch) -> None:
        pass

    def run(self, start: int, calls: int) -> list[Sample]:
        assert self._timed is not None  # prepared
        samples = []
        for index in range(start, start + calls):
            self._index = index
            samples.append(self._timed())
        return samples

    def distance(self, index: int, truth: Tensor, rows: Tensor) -> Distance | None:
        return None

    def close(self) -> None:
        self._timed = None  # and with it the memory that is read


def ceilings_of(device: torch.device, timer: Timer, dtype: str) -> list[ProbeContestant]:
    """The limits of a device that can be measured here."""
    if device.type != "cpu":
        return [
            ProbeContestant("copy memory (torch)", "read", timer, lambda: _copying(device)),
            ProbeContestant(f"torch.mm {dtype}", "float", timer, lambda: _multiplying(device, dtype)),
            ProbeContestant("torch._int_mm", "int8", timer, lambda: _multiplying(device, "int8")),
        ]
    native = _native()
    if native is None:
        return [
            ProbeContestant("read memory (torch; hal-backend-cpu is missing)", "read", timer, _summing),
            ProbeContestant(f"torch.mm {dtype}", "float", timer, lambda: _multiplying(device, dtype)),
            ProbeContestant("torch._int_mm", "int8", timer, lambda: _multiplying(device, "int8")),
        ]
    found = [ProbeContestant("read memory", "read", timer, lambda: _reading(native))]
    for item in str(native.probe_peaks()).split(","):
        kind, _, name = item.partition(":")
        found.append(ProbeContestant(name, kind, timer, lambda name=name: _peaking(native, name)))  # type: ignore[misc]
    return found


def _native() -> Any:
    """The CPU backend's ops; None where they, or the probes among them, are not there."""
    try:
        native = import_module("hal_backend_cpu._native")  # a wheel of its own, which need not be there
    except ImportError:
        return None
    return native.ops if hasattr(native.ops, "probe_peaks") else None


def _buffer(size: int = _BUFFER) -> Tensor:
    buffer = torch.empty(size, dtype=torch.uint8)
    buffer.fill_(1)  # pages that were never written are all one page of zeros
    return buffer


def _reading(native: Any) -> tuple[Callable[[int], object], float]:
    buffer, places = _buffer(), _BUFFER // _READ
    times = {streams: _best(lambda i, s=streams: native.probe_read(buffer, i % places * _READ, _READ, s)) for streams in _STREAMS}  # type: ignore[misc]
    streams = min(times, key=lambda s: times[s])
    return lambda index: native.probe_read(buffer, index % places * _READ, _READ, streams), float(_READ)


def _best(work: Callable[[int], object]) -> float:
    """The least of a few trials, in seconds: what disturbs one only adds to it."""
    took = []
    for index in range(9):
        start = time.perf_counter()
        work(index)
        took.append(time.perf_counter() - start)
    return min(took)


def _peaking(native: Any, name: str) -> tuple[Callable[[int], object], float]:
    # by this thread's own clock: what else runs here must not make the runs shorter
    with threads_of(1):
        native.probe_peak(name, 1000)
        start = time.thread_time()
        native.probe_peak(name, _TRIAL)
        steps = max(_TRIAL, int(_TRIAL * _PEAK_SECONDS / max(time.thread_time() - start, 1e-6)))
    return lambda _index: native.probe_peak(name, steps), float(native.probe_peak(name, steps))


def _summing() -> tuple[Callable[[int], object], float]:
    buffer = _buffer().view(torch.float32)
    size, places = _READ // 4, _BUFFER // _READ
    return lambda index: buffer[index % places * size :][:size].sum(), float(_READ)


def _copying(device: torch.device) -> tuple[Callable[[int], object], float]:
    source = torch.ones(_BUFFER, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda _index: target.copy_(source), 2.0 * _BUFFER


def _multiplying(device: torch.device, dtype: str) -> tuple[Callable[[int], object], float]:
    flops = 2.0 * _SIDE**3
    if dtype == "int8":
        a, b = (torch.randint(-127, 128, (_SIDE, _SIDE), dtype=torch.int8, device=device) for _ in range(2))
        torch._int_mm(a, b.T)
        return lambda _index: torch._int_mm(a, b.T), flops
    from hal_core.dtypes import torch_dtype

    x, y = (torch.randn(_SIDE, _SIDE, device=device).to(torch_dtype(dtype)) for _ in range(2))
    return lambda _index: torch.mm(x, y), flops
