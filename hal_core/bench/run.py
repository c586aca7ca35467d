"""The run: all contestants take turns, again and again, so that whatever the machine does meanwhile it does to each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hal_core.bench.contestants import About, Contestant
from hal_core.bench.report import Absence, Ceiling, Row, Spread, rate_of, spread_of
from hal_core.errors import HalError

if TYPE_CHECKING:
    from hal_core.bench.problem import Batch, Distance, Problem
    from hal_core.bench.timer import Sample, Timer

__all__ = ["Measured", "Plan", "measure"]

T = TypeVar("T")

#: Seconds of one turn, and most calls in it.
_TURN, _MOST_CALLS = 0.025, 16
#: Most calls before those that count.
_WARM = 8
#: Calls of a contestant at one batch size before its time is up.
_LEAST_SAMPLES = 3


@dataclass(frozen=True)
class Plan:
    """rows: batch sizes. rounds: turns of each contestant. seconds: after so many at one batch size a contestant has no more turns."""

    rows: tuple[int, ...]
    rounds: int = 15
    seconds: float = 4.0
    copies: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """What a run found; rows of peers come first at each batch size."""

    rows: tuple[Row, ...]
    ceilings: tuple[Ceiling, ...]
    absent: tuple[Absence, ...]


@dataclass(frozen=True, eq=False)
class _Entrant:
    contestant: Contestant
    about: About


class _Run:
    """The state of one run: who is still in it, and what was found."""

    def __init__(self, problem: Problem, plan: Plan, timer: Timer, progress: Callable[[str], None]) -> None:
        self.problem, self.plan, self.timer, self.progress = problem, plan, timer, progress
        self.entrants: list[_Entrant] = []
        self.absent: list[Absence] = []
        self.rows: list[Row] = []
        self.ceilings: list[Ceiling] = []
        self._order = random.Random(plan.seed)  # noqa: S311  an order of turns, no secret

    def enter(self, name: str, contestant: Contestant) -> None:
        try:
            self.entrants.append(_Entrant(contestant, contestant.prepare(self.problem, self.plan.copies)))
        except Exception as error:  # noqa: BLE001  a plugin's or peer's fault is a line, and hides nobody
            contestant.close()
            self.absent.append(Absence(name, told(error, name)))

    def batch(self, rows: int) -> None:
        batch = self.problem.batch(rows)
        present = [entrant for entrant in list(self.entrants) if self._try(entrant, rows, partial(entrant.contestant.load, batch))]
        samples: dict[_Entrant, list[Sample]] = {entrant: [] for entrant in present}
        least: dict[_Entrant, float] = {}
        warm = min(_WARM, max(2, self.plan.copies))
        for entrant in list(present):  # the first calls find cold code and weights that were never read, and are not counted
            first = self._try(entrant, rows, partial(entrant.contestant.run, 0, warm))
            if not first:
                present.remove(entrant)
                continue
            least[entrant] = min(sample.seconds for sample in first[0])
        for _ in range(self.plan.rounds):
            self.progress(f"M = {rows}")
            self._order.shuffle(present)
            for entrant in list(present):
                self._turn(entrant, batch, least[entrant], samples, present)
        self._conclude(batch, present, samples)

    def _turn(self, entrant: _Entrant, batch: Batch, least: float, samples: dict[_Entrant, list[Sample]], present: list[_Entrant]) -> None:
        mine = samples[entrant]
        if len(mine) >= _LEAST_SAMPLES and sum(sample.seconds for sample in mine) > self.plan.seconds:
            return
        self.timer.settle()
        quickest = min([least, *(sample.seconds for sample in mine)])
        calls = max(1, min(_MOST_CALLS, int(_TURN / max(quickest, 1e-9))))
        found = self._try(entrant, batch.rows, partial(entrant.contestant.run, _WARM + len(mine), calls))
        if not found:
            present.remove(entrant)
        else:
            mine += found[0]

    def _try(self, entrant: _Entrant, rows: int, step: Callable[[], T]) -> tuple[T, ...]:
        """The step's answer alone in a tuple; nothing, and a line, where it went wrong."""
        try:
            return (step(),)
        except Exception as error:  # noqa: BLE001  as above
            self.absent.append(Absence(entrant.about.name, told(error, entrant.about.name), rows))
            if not entrant.contestant.alive:  # one that only refused this batch size may take the next
                entrant.contestant.close()
                self.entrants.remove(entrant)
            return ()

    def _conclude(self, batch: Batch, present: list[_Entrant], samples: dict[_Entrant, list[Sample]]) -> None:
        checked = self.problem.checked(batch.rows)
        truth = self.problem.truth(batch, 0) if any(e.about.role != "ceiling" for e in present) else None
        for entrant in present:
            about, seconds = entrant.about, spread_of(samples[entrant])
            if about.role == "ceiling":
                self.ceilings.append(Ceiling(batch.rows, about.name, about.kind, rate_of(seconds, about.weight_bytes)))
                continue
            assert truth is not None  # computed above
            for distance in self._try(entrant, batch.rows, partial(entrant.contestant.distance, 0, truth, checked)):
                self.rows.append(self._row(batch, about, seconds, distance))

    def _row(self, batch: Batch, about: About, seconds: Spread, distance: Distance | None) -> Row:
        problem = self.problem
        hit = sum(batch.experts_hit(index) for index in range(batch.pool)) / batch.pool
        read, work = hit * about.weight_bytes, problem.flops(batch.rows)
        bits = about.weight_bytes * 8 * problem.experts / problem.parameters
        return Row(
            batch.rows, about.name, about.role, about.numerics, about.kind, seconds, None if distance is None else distance.snr_db, bits,
            hit, read, read / seconds.median / 1e9, None, work, work / seconds.median / 1e12, None,
            cosine=None if distance is None else distance.cosine, largest_error=None if distance is None else distance.largest,
        )  # fmt: skip


def measure(
    problem: Problem,
    contestants: Sequence[tuple[str, Contestant]],
    plan: Plan,
    timer: Timer,
    progress: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Time everybody at every batch size of the plan.

    Args:
        problem: weights and inputs.
        contestants: by name, in the order of the report.
        plan: batch sizes, rounds and limits.
        timer: for the pauses between turns.
        progress: told what goes on, once for each round and each preparation.
    """
    run = _Run(problem, plan, timer, progress)
    try:
        for name, contestant in contestants:
            progress(f"preparing {name}")
            run.enter(name, contestant)
        for rows in plan.rows:
            run.batch(rows)
    finally:
        for entrant in run.entrants:
            entrant.contestant.close()
    order = {name: index for index, (name, _) in enumerate(contestants)}
    rows_ = sorted(run.rows, key=lambda row: (plan.rows.index(row.m), order.get(row.name.partition(":")[0], 0)))
    return Measured(tuple(_compared(row, rows_, run.ceilings) for row in rows_), tuple(run.ceilings), tuple(run.absent))


def _compared(row: Row, rows: Sequence[Row], ceilings: Sequence[Ceiling]) -> Row:
    """The row with its shares of the machine's limits and its ratios to the peers."""

    def limit(kind: str) -> float | None:
        return max((c.per_second.median for c in ceilings if (c.m, c.kind) == (row.m, kind)), default=None)

    peers = [other.seconds.median for other in rows if other.m == row.m and other.role == "peer"]
    read, peak, own = limit("read"), limit(row.kind), row.seconds.median
    return replace(
        row, of_read=None if read is None else row.bytes_read / own / read, of_peak=None if peak is None else row.operations / own / peak,
        times_first_peer=peers[0] / own if peers else None, times_best_peer=min(peers) / own if peers else None,
    )  # fmt: skip


def told(error: Exception, name: str) -> str:
    """An error as the reason of a line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, HalError):
        text = f"{type(error).__name__}: {text}"
    return text.removeprefix(f"{name.partition(':')[0]}: ")[:600]
