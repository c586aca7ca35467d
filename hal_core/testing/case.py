"""A conformance case and what became of it, as values."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["CHECKS", "Case", "CheckFailedError", "Result", "Status", "Verdict"]

#: Every check with the sentence that documents it, in the order of the reports.
CHECKS: dict[str, str] = {
    "declaration": "The kernel answers the contract, keeps the refusals that follow from its answers, and accepts what it declares.",
    "refusals": "What lies outside the declaration is refused, with the code that belongs to it, an ask, a finding and a fix.",
    "accuracy": "Accepted specs are within the error bound, over schemes, shapes, dtypes, epilogues and batch sizes.",
    "effects": "Each epilogue attribute changes the result, in the way that its definition says.",
    "routing": "Skipped slots, idle and crowded experts, repeated ids; ids out of range are an error and compute nothing.",
    "layout": "What was packed comes back bit for bit.",
    "update": "New weights in place equal a fresh prepare bit for bit, at the same addresses; weights that do not fit change nothing.",
    "memory": "Poisoned outputs are written in full, and nothing around inputs, outputs, weights and workspace is touched or read.",
    "rows": "NaN, infinity and huge values stay in their row.",
    "determinism": "Where declared: two runs give equal bits.",
    "batch_invariance": "Where declared: a row's bits do not depend on the other rows.",
    "threads": "Two threads on one op give what one thread gives.",
    "module": "The op survives a deep copy, a state dict round trip and a change of the model's dtype.",
    "compile": "torch.compile without a graph break agrees with eager.",
    "opcheck": "Schema and fake kernel of each torch op that the call reaches are right.",
    "errors": "Wrong shapes and dtypes raise a HalError.",
}


class CheckFailedError(AssertionError):
    """A kernel is not what it says it is; the message says in what way, with the numbers."""


class Status(str, Enum):
    """What became of a case."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    UNSUPPORTED = "unsupported"
    EXPECTED = "expected failure"
    STALE = "stale expectation"
    SKIPPED = "skipped"

    @property
    def bad(self) -> bool:
        return self in (Status.FAILED, Status.STALE)


@dataclass(frozen=True)
class Verdict:
    """What a check found where nothing failed: the largest error against the bound, or why it did not apply."""

    error: float | None = None
    bound: float | None = None
    status: Status = Status.PASSED
    reason: str = ""


@dataclass(frozen=True)
class Case:
    """One thing to try on one kernel.

    kernel: full name. check: a key of :data:`CHECKS`. detail: unique within kernel and check. spec: the problem.
    word: which variant of the check. scales: dtype of the weights' scales.
    """

    kernel: str
    check: str
    detail: str
    spec: Any
    word: str = ""
    scales: str = "fp16"

    @property
    def id(self) -> str:
        return f"{self.kernel}/{self.check}/{self.detail}"

    def seed(self, run: int) -> int:
        """Seed of this case's random numbers in a run with seed ``run``; independent of the other cases."""
        return zlib.crc32(f"{run}:{self.id}".encode())

    def __str__(self) -> str:
        return self.id


@dataclass(frozen=True)
class Result:
    """A case's status. ``reason`` tells a failure, a refusal or an expectation."""

    case: str
    kernel: str
    check: str
    status: Status
    error: float | None = None
    bound: float | None = None
    reason: str = ""
    seconds: float = 0.0
