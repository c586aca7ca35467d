"""Promises that a kernel may make: equal bits from run to run, rows that do not depend on each other; and thread safety, which all owe."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from hal_core.testing.case import CheckFailedError, Verdict
from hal_core.testing.measure import same_bits

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.testing.bench import Bench
    from hal_core.testing.subject import Inputs, Subject

__all__ = ["batch_invariance", "determinism", "threads"]

_CALLS = 6


def _top(bench: Bench) -> int:
    return bench.subject().batch_sizes()[-1]


def determinism(bench: Bench) -> Verdict:
    """The same call again, and on another op of the same weights."""
    subject = bench.subject()
    op, other = subject.prepare(), subject.prepare()
    for m in (subject.rows, _top(bench)):
        inputs = subject.inputs(m)
        first = subject.call(op, inputs)
        for what, again in (("second run", subject.call(op, inputs)), ("another op", subject.call(other, inputs))):
            same_bits(again, first, f"M={m}, {what}, though deterministic is declared")
    return Verdict()


def batch_invariance(bench: Bench) -> Verdict:
    """Rows alone, in parts and in another order have the bits that they have together."""
    subject = bench.subject()
    top, op = _top(bench), subject.prepare()
    inputs = subject.inputs(top)
    together = subject.call(op, inputs)
    least = max(1, bench.kernel.m_range[0])
    order = torch.randperm(top, generator=subject.rng)
    parts = [torch.arange(start, min(start + size, top)) for size in (1, 2, 7, 32, 33) for start in (0, top // 2) if size >= least]
    for index in (*parts, order):
        if len(index) >= least:
            y = subject.call(op, inputs.rows(index.to(inputs.x.device)))
            same_bits(y, together[index], f"{len(index)} rows from {int(index[0])}, though batch_invariant is declared")
    return Verdict()


def threads(bench: Bench) -> Verdict:
    """Two threads share one op."""
    subject = bench.subject()
    op = subject.prepare()
    jobs = [subject.inputs(subject.rows), subject.inputs(_top(bench))]
    alone = [subject.call(op, job) for job in jobs]
    rulers = [subject.ruler(job) for job in jobs]
    results: list[list[Any]] = [[], []]
    start = threading.Barrier(2)

    def work(index: int) -> None:
        start.wait()
        for _ in range(_CALLS):
            results[index].append(_attempt(subject, op, jobs[index]))

    workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for index in range(2):
        for y in results[index]:
            if isinstance(y, BaseException):
                raise CheckFailedError(f"two threads on one op: {type(y).__name__}: {y}") from y
            if bench.kernel.numerics.deterministic:
                same_bits(y, alone[index], "two threads on one op")
            else:
                rulers[index].check(y, what="two threads on one op")
    return Verdict()


def _attempt(subject: Subject, op: Any, job: Inputs) -> Tensor | Exception:
    """The result, or what the call raised: a thread cannot raise into the one that waits for it."""
    try:
        return subject.call(op, job)
    except Exception as error:  # noqa: BLE001 - a kernel may raise anything, and it is told above
        return error
