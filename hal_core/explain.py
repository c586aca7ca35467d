"""Why each candidate was chosen or refused, as a value; a lack of kernels is an answer here, not an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.errors import NoKernelError, PolicyError
from hal_core.jsonable import JsonValue, dumps, loads, to_json
from hal_core.policy import Policy
from hal_core.select import candidates_from, select_from
from hal_core.selection import Candidate, Selection, candidates_text
from hal_core.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hal_core.machine import Machine
    from hal_core.registry import BackendRow, RegisteredKernel

__all__ = ["Explanation", "explain_from"]


@dataclass(frozen=True)
class Explanation:
    """selection: what would run, or None; then ``problem`` says why and what to change. candidates: all of them, with reasons."""

    spec: Spec
    policy: str
    candidates: tuple[Candidate, ...]
    selection: Selection | None = None
    problem: str = ""

    @property
    def served(self) -> bool:
        return self.selection is not None

    @classmethod
    def from_json(cls, text: str) -> Explanation:
        """Decode the JSON text that :meth:`dumps` wrote."""
        return loads(cls, text)

    def to_json(self) -> JsonValue:
        """Plain JSON types."""
        return to_json(self)

    def dumps(self, indent: int | None = 2) -> str:
        """JSON text."""
        return dumps(self, indent)

    def __str__(self) -> str:
        if self.selection is not None:
            return str(self.selection)
        head = [str(self.spec), f"  policy:   {self.policy}", f"  chosen:   none; {self.problem}"]
        return "\n".join([*head, *candidates_text(self.candidates)])


def explain_from(
    spec: Spec, machine: Machine, policy: Policy, kernels: Sequence[RegisteredKernel], rows: Sequence[BackendRow] = ()
) -> Explanation:
    """As ``select_from``, with the same arguments; never raises for lack of a kernel or for a name that matches nothing."""
    try:
        selection = select_from(spec, machine, policy, kernels, rows)
    except NoKernelError as error:
        candidates = candidates_from(spec, machine, policy, kernels, rows)
        return Explanation(spec, str(policy), candidates, problem=f"no kernel accepts it; {error.fix}")
    except PolicyError as error:
        candidates = candidates_from(spec, machine, Policy(), kernels, rows)
        free = tuple(Candidate(c.kernel, c.backend, c.accepted, False, c.priority, c.refusals) for c in candidates)
        return Explanation(spec, str(policy), free, problem=str(error))
    return Explanation(spec, str(policy), selection.candidates, selection)
