"""Routing of experts: who is skipped, who is crowded, and ids that nobody has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from hal_core.testing.case import CheckFailedError, Status, Verdict
from hal_core.testing.checks.errors import expect_error

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.testing.bench import Bench
    from hal_core.testing.subject import Inputs
    from hal_core.testing.subjects import ExpertsSubject

__all__ = ["ROUTINGS", "STRAY_IDS", "routing"]

#: Stray ids by name; None stands for the first one past the end.
STRAY_IDS: dict[str, int | None] = {"id_past_the_end": None, "id_far_away": (1 << 31) - 1, "id_minus_two": -2, "id_lowest": -(1 << 31)}
#: Patterns of valid ids.
ROUTINGS = ("one_expert", "one_idle", "repeated", "all_skipped", "some_skipped", "zero_weights", "negative_weights")


def routing(bench: Bench) -> Verdict:
    """One pattern of ids, against the truth or against the error that it must be."""
    subject, word = bench.experts(), bench.case.word
    inputs = subject.inputs(max(subject.rows, min(40, bench.kernel.m_range[1] or 40)))
    op = subject.prepare()
    if word in STRAY_IDS or word == "map_past_the_end":
        return _stray(subject, op, inputs, word)
    if word == "none_local":
        inputs = replace(inputs, expert_map=torch.full_like(_given(inputs.expert_map), -1))
    else:
        inputs = subject.tamed(_pattern(subject, inputs, word))
    ruler = subject.ruler(inputs)
    out = subject.poisoned(len(inputs))
    subject.call(op, inputs, out)
    ruler.check(out, what=f"{word}, over NaN")
    silent = ruler.truth.norm(dim=1) == 0
    if bool(out[silent].any()):
        raise CheckFailedError(f"{word}: rows without an expert are not zero")
    return Verdict(ruler.largest, ruler.bound)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # experts have routing, and the plan asks for a map where one is used
    return tensor


def _pattern(subject: ExpertsSubject, inputs: Inputs, word: str) -> Inputs:
    ids, scores, x = _given(inputs.ids).clone(), _given(inputs.scores).clone(), inputs.x.clone()
    last = subject.spec.num_experts - 1
    if word == "one_expert":
        ids[:] = last
    elif word == "one_idle":
        ids[ids == last] = 0
    elif word == "repeated":
        ids[:] = ids[:, :1].clamp(min=0)
    elif word == "all_skipped":
        ids[:] = -1
    elif word == "some_skipped":
        ids[::2] = -1
        x[0] = float("nan")  # nobody computes with it
    elif word == "zero_weights":
        scores[::3] = 0
    else:
        scores[::2] *= -1
    return replace(inputs, x=x, ids=ids, scores=scores)


def _stray(subject: ExpertsSubject, op: Any, inputs: Inputs, word: str) -> Verdict:
    """An id out of range in the last token but one, last slot."""
    token, slot = len(inputs) - 2, subject.spec.top_k - 1
    stray, words = subject.spec.local, cast("tuple[str, ...]", ())
    if word == "map_past_the_end":
        mapping = _given(inputs.expert_map).clone()
        mapping[int(_given(inputs.ids)[token, slot].clamp(min=0))] = stray
        inputs = replace(inputs, expert_map=mapping)
    else:
        known = STRAY_IDS[word]
        stray = subject.spec.num_experts if known is None else known
        ids = _given(inputs.ids).clone()
        ids[token, slot] = stray
        inputs = replace(inputs, ids=ids)
        words = (str(stray), f"token {token}", f"slot {slot}")
    out = subject.poisoned(len(inputs))
    if subject.device.type == "cpu":
        expect_error(f"{word} {stray}", lambda: subject.call(op, inputs, out), *words)
        if not bool(torch.isnan(out).all()):
            raise CheckFailedError(f"{word} {stray}: raised, and wrote a result all the same")
        return Verdict()
    return _flagged(lambda: subject.call(op, inputs, out), f"{word} {stray}", words)


def _flagged(call: Any, what: str, words: tuple[str, ...]) -> Verdict:
    """A device cannot raise in the middle of a stream: it sets a flag, which ``hal_core.check()`` turns into the error."""
    import hal_core

    check = getattr(hal_core, "check", None)
    if check is None:
        return Verdict(status=Status.SKIPPED, reason="this hal_core has no check()")
    expect_error(what, lambda: (call(), check()), *words)
    return Verdict()
