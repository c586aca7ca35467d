"""The conformance kit on caches: the reference conforms, and kernels with a fault are told."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hal_core.contract import kernel_problems
from hal_core.kernel import KVEpilogue, KVSchemeSet
from hal_core.machine import Machine
from hal_core.numerics import Numerics
from hal_core.reference.kv import ReferenceKV, ReferenceKVOp
from hal_core.testing.case import Status
from hal_core.testing.checks.caches import CACHE_FUNCTIONS
from hal_core.testing.expectations import REFERENCE_EXPECTATIONS, Expectations
from hal_core.testing.features import features_of
from hal_core.testing.kit import Kit
from hal_core.testing.plan import plan_of
from hal_core.testing.run import run_case


@pytest.fixture(scope="module")
def machine():
    return Machine.detect()


class Small(ReferenceKV):
    """The reference with fewer schemes, so that a run is short."""

    name = "small"
    schemes = KVSchemeSet(keys=("bf16", "int8", "turboquant:4"), values=("bf16", "int8:token", "turboquant:4"), mixed=True)
    dtypes = ("fp32", "bf16")
    head_dims = (64, 96)
    _op: type = ReferenceKVOp

    def prepare(self, spec, weights):
        return self._op(spec, weights)


def failures(kernel, machine, *checks):
    """What these checks find, by check and, of effects, by the part of the attention."""
    plan, found = plan_of("mine.small", kernel, machine), {}
    for case in plan.cases():
        if case.check in checks:
            result = run_case(plan, case, seed=1)
            if result.status.bad:
                found[case.check, case.word if case.check == "effects" else ""] = result.reason
    return found


def test_the_reference_conforms(machine):
    torch.set_num_threads(1)
    plan = plan_of("reference.kv", ReferenceKV(), machine)
    report = Kit((plan,), {"reference": REFERENCE_EXPECTATIONS}).run(seed=3)
    assert [f"{r.case}: {r.reason}" for r in report.failures] == []
    tried = {case.check for case in plan.cases()}
    assert tried == {"declaration", "refusals", *CACHE_FUNCTIONS} - {"batch_invariance"}
    axes = [case.spec for case in plan.cases() if case.check == "accuracy"]
    assert {s.page_size for s in axes} >= {16, 32, 48, 64}
    assert {s.dtype for s in axes} == {"fp32", "bf16", "fp16"}
    assert {bool(s.window) for s in axes} == {s.sinks for s in axes} == {s.soft_cap is None for s in axes} == {True, False}


def test_what_is_not_declared_must_be_refused(machine):
    small = type("Little", (Small,), {"epilogue": KVEpilogue(*(False,) * 6), "schemes": KVSchemeSet(("fp8",), ("fp8",), False)})()
    assert kernel_problems(small) == ()
    plan = plan_of("mine.small", small, machine)
    report = Kit((plan,), {"mine": Expectations({"*/compile/*": "walks over sequences in Python"})}).run(seed=2)
    assert not report.failures
    codes = {case.word for case in plan.cases() if case.check == "refusals"}
    assert codes >= {"kv.scheme", "kv.mixed", "kv.head_dim", "epilogue.window", "epilogue.sinks", "epilogue.soft_cap", "epilogue.gqa",
                     "epilogue.value_dim", "epilogue.sink_tokens", "dtype.activation", "numerics.batch_invariant"}  # fmt: skip
    assert report.count(Status.REFUSED) >= len(codes)
    lax = type("Lax", (type(small),), {"refusals": lambda self, spec, machine: ()})()
    assert ("refusals", "") in failures(lax, machine, "refusals")
    assert "drops a refusal" in failures(lax, machine, "declaration").get(("declaration", ""), "drops a refusal")


class Deaf(ReferenceKVOp):
    """Leaves out one part of the attention."""

    def attend(self, q, *arguments, sinks=None, **more):
        kept = self.spec
        self.spec = replace(kept, **self.without)
        try:
            return super().attend(q, *arguments, sinks=None if self.without.get("sinks") is False else sinks, **more)
        finally:
            self.spec = kept


def changed(**methods):
    """The small kernel with an op that has other methods."""
    return type("Faulty", (Small,), {"_op": type("FaultyOp", (methods.pop("base", ReferenceKVOp),), methods)})()


@pytest.mark.parametrize(
    ("word", "without"),
    [("window", {"window": None, "sink_tokens": 0}), ("sink_tokens", {"sink_tokens": 0}), ("soft_cap", {"soft_cap": None}),
     ("sinks", {"sinks": False})],
)  # fmt: skip
def test_a_part_of_the_attention_that_is_left_out_is_told(machine, word, without):
    found = failures(changed(base=Deaf, without=without), machine, "effects", "accuracy")
    assert ("effects", word) in found
    assert ("accuracy", "") in found


def binary_lse(self, *arguments, **more):
    out, lse = ReferenceKVOp.attend(self, *arguments, **more)
    return out, lse / math.log(2)


def scaled(self, *arguments, **more):
    out, lse = ReferenceKVOp.attend(self, *arguments, **more)
    return out.mul_(1.02), lse


def scaled_alone(self, *arguments, **more):
    return ReferenceKVOp.attend(self, *arguments, **more)[0].mul_(1.02)


def rows_in_memory(self, q, *arguments, **more):
    return ReferenceKVOp.attend(self, q.as_strided(q.shape, torch.empty(q.shape, device="meta").stride()), *arguments, **more)


def drifting(self, *arguments, **more):
    out, lse = ReferenceKVOp.attend(self, *arguments, **more)
    self.calls = getattr(self, "calls", 0) + 1
    return out.mul_(1 + self.calls * 1e-4), lse


def own_rotation(self, weights):
    kept, self.spec = self.spec, replace(self.spec, seed=self.spec.seed + 1)
    ReferenceKVOp.update(self, weights)
    self.spec = kept


def spilling(self, pages, k, v, slots, tails=None, tail_ids=None):
    ReferenceKVOp.append(self, pages, k, v, slots, tails, tail_ids)
    if len(slots):
        pages[(int(slots[-1]) // self.spec.page_size + 1) % len(pages), 0] ^= 1


def hasty(self, pages, k, v, slots, tails=None, tail_ids=None):
    pages[0, 0] ^= 1
    try:
        ReferenceKVOp.append(self, pages, k, v, slots, tails, tail_ids)
    finally:
        if len(slots) != 2 or bool((slots >= 0).all() & (slots < len(pages) * self.spec.page_size).all()):
            pages[0, 0] ^= 1


def rude(self, *arguments, **more):
    try:
        return ReferenceKVOp.attend(self, *arguments, **more)
    except Exception as error:
        raise RuntimeError("boom") from error


def swallowing(self, pages, k, v, *rest):
    ReferenceKVOp.append(self, pages, k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0), *rest)


@pytest.mark.parametrize(
    ("methods", "check"),
    [
        ({"attend": binary_lse}, "accuracy"), ({"attend": scaled}, "accuracy"), ({"attend": drifting}, "determinism"),
        ({"update": own_rotation}, "accuracy"), ({"append": spilling}, "memory"), ({"append": hasty}, "errors"),
        ({"attend": rude}, "errors"), ({"attend_only": scaled_alone}, "accuracy"), ({"attend": rows_in_memory}, "accuracy"),
    ],
    ids=["binary logarithm", "scaled", "drifting", "another rotation", "spilling", "hasty", "rude", "scaled without logarithms",
         "blind to strides"],
)  # fmt: skip
def test_faults_are_told(machine, methods, check):
    assert (check, "") in failures(changed(**methods), machine, check)


def test_nan_that_vanishes_is_told(machine):
    found = failures(changed(append=swallowing), machine, "rows")
    assert "swallowed" in found["rows", ""]


def test_a_promise_is_held_to(machine):
    class Grouped(ReferenceKVOp):
        def attend(self, q, *arguments, **more):
            out, lse = super().attend(q, *arguments, **more)
            return out.mul_(1 + len(q) * 1e-3), lse

    kernel = type("Promising", (Small,), {"_op": Grouped, "numerics": Numerics(deterministic=True, batch_invariant=True)})()
    assert ("batch_invariance", "") in failures(kernel, machine, "batch_invariance")


def test_every_answer_of_the_contract_is_in_the_matrix():
    from dataclasses import fields

    labels = {feature.label for feature in features_of(ReferenceKV())}
    assert {field.name for field in fields(KVEpilogue)} <= labels
    assert {"keys int8", "values int8:token", "keys turboquant:3:unbiased", "head_dim 96", "activations fp16"} <= labels


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schemes": KVSchemeSet((), ("bf16",), True)}, "schemes.keys is empty"),
        ({"schemes": KVSchemeSet(("int3",), ("*",), True)}, "int3"),
        ({"head_dims": (64.0,)}, "head_dims"), ({"epilogue": None}, "epilogue"),
    ],
)  # fmt: skip
def test_answers_that_cannot_be_true(changes, problem):
    assert problem in " | ".join(kernel_problems(type("Wrong", (Small,), changes)()))


@pytest.mark.parametrize("answer", ["schemes", "head_dims", "epilogue"])
def test_each_missing_answer_is_found(answer):
    def absent(self):
        raise AttributeError(answer)

    assert f"{answer} is not answered" in kernel_problems(type("Missing", (Small,), {answer: property(absent)})())


def test_trial_of_a_kernel_in_a_process_of_its_own(machine):
    from hal_core.smoke import try_kernel

    assert try_kernel("reference.kv", ReferenceKV(), machine).outcome == "passed"
    doubled = changed(attend=lambda self, *given, **more: (ReferenceKVOp.attend(self, *given, **more)[0] * 2, None))
    assert try_kernel("mine.small", doubled, machine).outcome == "failed"
