"""The checks: each takes a :class:`~hal_core.testing.bench.Bench` and returns a verdict, or raises with what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.testing.checks.declared import declaration, refusals
from hal_core.testing.checks.errors import errors
from hal_core.testing.checks.experts import routing
from hal_core.testing.checks.graph import compiled, opcheck
from hal_core.testing.checks.memory import memory, rows
from hal_core.testing.checks.numbers import accuracy, effects
from hal_core.testing.checks.promises import batch_invariance, determinism, threads
from hal_core.testing.checks.state import layout, module, update

if TYPE_CHECKING:
    from collections.abc import Callable

    from hal_core.testing.bench import Bench
    from hal_core.testing.case import Verdict

__all__ = ["FUNCTIONS"]

#: By the names of ``hal_core.testing.case.CHECKS``.
FUNCTIONS: dict[str, Callable[[Bench], Verdict]] = {
    "declaration": declaration,
    "refusals": refusals,
    "accuracy": accuracy,
    "effects": effects,
    "routing": routing,
    "layout": layout,
    "update": update,
    "memory": memory,
    "rows": rows,
    "determinism": determinism,
    "batch_invariance": batch_invariance,
    "threads": threads,
    "module": module,
    "compile": compiled,
    "opcheck": opcheck,
    "errors": errors,
}
