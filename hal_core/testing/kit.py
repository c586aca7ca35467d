"""The kit on installed backends: which plans there are, with which expectations, and what came out."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hal_core.errors import PolicyError
from hal_core.machine import Machine
from hal_core.registry import REFERENCE, Registry, default_registry
from hal_core.testing.case import Result, Status
from hal_core.testing.expectations import NOTHING_EXPECTED, REFERENCE_EXPECTATIONS, Expectations, expectations_of
from hal_core.testing.plan import Plan, plan_of
from hal_core.testing.run import run_case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hal_core.registry import BackendRow
    from hal_core.testing.case import Case

__all__ = ["Kit", "Report", "installed_expectations", "kit_of"]


@dataclass(frozen=True, eq=False)
class Report:
    """What a run found.

    stale: expectations that no case has; judged in full runs only, which have all cases. broken: installed backends whose import or
    registration failed. left_out: those that their manifest or this machine refuses, which is no fault.
    """

    seed: int
    full: bool
    plans: tuple[Plan, ...]
    results: tuple[Result, ...]
    stale: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.status.bad)

    @property
    def good(self) -> bool:
        return not (self.failures or self.stale or self.broken)

    def count(self, status: Status) -> int:
        return sum(result.status is status for result in self.results)


@dataclass(frozen=True, eq=False)
class Kit:
    """The plans of some kernels, and what is expected of each backend."""

    plans: tuple[Plan, ...]
    expected: dict[str, Expectations] = field(default_factory=dict)
    full: bool = False
    broken: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def cases(self) -> tuple[tuple[Plan, Case], ...]:
        return tuple((plan, case) for plan in self.plans for case in plan.cases())

    def expectations(self, kernel: str) -> Expectations:
        return self.expected.get(kernel.partition(".")[0], NOTHING_EXPECTED)

    def run(self, seed: int = 0, each: Callable[[Result], Any] = lambda _: None) -> Report:
        """All cases; ``each`` is called with every result as it comes."""
        cases, results = self.cases(), []
        for plan, case in cases:
            results.append(run_case(plan, case, seed, self.expectations(case.kernel)))
            each(results[-1])
        stale = self._stale(case.id for _, case in cases) if self.full else ()
        return Report(seed, self.full, self.plans, tuple(results), stale, self.broken, self.left_out)

    def _stale(self, ids: Iterable[str]) -> tuple[str, ...]:
        known = tuple(ids)
        return tuple(entry for expectations in self.expected.values() for entry in expectations.unmatched(known))


def kit_of(
    backends: Sequence[str] = (),
    *,
    full: bool = False,
    short: bool = False,
    registry: Registry | None = None,
    machine: Machine | None = None,
) -> Kit:
    """The kit for installed backends; all that are loaded when none is named.

    Raises:
        PolicyError: a named one is not installed, or is refused; the message holds its reasons.
    """
    registry, machine = registry or default_registry(), machine or Machine.detect()
    rows = registry.rows()
    for name in backends:
        _expect_loaded(name, rows)
    chosen = [row for row in rows if row.loaded and (not backends or row.name in backends)]
    kernels = {kernel.name: kernel.kernel for kernel in registry.kernels()}
    plans = tuple(plan_of(name, kernels[name], machine, full=full, short=short) for row in chosen for name in row.kernels)
    others = [(row.status, f"{row.name}: {'; '.join(map(str, row.refusals))}") for row in rows if not (row.loaded or backends)]
    broken, left_out = (tuple(text for status, text in others if (status == "failed") is failed) for failed in (True, False))
    return Kit(plans, {row.name: installed_expectations(row) for row in chosen}, full, broken, left_out)


def _expect_loaded(name: str, rows: Sequence[BackendRow]) -> None:
    found = [row for row in rows if row.name == name]
    if any(row.loaded for row in found):
        return
    reasons = "; ".join(str(reason) for row in found for reason in row.refusals)
    loaded = ", ".join(row.name for row in rows if row.loaded)
    raise PolicyError(f"backend {name!r}", reasons or "not installed", f"these can be verified: {loaded}")


def installed_expectations(row: BackendRow) -> Expectations:
    """The lists that a backend's wheel carries."""
    if row.name == REFERENCE:
        return REFERENCE_EXPECTATIONS
    try:
        return expectations_of(metadata.distribution(row.distribution))
    except metadata.PackageNotFoundError:
        return NOTHING_EXPECTED
