"""Every planted fault is caught by the check that is there for it, and the kernel without one passes them all."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from hal_core.machine import Machine
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.ops import Grouped, Routed
from hal_core.testing import Plan, Result, Status, plan_of, run_case

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "outside_backend"
sys.path.insert(0, str(EXAMPLE))
_SPEC = importlib.util.spec_from_file_location("example_faults", EXAMPLE / "tests" / "faults.py")
faults = importlib.util.module_from_spec(_SPEC)
sys.modules["example_faults"] = faults  # torch.compile looks modules up
_SPEC.loader.exec_module(faults)

#: What the issue of the kit names, word for word; more are in faults.py.
NAMED = (
    "zero point off by one", "limit dropped", "bias dropped", "int8 activations undeclared", "weights rescaled undeclared",
    "wrong expert map", "wrong only for M > 32", "wrong in the last partial group", "router weight applied twice", "NaN swallowed",
    "an id out of range computed", "output rows left unwritten", "layout does not reverse",
)  # fmt: skip


def run(plan: Plan, checks: tuple[str, ...] = (), *, until_bad: bool = False) -> list[Result]:
    results = []
    for case in plan.cases():
        if not checks or case.check in checks:
            results.append(run_case(plan, case))
            if until_bad and results[-1].status.bad:
                break
    return results


def failures(results: list[Result]) -> list[str]:
    return [f"{r.case}: {r.reason}" for r in results if r.status.bad]


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.detect()


@pytest.mark.parametrize("kernel", [faults.ExampleLinear(), faults.ExampleExperts()], ids=lambda kernel: kernel.name)
def test_the_example_without_a_fault_passes(kernel, machine: Machine) -> None:
    results = run(plan_of(f"example.{kernel.name}", kernel, machine))
    assert failures(results) == []
    assert sum(result.status is Status.PASSED for result in results) > 100


@pytest.mark.parametrize("name", faults.FAULTS)
def test_fault_is_caught(name: str, machine: Machine) -> None:
    """By the short run already."""
    kernel, check = faults.FAULTS[name]
    found = failures(run(plan_of(f"faulty.{kernel.name}", kernel, machine, short=True), (check,), until_bad=True))
    assert found, f"{check} did not notice: {name}"


def test_int8_activations_that_are_declared_pass(machine: Machine) -> None:
    """The same arithmetic as one of the faults; only the declaration differs."""
    answers = {"numerics": Numerics(activations=(ActivationQuant("int8", "token"),)), "error_bound": 2e-2}
    honest = type("Honest", (faults.ExampleLinear,), {"prepare": lambda self, spec, weights: faults.Int8Linear(spec, weights), **answers})()
    results = run(plan_of("honest.linear", honest, machine))
    assert failures(results) == []
    assert any(r.case == "honest.linear/refusals/numerics.activations" and r.status is Status.REFUSED for r in results)


class SortedRows(faults.ExpertsOp):
    """Takes rows that lie sorted or padded by expert, too."""

    wrong = False

    def compute(self, x, routing, expert_map, out, workspace, reduce):
        counts = getattr(routing, "counts", getattr(routing, "num_tokens_per_expert", None))
        if counts is None:
            return super().compute(x, routing, expert_map, out, workspace, reduce)
        every = torch.arange(len(counts), dtype=torch.int32)
        if isinstance(routing, Grouped):
            ids = torch.repeat_interleave(every, counts.long() if not self.wrong else counts.long().roll(1))
        else:
            ids = every[:, None].expand(x.shape[:2]).reshape(-1)
        rows = x.reshape(-1, x.shape[-1])
        y = super().compute(rows, Routed(ids[:, None], torch.ones(len(rows), 1)), None, None, None, True)
        return y.reshape(x.shape)


@pytest.mark.parametrize("wrong", [False, True])
def test_sorted_and_padded_rows_are_tried(wrong: bool, machine: Machine) -> None:
    op = type("SortedRows", (SortedRows,), {"wrong": wrong})
    body = {"routing": ("routed", "grouped", "batched"), "prepare": lambda self, spec, weights: op(spec, weights)}
    kernel = type("Sorted", (faults.ExampleExperts,), body)()
    results = run(plan_of("sorted.experts", kernel, machine))
    for form in ("grouped", "batched"):
        statuses = {r.status for r in results if r.check == "accuracy" and f",{form}" in r.case}
        assert Status.PASSED in statuses
        assert (Status.FAILED in statuses) == (wrong and form == "grouped")
    assert bool(failures(results)) == wrong


def test_every_named_fault_is_planted() -> None:
    assert set(NAMED) <= set(faults.FAULTS)


@pytest.mark.parametrize("name", ["zero point off by one", "wrong only for M > 32", "an id out of range computed", "NaN swallowed"])
def test_message_says_what_is_wrong(name: str, machine: Machine) -> None:
    kernel, check = faults.FAULTS[name]
    (message,) = failures(run(plan_of(f"faulty.{kernel.name}", kernel, machine), (check,), until_bad=True))
    wanted = {
        "zero point off by one": "relative L2 error", "wrong only for M > 32": "M=33", "an id out of range computed": "no error",
        "NaN swallowed": "swallowed",
    }  # fmt: skip
    assert wanted[name] in message


def test_faults_are_not_shipped() -> None:
    assert "faults" not in (EXAMPLE / "pyproject.toml").read_text()
    assert not list((EXAMPLE / "hal_backend_example").glob("*fault*"))
