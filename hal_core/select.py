"""The choice of kernels: a pure function of values. No environment, clock or global; the order of plugins does not matter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hal_core.errors import NoKernelError
from hal_core.numerics import Numerics, combined
from hal_core.refusal import Refusal
from hal_core.selection import Candidate, Interval, Selection
from hal_core.spec import KVCacheSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hal_core.kernel import Kernel
    from hal_core.machine import Machine
    from hal_core.policy import Binding, Policy
    from hal_core.registry import BackendRow, RegisteredKernel
    from hal_core.spec import Spec

__all__ = ["candidates_from", "select_from"]

_LAST = "reference"
#: A kernel refused for one of these was not made for the problem, so that another one serves is no loss.
_OTHER_PROBLEM = ("scheme.", "kv.scheme", "kv.mixed", "numerics.", "policy.")
_INSTALL = "pip install hal-backend-cpu (or -cuda, -rocm, -xpu)"


@dataclass(frozen=True)
class _Plan:
    """Intervals of one layout; ``partial`` gives the batch sizes of kernels that serve only some, with nothing beside them."""

    intervals: tuple[Interval, ...] = ()
    layout: str = ""
    partial: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(interval.kernel for interval in self.intervals))


@dataclass(frozen=True)
class _Decision:
    """fallen: a preference could not be met. other: what ``auto`` would have used where ``require`` found nothing."""

    binding: Binding
    plan: _Plan
    candidates: tuple[Candidate, ...]
    fallen: bool
    other: _Plan


def select_from(
    spec: Spec, machine: Machine, policy: Policy, kernels: Sequence[RegisteredKernel], rows: Sequence[BackendRow] = ()
) -> Selection:
    """The kernels that serve ``spec`` on ``machine`` under ``policy``.

    Args:
        spec: the problem.
        machine: the machine to decide for, at hand or not.
        policy: which kernels the user wants.
        kernels: all registered kernels; those of other kinds of op are passed over.
        rows: all backends; those that are not loaded, or have no kernel for this op, appear as refused candidates.

    Raises:
        NoKernelError: nothing may serve it; holds every candidate's reasons.
        PolicyError: ``require`` names what is not there.
    """
    decision = _decide(spec, machine, policy, kernels, rows)
    plan = decision.plan
    if not plan.intervals:
        raise _no_kernel(spec, policy, decision)
    by_name = {k.name: k.kernel for k in kernels}
    chosen = [by_name[name] for name in plan.names]
    numerics = combined([kernel.computes(spec) for kernel in chosen])
    unmatched = policy.unmatched(_ops_of(kernels), _unloaded(kernels, rows)) if policy.word == "prefer" else ()
    return Selection(
        spec=spec,
        policy=str(policy),
        layout=plan.layout,
        intervals=plan.intervals,
        candidates=decision.candidates,
        numerics=numerics,
        transforms=tuple(dict.fromkeys(t for kernel in chosen for t in kernel.transforms(spec))),
        padding=tuple(dict.fromkeys(p for kernel in chosen for p in kernel.padding(spec))),
        notes=(*unmatched, *_notes(spec, decision, numerics), *_passed_over(spec, decision, by_name)),
    )


def candidates_from(
    spec: Spec, machine: Machine, policy: Policy, kernels: Sequence[RegisteredKernel], rows: Sequence[BackendRow] = ()
) -> tuple[Candidate, ...]:
    """Every candidate with its verdict, also when nothing may serve the spec.

    Raises:
        PolicyError: ``require`` names what is not there.
    """
    return _decide(spec, machine, policy, kernels, rows).candidates


def _decide(spec: Spec, machine: Machine, policy: Policy, kernels: Sequence[RegisteredKernel], rows: Sequence[BackendRow]) -> _Decision:
    binding = policy.bind(spec.op, _ops_of(kernels), _unloaded(kernels, rows))
    judged = _judged(spec, machine, kernels, rows)
    if binding.word == "require" and isinstance(spec, KVCacheSpec):
        judged = _without_default_scales(spec, judged)
    by_name = {k.name: k for k in kernels}
    judged = [_asked_for(c, by_name.get(c.kernel), spec, machine, binding, policy) for c in judged]
    able = [c for c in judged if c.accepted]
    plan = _plan(spec, [c for c in able if binding.allows(c.kernel)], by_name)
    other = _Plan() if plan.intervals or binding.word == "auto" else _plan(spec, able, by_name)
    fallen = binding.word == "prefer" and not plan.intervals
    plan = other if fallen else plan
    return _Decision(binding, plan, _verdicts(judged, plan, binding, policy), fallen, other)


def _ops_of(kernels: Iterable[RegisteredKernel]) -> dict[str, str]:
    return {k.name: k.kernel.op for k in kernels}


def _unloaded(kernels: Iterable[RegisteredKernel], rows: Iterable[BackendRow]) -> frozenset[str]:
    return frozenset(row.name for row in rows) - {k.backend for k in kernels}


def _rank(candidate: Candidate) -> tuple[bool, int, str]:
    return candidate.backend == _LAST, -candidate.priority, candidate.kernel


def _judged(spec: Spec, machine: Machine, kernels: Sequence[RegisteredKernel], rows: Sequence[BackendRow]) -> list[Candidate]:
    """Each candidate with its own reasons, before any policy, in order of rank."""
    found = []
    # The registry judged wheels by the machine at hand; this may be another.
    barred = {row.name: row.manifest.refusals(machine) for row in rows if row.loaded and row.manifest is not None}
    for k in kernels:
        if k.kernel.op == spec.op:
            reasons, rank = _reasons(k, spec, machine)
            reasons = (*barred.get(k.backend, ()), *reasons)
            found.append(Candidate(k.name, k.backend, not reasons, priority=rank, refusals=reasons))
    serving = {candidate.backend for candidate in found}
    for row in rows:
        if not row.loaded:
            # Two wheels may claim one name: the refused one is then shown with its distribution.
            label = f"{row.name} ({row.distribution})" if row.name in serving else row.name
            found.append(Candidate(label, row.name, False, refusals=row.refusals))
        elif row.name not in serving:
            reason = Refusal("op.unsupported", f"a kernel for {spec.op}", f"{row.name} has none", "use another backend for this op")
            found.append(Candidate(row.name, row.name, False, refusals=(reason,)))
    return sorted(found, key=_rank)


def _reasons(registered: RegisteredKernel, spec: Spec, machine: Machine) -> tuple[tuple[Refusal, ...], int]:
    """A kernel's own verdict and its rank; one that breaks while it is asked anything is refused, and hides nobody."""
    kernel: Any = registered.kernel
    reasons = _answer(registered, "refusals", tuple, spec, machine)
    if isinstance(reasons, _Broken) or any(not isinstance(reason, Refusal) for reason in reasons):
        found = reasons.found if isinstance(reasons, _Broken) else "refusals() returned tuple, not a tuple of Refusal"
        return _broken(registered, found), kernel.priority
    if reasons:
        return reasons, kernel.priority
    rank = _answer(registered, "rank", int, spec, machine)
    others = [_answer(registered, name, kind, spec) for name, kind in (("computes", Numerics), ("transforms", tuple), ("padding", tuple))]
    faults = [answer.found for answer in (rank, *others) if isinstance(answer, _Broken)]
    return (_broken(registered, "; ".join(faults)), kernel.priority) if faults else ((), rank)


@dataclass(frozen=True)
class _Broken:
    """What went wrong in a plugin's answer."""

    found: str


def _answer(registered: RegisteredKernel, name: str, kind: type, *arguments: object) -> Any:
    """One answer of a kernel, of the kind that the contract says, or what is wrong with it."""
    try:
        value = getattr(registered.kernel, name)(*arguments)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return _Broken(f"{name}() raised {type(error).__name__}: {error}")
    if isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    return _Broken(f"{name}() returned {type(value).__name__}, not a {kind.__name__}{' of Refusal' if name == 'refusals' else ''}")


def _broken(registered: RegisteredKernel, found: str) -> tuple[Refusal, ...]:
    return (Refusal("backend.invalid", f"a verdict of {registered.name}", found, "tell the plugin's authors"),)


def _asked_for(
    candidate: Candidate, registered: RegisteredKernel | None, spec: Spec, machine: Machine, binding: Binding, policy: Policy
) -> Candidate:
    """Refused where the kernel serves only who names it, and the policy does not."""
    named = binding.word != "auto" and binding.allows(candidate.kernel)
    if not candidate.accepted or named or registered is None:
        return candidate
    answer = _answer(registered, "by_name_only", bool, spec, machine)
    if isinstance(answer, _Broken):
        return replace(candidate, accepted=False, refusals=_broken(registered, answer.found))
    if not answer:
        return candidate
    found = "it runs on a device for tests here, and serves only who names it"
    reason = Refusal("policy.unnamed", str(policy), found, f"name it: require:{candidate.kernel}")
    return replace(candidate, accepted=False, refusals=(reason,))


def _without_default_scales(spec: KVCacheSpec, judged: list[Candidate]) -> list[Candidate]:
    """Who requires a kernel wants its numbers: a cache whose static scales nobody measured would clip or waste them."""
    if spec.scales != "default" or not (spec.keys.scaled or spec.values.scaled):
        return judged
    fix = "give the checkpoint's scales, or compute them from tokens"
    reason = Refusal("kv.scales", f"k={spec.keys} v={spec.values} under require", "default scales of 1.0", fix)
    return [replace(c, accepted=False, refusals=(*c.refusals, reason)) for c in judged]


def _plan(spec: Spec, pool: Sequence[Candidate], by_name: dict[str, RegisteredKernel]) -> _Plan:
    """The best kernel whose layout serves every M, alone or with others of its backend that share the layout."""
    best, partial = _Plan(), []
    for candidate in pool:
        layout = by_name[candidate.kernel].kernel.layout
        sharing = [c for c in pool if c.backend == candidate.backend and by_name[c.kernel].kernel.layout == layout]
        # Two kernels round differently, so a row would depend on how many others there are.
        group = [candidate] if spec.numerics.batch_invariant else sharing
        intervals = _intervals([by_name[c.kernel] for c in group])
        if not intervals:
            partial.append((candidate.kernel, _span(by_name[candidate.kernel])))
        elif not best.intervals:
            best = _Plan(intervals, layout)
    return replace(best, partial=tuple(partial))


def _span(registered: RegisteredKernel) -> str:
    least, most = registered.kernel.m_range
    return f"M >= {least}" if most is None else f"M = {least} to {most}"


def _intervals(group: Sequence[RegisteredKernel]) -> tuple[Interval, ...]:
    """Cover M = 1 and up with kernels of falling rank; empty when some M is served by none."""
    out: list[Interval] = []
    m: int | None = 1
    while m is not None:
        at = next((i for i, k in enumerate(group) if k.kernel.m_range[0] <= m <= (k.kernel.m_range[1] or m)), None)
        if at is None:
            return ()
        better = [k.kernel.m_range[0] - 1 for k in group[:at] if k.kernel.m_range[0] > m]
        own = group[at].kernel.m_range[1]
        ends = [*better, *([] if own is None else [own])]
        end = min(ends) if ends else None
        out.append(Interval(m, end, group[at].name))
        m = None if end is None else end + 1
    return tuple(out)


def _verdicts(judged: Sequence[Candidate], plan: _Plan, binding: Binding, policy: Policy) -> tuple[Candidate, ...]:
    """The candidates with what plan and policy add; chosen ones first, then accepted, then refused."""
    partial, names = dict(plan.partial), plan.names
    out = []
    for candidate in judged:
        extra: list[Refusal] = []
        if candidate.kernel in partial:
            found = f"serves {partial[candidate.kernel]}, and no kernel that shares its layout serves the rest"
            extra.append(Refusal("shape.rows", "every batch size", found, "use another kernel"))
        if binding.word == "require" and not _meant(candidate, binding):
            extra.append(Refusal("policy.excluded", str(policy), candidate.kernel, f"name {candidate.kernel} in the policy, or use auto"))
        chosen = candidate.kernel in names
        reasons = (*candidate.refusals, *extra)
        out.append(replace(candidate, accepted=not reasons, chosen=chosen, refusals=reasons) if extra or chosen else candidate)
    return tuple(sorted(out, key=lambda c: (not c.chosen, not c.accepted, _rank(c))))


def _meant(candidate: Candidate, binding: Binding) -> bool:
    """Whether the policy names it; a backend stands there under its own name when it has no kernels."""
    if "." in candidate.kernel and " (" not in candidate.kernel:
        return binding.allows(candidate.kernel)
    return binding.allows_backend(candidate.backend)


def _listed(candidates: Iterable[Candidate]) -> str:
    """Each reason once, with all that give it: kernels of one family refuse alike."""
    owners: dict[Refusal, list[str]] = {}
    for candidate in candidates:
        for reason in candidate.refusals:
            owners.setdefault(reason, []).append(candidate.kernel)
    return "".join(f"\n  {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in owners.items())


def _notes(spec: Spec, decision: _Decision, numerics: Numerics) -> tuple[str, ...]:
    """What the user should be told: a preference not met, or nothing faster than the reference."""
    binding, names = decision.binding, ", ".join(decision.plan.names)
    slow = names.startswith(f"{_LAST}.") and (binding.word == "auto" or decision.fallen)
    if decision.fallen:
        why = _listed(c for c in decision.candidates if slow or _meant(c, binding))
        return (f"{binding} cannot serve {spec}, so {names} does:{why or ' it has no kernel for this op'}",)
    if slow:
        why = _listed(decision.candidates) or f" no other backend is installed; {_INSTALL}"
        does = "is exact" if numerics.exact else f"computes with inputs {', '.join(map(str, numerics.activations))}"
        return (f"{spec} runs on {names}, which {does} and is slow:{why}",)
    return ()


def _passed_over(spec: Spec, decision: _Decision, by_name: dict[str, Kernel[Any]]) -> tuple[str, ...]:
    """Libraries whose kernel was made for the problem, ranks above the chosen one of its backend, and refused; each once.

    Where the library cannot be called at all, the note is the same for every spec.
    """
    if decision.fallen:  # said already, with every reason
        return ()
    served = next(c for c in decision.candidates if c.kernel == decision.plan.names[-1])
    told: dict[str, str] = {}
    for c in decision.candidates:
        library = by_name[c.kernel].provider if c.kernel in by_name else ""
        above = library and library != by_name[served.kernel].provider and c.backend == served.backend and c.priority > served.priority
        other = any(reason.code.startswith(_OTHER_PROBLEM) for reason in c.refusals)
        if not above or c.accepted or other or not _meant(c, decision.binding):
            continue
        if absent := "".join(f"\n  {reason}" for reason in c.refusals if reason.code.startswith("backend.")):
            told.setdefault(library, f"{library} cannot be called, so other kernels of {c.backend} serve in its place:{absent}")
        else:
            told.setdefault(library, f"{spec} runs on {', '.join(decision.plan.names)} in place of {library}:{_listed([c])}")
    return tuple(told.values())


def _no_kernel(spec: Spec, policy: Policy, decision: _Decision) -> NoKernelError:
    if decision.other.intervals:
        fix = f"policy auto would use {decision.other.intervals[-1].kernel}"
    else:
        fix = "each reason says what would change it" if decision.candidates else _INSTALL
    meant_first = sorted(decision.candidates, key=lambda c: not _meant(c, decision.binding))
    return NoKernelError(f"{spec} under policy {policy}", [(c.kernel, c.refusals) for c in meant_first], fix)
