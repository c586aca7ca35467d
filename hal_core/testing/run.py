"""Runs cases. A case never raises: whatever a kernel does becomes its result."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from hal_core.errors import UnfitWeightsError
from hal_core.kernel import KVKernel
from hal_core.testing.bench import Bench, of_machine
from hal_core.testing.case import Case, CheckFailedError, Result, Status, Verdict
from hal_core.testing.checks import FUNCTIONS
from hal_core.testing.checks.caches import CACHE_FUNCTIONS
from hal_core.testing.checks.declared import reasons
from hal_core.testing.expectations import NOTHING_EXPECTED, Expectations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hal_core.testing.plan import Plan

__all__ = ["run_case", "run_plan"]

#: Checks that ask and do not compute: they need no device.
_ASKING = ("declaration", "refusals")


def run_plan(plan: Plan, seed: int = 0, expected: Expectations = NOTHING_EXPECTED) -> Iterator[Result]:
    """Results as they come."""
    for case in plan.cases():
        yield run_case(plan, case, seed, expected)


def run_case(plan: Plan, case: Case, seed: int = 0, expected: Expectations = NOTHING_EXPECTED) -> Result:
    """One case under the expectations: not run if unsupported, and due to fail if a failure is expected."""
    why = expected.unsupported_reason(case.id)
    if why:
        return Result(case.id, case.kernel, case.check, Status.UNSUPPORTED, reason=why)
    start = time.perf_counter()
    verdict = _verdict(plan, case, seed)
    seconds = time.perf_counter() - start
    status, reason = verdict.status, verdict.reason
    hoped = expected.failure_reason(case.id)
    if hoped and status is Status.FAILED:
        status, reason = Status.EXPECTED, f"{hoped} ({reason})"
    elif hoped and status is Status.PASSED:
        status, reason = Status.STALE, f"passes, though a failure is expected: {hoped}; take it off the list"
    return Result(case.id, case.kernel, case.check, status, verdict.error, verdict.bound, reason, seconds)


def _verdict(plan: Plan, case: Case, seed: int) -> Verdict:
    bench = Bench(plan.kernel, case, plan.machine, seed, plan.accepted)
    try:
        if case.check not in _ASKING:
            stopped = _not_run(bench)
            if stopped is not None:
                return stopped
        with torch.no_grad():
            own = CACHE_FUNCTIONS if isinstance(plan.kernel, KVKernel) else FUNCTIONS
            return own.get(case.check, FUNCTIONS[case.check])(bench)
    except CheckFailedError as error:
        return Verdict(status=Status.FAILED, reason=str(error))
    except UnfitWeightsError as error:
        return Verdict(status=Status.REFUSED, reason=str(error))  # values that no spec tells; another kernel serves them
    except Exception as error:  # noqa: BLE001 - a kernel may raise anything, and that is what is looked for
        return Verdict(status=Status.FAILED, reason=f"{type(error).__name__}: {_line(error)}")


def _not_run(bench: Bench) -> Verdict | None:
    found = reasons(bench.kernel, bench.case.spec, bench.machine)
    missing = [reason for reason in found if of_machine(reason)]
    if missing:
        return Verdict(status=Status.SKIPPED, reason=str(missing[0]))
    return Verdict(status=Status.REFUSED, reason="; ".join(map(str, found))) if found else None


def _line(error: BaseException) -> Any:
    return " ".join(str(error).split())[:400]
