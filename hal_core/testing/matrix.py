"""The support matrix: for each kind of op, what each kernel serves, and what became of the checks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.spec import FLOATS
from hal_core.testing.case import CHECKS, Status
from hal_core.testing.features import features_of

if TYPE_CHECKING:
    from hal_core.testing.case import Result
    from hal_core.testing.features import Feature
    from hal_core.testing.kit import Report
    from hal_core.testing.plan import Plan

__all__ = ["TITLES", "Table", "tables_of"]

TITLES = {"linear": "Linear", "moe": "Experts", "embedding": "Embedding", "kv": "Caches"}
#: Cells. *yes* was measured; *declared* was not tried, here or by the kit at all.
YES, NO, DECLARED, FAILS = "yes", "no", "declared", "FAILS"
_WITH_NUMBERS = ("accuracy", "effects")


@dataclass(frozen=True)
class Table:
    """Row labels, column labels (kernels), and a cell for each; ``title`` names the kind of op."""

    title: str
    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def tables_of(report: Report) -> tuple[Table, ...]:
    """Two tables for each kind of op: what is served, and how the checks went."""
    out = []
    for op, title in TITLES.items():
        plans = [plan for plan in report.plans if plan.kernel.op == op]
        if plans:
            by_kernel = {plan.name: [r for r in report.results if r.kernel == plan.name] for plan in plans}
            out += [_served(title, plans, by_kernel), _checked(title, plans, by_kernel)]
    return tuple(out)


def _served(title: str, plans: list[Plan], results: dict[str, list[Result]]) -> Table:
    columns = {plan.name: _column(plan, results[plan.name]) for plan in plans}
    labels = dict.fromkeys(label for column in columns.values() for label in column)
    # what none of them serves would only lengthen the table
    shown = [label for label in labels if any(column.get(label, NO) != NO for column in columns.values())]
    rows = [(label, tuple(column.get(label, NO) for column in columns.values())) for label in shown]
    rows += [(f"largest error, {dtype} output", tuple(_largest(plan, results[plan.name], dtype) for plan in plans)) for dtype in FLOATS]
    return Table(title, "served", tuple(columns), tuple(rows))


def _column(plan: Plan, results: list[Result]) -> dict[str, str]:
    specs = {case.id: case.spec for case in plan.cases() if case.check in _WITH_NUMBERS}
    tried = [(specs[r.case], r.status) for r in results if r.case in specs]
    return {feature.label: _cell(feature, plan, tried, results) for feature in features_of(plan.kernel)}


def _cell(feature: Feature, plan: Plan, tried: list[tuple[object, Status]], results: list[Result]) -> str:
    if not feature.declares(plan.kernel):
        return NO
    if not feature.tried:
        return DECLARED
    promise = {"deterministic": "determinism", "batch-invariant": "batch_invariance"}.get(feature.label)
    statuses = {r.status for r in results if r.check == promise} if promise else {status for spec, status in tried if feature.uses(spec)}
    if Status.FAILED in statuses:
        return FAILS
    return YES if Status.PASSED in statuses else DECLARED


def _largest(plan: Plan, results: list[Result], dtype: str) -> str:
    specs = {case.id: case.spec for case in plan.cases() if case.check == "accuracy"}
    own = [r.error for r in results if r.case in specs and specs[r.case].output == dtype and r.error is not None]
    return f"{_rounded_up(max(own)):.0e}" if own else "–"


def _rounded_up(error: float) -> float:
    """To one digit, upwards: the figure changes little from run to run."""
    if error <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(error))
    return math.ceil(error / power) * power


def _checked(title: str, plans: list[Plan], results: dict[str, list[Result]]) -> Table:
    rows = [(check, tuple(_tally(r for r in results[plan.name] if r.check == check) for plan in plans)) for check in CHECKS]
    return Table(title, "checks", tuple(plan.name for plan in plans), tuple(rows))


def _tally(results: object) -> str:
    count = Counter(result.status for result in results)  # type: ignore[attr-defined]
    if not count:
        return "–"
    parts = [f"{count[status]} {status.value}" for status in Status if count[status]]
    return ", ".join(parts)
