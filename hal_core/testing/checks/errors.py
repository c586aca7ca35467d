"""Bad arguments: a HalError, whatever it is, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hal_core.errors import HalError
from hal_core.ops import Grouped, Routed
from hal_core.testing.case import CheckFailedError, Verdict
from hal_core.testing.subjects import ExpertsSubject, LookupSubject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hal_core.testing.bench import Bench
    from hal_core.testing.subject import Subject

__all__ = ["errors", "expect_error"]

_Attempt = tuple[str, "Callable[[], Any]"]


def expect_error(what: str, attempt: Callable[[], Any], *words: str) -> None:
    """Raise unless ``attempt`` raises a HalError whose message holds each of ``words``."""
    try:
        attempt()
    except HalError as error:
        missing = [word for word in words if word not in str(error)]
        if missing:
            raise CheckFailedError(f"{what}: the error does not name {', '.join(missing)}: {error}") from error
        return
    except Exception as error:
        raise CheckFailedError(f"{what}: {type(error).__name__}, not a HalError: {str(error).splitlines()[:1]}") from error
    raise CheckFailedError(f"{what}: no error")


def errors(bench: Bench) -> Verdict:
    """Widths, element types and outputs that do not fit."""
    subject = bench.subject()
    op, count = subject.prepare(), 0
    for what, attempt in _attempts(subject, op):
        expect_error(what, attempt)
        count += 1
    if isinstance(subject, LookupSubject):
        for wrong in (subject.spec.rows, -1, 1 << 40):
            ids = torch.tensor([0, wrong], device=subject.device)
            expect_error(f"look-up of id {wrong}", lambda ids=ids: op.lookup(ids), str(wrong))  # type: ignore[misc]
    return Verdict(reason=f"{count} kinds of bad arguments")


def _attempts(subject: Subject, op: Any) -> Iterator[_Attempt]:
    if not subject.spec_routed:
        return
    inputs = subject.inputs(subject.rows)
    if subject.float_input:
        x = inputs.x
        for what, bad in (
            ("x one too wide", torch.cat([x, x[:, :1]], dim=1)), ("x one too narrow", x[:, 1:].contiguous()),
            ("x of integers", torch.zeros_like(x, dtype=torch.int32)),
        ):  # fmt: skip
            yield what, lambda bad=bad: subject.call(op, replace(inputs, x=bad))  # type: ignore[misc]
    if subject.takes_out:
        out = subject.poisoned(len(inputs))
        for what, wrong in (
            ("out one row short", out[1:].clone()), ("out one column short", out[..., 1:].clone()), ("out of float64", out.double()),
        ):  # fmt: skip
            yield what, lambda wrong=wrong: subject.call(op, inputs, wrong)  # type: ignore[misc]
    if isinstance(subject, ExpertsSubject):
        yield from _expert_attempts(subject, op)


def _expert_attempts(subject: ExpertsSubject, op: Any) -> Iterator[_Attempt]:
    i = subject.inputs(subject.rows)
    ids, scores = i.ids, i.scores
    assert ids is not None
    assert scores is not None
    yield "ids one row short", lambda: subject.call(op, replace(i, ids=ids[1:]))
    yield "router weights one slot short", lambda: subject.call(op, replace(i, scores=scores[:, 1:]))
    counts = torch.zeros(subject.spec.local, dtype=torch.int32, device=subject.device)
    if "grouped" not in subject.kernel.routing:  # type: ignore[attr-defined]
        yield "a form of routing that is not declared", lambda: op.apply(i.x, Grouped(counts))
    if subject.spec.expert_map:
        yield "no expert map, though the spec has one", lambda: op.apply(i.x, Routed(ids, scores))
        short = i.expert_map[1:] if i.expert_map is not None else None
        yield "an expert map one id short", lambda: op.apply(i.x, Routed(ids, scores), expert_map=short)
    else:
        mapping = torch.arange(subject.spec.num_experts, dtype=torch.int32, device=subject.device)
        yield "an expert map, though the spec has none", lambda: op.apply(i.x, Routed(ids, scores), expert_map=mapping)
