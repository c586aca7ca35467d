"""An explanation is always an answer: what runs, or why nothing does and what to change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core.fakes import INT4, LINEAR, MACHINE, MOE, reference, registered, row

import hal_core as hal
from hal_core.errors import PolicyError
from hal_core.explain import Explanation, explain_from
from hal_core.kv.scheme import KVScheme
from hal_core.policy import Policy
from hal_core.schemes import WeightScheme
from hal_core.spec import EmbeddingSpec, KVCacheSpec

KERNELS = (registered("cpu.fast"), registered("cuda.marlin", devices=("cuda",)), registered("cpu.experts", "moe"), reference())
ROWS = (row("cpu", "cpu.fast", "cpu.experts"), row("cuda", "cuda.marlin"), row("reference", "reference.linear"))


def explain(spec, policy="auto", kernels=KERNELS, rows=ROWS):
    found = explain_from(spec, MACHINE, Policy.parse(policy), kernels, rows)
    assert Explanation.from_json(found.dumps()) == found
    return found


def test_a_served_spec():
    found = explain(LINEAR)
    assert found.served
    assert found.selection.kernel == "cpu.fast"
    assert str(found) == str(found.selection)


def test_a_spec_that_nothing_serves_lists_each_candidate_with_all_its_codes_and_fixes():
    found = explain(replace(LINEAR, weights=WeightScheme.parse("nvfp4:tensor"), dtype="fp16"))
    assert not found.served
    assert found.problem == "no kernel accepts it; each reason says what would change it"
    assert {c.kernel: {r.code for r in c.refusals} for c in found.candidates} == {
        "cpu.fast": {"scheme.dtype", "scheme.granularity", "dtype.activation", "dtype.output"},
        "cuda.marlin": {"device.missing", "scheme.dtype", "scheme.granularity", "dtype.activation", "dtype.output"},
        "reference.linear": {"scheme.dtype", "dtype.activation", "dtype.output"},
    }
    text = str(found)
    for candidate in found.candidates:
        assert f"refused:  {candidate.kernel}" in text
        for reason in candidate.refusals:
            assert str(reason) in text
            assert reason.fix


def test_a_required_kernel_that_cannot_serve():
    found = explain(LINEAR, "require:cuda")
    assert not found.served
    assert "policy auto would use cpu.fast" in found.problem
    assert all(not candidate.accepted for candidate in found.candidates)


def test_a_name_that_matches_nothing_is_a_problem_with_the_candidates_beside_it():
    found = explain(LINEAR, "require:cpu.fats")
    assert "did you mean cpu.fast" in found.problem
    assert [c.kernel for c in found.candidates if c.accepted] == ["cpu.fast", "reference.linear"]
    assert not any(c.chosen for c in found.candidates)


@pytest.mark.parametrize("spec", [EmbeddingSpec(64, 64, INT4), KVCacheSpec(8, 2, 64, 16, KVScheme("bf16"), KVScheme("bf16")), MOE])
def test_kinds_of_op_without_a_kernel(spec):
    found = explain(spec, kernels=(registered("cpu.fast"),), rows=(row("cpu", "cpu.fast"),))
    assert [r.code for c in found.candidates for r in c.refusals] == ["op.unsupported"]


def test_nothing_installed_at_all():
    found = explain(LINEAR, kernels=(), rows=())
    assert found.candidates == ()
    assert "pip install hal-backend-cpu" in found.problem
    assert "chosen:   none" in str(found)


def test_the_function_of_the_package(monkeypatch):
    monkeypatch.delenv("HAL_POLICY", raising=False)
    found = hal.explain(hal.LinearSpec(64, 64, INT4), policy="require:reference")
    assert found.selection.kernel == "reference.linear"
    fp8 = hal.KVCacheSpec(8, 2, 64, 16, KVScheme("fp8"), KVScheme("fp8"))
    assert "kv.scales" in {r.code for c in hal.explain(fp8, policy="require:reference").candidates for r in c.refusals}
    with pytest.raises(PolicyError):
        hal.explain(LINEAR, policy="require")
