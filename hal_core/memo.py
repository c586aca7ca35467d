"""Selections kept for specs that were asked before: selection is a pure function, so an equal question has the same answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.select import select_from

if TYPE_CHECKING:
    from hal_core.machine import Machine
    from hal_core.policy import Policy
    from hal_core.registry import BackendRow, RegisteredKernel
    from hal_core.selection import Selection
    from hal_core.spec import Spec

__all__ = ["SelectionMemo"]

_Kernels = tuple["RegisteredKernel", ...]
_Rows = tuple["BackendRow", ...]
_Known = dict[tuple["Spec", "Machine", "Policy"], "Selection"]


class SelectionMemo:
    """Answers for one state of a registry: other tuples of kernels or rows (after ``refresh``) begin anew. Safe between threads.

    Args:
        most: answers kept; beyond that all are dropped, which costs time only.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        # One tuple, replaced as a whole: a reader sees kernels, rows and answers that belong together.
        self._state: tuple[_Kernels, _Rows, _Known] = ((), (), {})

    def select(self, spec: Spec, machine: Machine, policy: Policy, kernels: _Kernels, rows: _Rows) -> Selection:
        """As ``select_from``; errors are not kept."""
        old_kernels, old_rows, known = self._state
        if old_kernels is not kernels or old_rows is not rows:
            known = {}
            self._state = (kernels, rows, known)
        key = (spec, machine, policy)
        found = known.get(key)
        if found is None:
            found = select_from(spec, machine, policy, kernels, rows)
            if len(known) >= self._most:
                known.clear()
            known[key] = found
        return found

    def __len__(self) -> int:
        return len(self._state[2])
