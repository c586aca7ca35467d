"""The declaration itself, and refusals of what lies outside it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from hal_core.contract import kernel_problems
from hal_core.kernel import Kernel
from hal_core.refusal import Refusal
from hal_core.testing.case import CheckFailedError, Status, Verdict
from hal_core.testing.features import features_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hal_core.machine import Machine
    from hal_core.testing.bench import Bench

__all__ = ["MACHINES", "declaration", "reasons", "refusals"]

#: Machines to ask about, by the word of a case.
MACHINES: dict[str, Callable[[Machine], Machine]] = {
    "": lambda machine: machine,
    "no_device": lambda machine: replace(machine, devices=()),
    "no_isa": lambda machine: replace(machine, isa=()),
}


def reasons(kernel: Kernel[Any], spec: Any, machine: Machine) -> tuple[Refusal, ...]:
    """The kernel's refusals; raises unless they are a tuple of complete refusals, the same when asked twice."""
    try:
        found: object = kernel.refusals(spec, machine)
        again = kernel.refusals(spec, machine)
    except Exception as error:
        raise CheckFailedError(f"refusals({spec}) raised {type(error).__name__}: {error}") from error
    if not isinstance(found, tuple) or not all(isinstance(reason, Refusal) for reason in found):
        raise CheckFailedError(f"refusals({spec}) returned {found!r}, not a tuple of Refusal")
    if found != again:
        raise CheckFailedError(f"refusals({spec}) differs between two calls: it must depend on its arguments alone")
    for reason in found:
        empty = [f.name for f in fields(reason) if not str(getattr(reason, f.name)).strip()]
        if empty:
            raise CheckFailedError(f"refusal {reason.code} of {spec} has no {', '.join(empty)}")
    return found


def refusals(bench: Bench) -> Verdict:
    """``case.word`` is ``code`` or ``code@machine``: the kernel must refuse the spec with that code."""
    code, _, where = bench.case.word.partition("@")
    found = reasons(bench.kernel, bench.case.spec, MACHINES[where](bench.machine))
    if not found:
        raise CheckFailedError(f"accepts {bench.case.spec}, which its declaration excludes ({code})")
    if code not in {reason.code for reason in found}:
        raise CheckFailedError(f"refuses {bench.case.spec} with {', '.join(r.code for r in found)}, and not with {code}")
    return Verdict(status=Status.REFUSED, reason=next(str(r) for r in found if r.code == code))


def declaration(bench: Bench) -> Verdict:
    """Contract, derived refusals kept, rank, and everything declared accepted by some spec of the kit."""
    kernel = bench.kernel
    problems = kernel_problems(kernel)
    if problems:
        raise CheckFailedError("; ".join(problems))
    if not bench.accepted:
        first = next(iter(reasons(kernel, bench.case.spec, bench.machine)), None)
        raise CheckFailedError(f"accepts no spec of the kit; {bench.case.spec}: {first}")
    for spec in bench.accepted[:32]:
        dropped = set(_derived(kernel, spec, bench.machine)) - set(reasons(kernel, spec, bench.machine))
        if dropped:
            raise CheckFailedError(f"drops a refusal that follows from its answers: {next(iter(dropped))}")
        if not isinstance(kernel.rank(spec, bench.machine), int):
            raise CheckFailedError(f"rank({spec}) is not an int")
        kernel.transforms(spec), kernel.padding(spec)
    promised = [feature for feature in features_of(kernel) if feature.tried and feature.declares(kernel)]
    unmet = [feature.label for feature in promised if not any(feature.uses(spec) for spec in bench.accepted)]
    if unmet:
        raise CheckFailedError(f"declared, and refused in every spec of the kit: {', '.join(unmet)}")
    return Verdict(reason=f"{len(bench.accepted)} specs accepted")


def _derived(kernel: Kernel[Any], spec: Any, machine: Machine) -> tuple[Refusal, ...]:
    """What the base class derives, whatever the subclass made of it."""
    return Kernel.refusals(kernel, spec, machine)
