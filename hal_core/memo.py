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
_Key = tuple["Spec", "Machine", "Policy"]


class _Answers:
    """What is known for one state of a registry: by value, and for the very objects that asked before without comparing them."""

    def __init__(self, kernels: _Kernels, rows: _Rows) -> None:
        self.kernels, self.rows = kernels, rows
        self.by_value: dict[_Key, Selection] = {}
        # The objects are kept beside the answer, so that no other object can come to have their id.
        self.by_id: dict[int, tuple[Spec, Machine, Policy, Selection]] = {}


class SelectionMemo:
    """Answers for one state of a registry: other tuples of kernels or rows (after ``refresh``) begin anew. Safe between threads.

    Args:
        most: answers kept; beyond that all are dropped, which costs time only.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        # Replaced as a whole: a reader sees kernels, rows and answers that belong together.
        self._answers = _Answers((), ())

    def select(self, spec: Spec, machine: Machine, policy: Policy, kernels: _Kernels, rows: _Rows) -> Selection:
        """As ``select_from``; errors are not kept."""
        answers = self._answers
        if answers.kernels is not kernels or answers.rows is not rows:
            answers = self._answers = _Answers(kernels, rows)
        same = answers.by_id.get(id(spec))
        if same is not None and same[0] is spec and same[1] is machine and same[2] is policy:
            return same[3]
        key = (spec, machine, policy)
        found = answers.by_value.get(key)
        if found is None:
            found = select_from(spec, machine, policy, kernels, rows)
            if len(answers.by_value) >= self._most:
                answers.by_value.clear()
            answers.by_value[key] = found
        if len(answers.by_id) >= self._most:
            answers.by_id.clear()
        answers.by_id[id(spec)] = (spec, machine, policy, found)
        return found

    def __len__(self) -> int:
        return len(self._answers.by_value)
