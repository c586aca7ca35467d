"""A part of the conformance kit: some cases of each check and kernel, spread evenly."""

from __future__ import annotations

import os


def some(found, most: int):
    """At most so many ``(plan, case)`` of every kernel; KIT_CASES says otherwise, 0 for all."""
    most = int(os.environ.get("KIT_CASES", most))
    by_kernel: dict[str, list] = {}
    for plan, case in found:
        by_kernel.setdefault(case.kernel, []).append((plan, case))
    return [pair for cases in by_kernel.values() for pair in cases[:: -(-len(cases) // most) if most else 1]]


def parametrize(suite, metafunc, most) -> None:
    """As the kit does, with a part of the cases; ``most`` gives their number for a check."""
    check = metafunc.function.__name__.removeprefix("test_")
    found = some([pair for pair in suite.kit(metafunc.config).cases() if pair[1].check == check], most(check))
    metafunc.parametrize(("plan", "case"), found, ids=[case.id for _, case in found])
