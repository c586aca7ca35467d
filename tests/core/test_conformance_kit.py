"""The kit itself: its choice of cases, its lists, its measure, and that it stays out of the way."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hal_core.errors import MissingDependencyError, ValueDecodeError
from hal_core.kernel import ShapeLimit
from hal_core.machine import Machine
from hal_core.registry import default_registry
from hal_core.schemes import WeightScheme
from hal_core.testing import CHECKS, Expectations, Kit, Status, kit_of, plan_of, run_case
from hal_core.testing.brief import meetings
from hal_core.testing.case import CheckFailedError, Verdict
from hal_core.testing.checks import FUNCTIONS, state
from hal_core.testing.checks.caches import CACHE_FUNCTIONS
from hal_core.testing.checks.memory import Guarded
from hal_core.testing.data import random_weight
from hal_core.testing.features import features_of
from hal_core.testing.kit import Report
from hal_core.testing.matrix import tables_of
from hal_core.testing.measure import Ruler, same_bits
from hal_core.testing.space import declared_schemes, fitted, pairwise, specs_of
from hal_core.testing.truth import weight_matrix
from hal_core.testing.writers import as_markdown

ROOT = Path(__file__).resolve().parents[2]


def reference(op: str):
    return default_registry().kernel(f"reference.{op}")


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.detect()


@pytest.mark.parametrize("sizes", [(3, 4, 2), (5, 1, 3, 3), (7,), (30, 8, 6, 2, 3)])
def test_every_two_values_of_any_two_axes_meet(sizes: tuple[int, ...]) -> None:
    rows = pairwise(sizes)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == {(i, j) for i in range(sizes[a]) for j in range(sizes[b])}
    assert len(rows) <= 2 * max(sizes) * (sorted(sizes)[-2] if len(sizes) > 1 else 1)


def test_every_check_has_a_function_and_a_sentence() -> None:
    assert list(FUNCTIONS) == list(CHECKS)


@pytest.mark.parametrize("op", ["linear", "embedding", "moe"])
def test_cases_have_unique_ids_and_reach_every_scheme(op: str, machine: Machine) -> None:
    kernel = reference(op)
    cases = plan_of(f"reference.{op}", kernel, machine).cases()
    ids = [case.id for case in cases]
    assert len(ids) == len(set(ids))
    assert not any(" " in identity or "[" in identity for identity in ids)
    tried = {scheme for spec, _, _ in specs_of(kernel) for scheme in (spec.schemes if op == "moe" else (spec.weights,))}
    assert tried == set(declared_schemes(kernel))


def test_a_full_run_has_more_cases_and_all_of_the_quick_ones(machine: Machine) -> None:
    quick = {label for _, _, label in specs_of(reference("linear"))}
    full = {label for _, _, label in specs_of(reference("linear"), full=True)}
    assert quick < full


@pytest.mark.parametrize("op", ["linear", "embedding", "moe", "kv"])
def test_a_short_run_is_a_part_that_shows_every_scheme_and_every_two_values_that_meet(op: str, machine: Machine) -> None:
    every, short = (plan_of(f"reference.{op}", reference(op), machine, short=short) for short in (False, True))
    tried = [{case.id: case for case in plan.cases() if case.check == "accuracy"} for plan in (every, short)]
    assert tried[1].keys() < tried[0].keys()
    accepted = set(every.accepted)
    shown = [set().union(*(meetings(c.spec, c.scales) for c in cases.values() if c.spec in accepted)) for cases in tried]
    assert shown[0] == shown[1]
    assert {case.check for case in short.cases()} == {case.check for case in every.cases()}


def test_sizes_are_moved_inside_the_limits_of_a_kernel() -> None:
    from core.fakes import LINEAR, kernel

    limited = kernel(limits=(ShapeLimit("n", multiple=64, most=1024), ShapeLimit("k", multiple=128, least=256)))
    sizes = {(spec.n, spec.k) for spec, _, _ in specs_of(limited)}
    assert sizes
    assert all(n % 64 == 0 and k % 128 == 0 and k >= 256 for n, k in sizes)
    assert fitted(limited, LINEAR).n == 256


SCHEMES = sorted({str(s) for s in declared_schemes(reference("linear"))})


@pytest.mark.parametrize("text", SCHEMES)
def test_two_definitions_of_a_weight_agree(text: str) -> None:
    """The canonical tensor's own dequantization, and the kit's from the stored bytes."""
    weight = random_weight(WeightScheme.parse(text), (3, 17, 100), torch.Generator().manual_seed(1))
    theirs, ours = weight.dequantize().double(), weight_matrix(weight)
    assert float((theirs - ours).norm() / ours.norm()) < 1e-6


def test_random_weights_have_what_hides_faults() -> None:
    rng = torch.Generator().manual_seed(0)
    weight = random_weight(WeightScheme.parse("int4:g32:zero"), (64, 256), rng)
    assert bool((weight.scales < 0).any())
    assert bool((weight.scales == 0).any())
    assert {0, 15} <= set(weight.zeros.flatten().tolist())
    assert float(weight.scales.abs().max()) > 5 * float(weight.scales.abs().median())


def test_one_wrong_row_among_many_is_seen() -> None:
    truth = torch.randn(1000, 16, dtype=torch.float64)
    y = truth.clone()
    y[700] *= 1.05
    with pytest.raises(CheckFailedError, match="row 700"):
        Ruler(truth, 4e-3).check(y.float())


def test_a_row_that_cancels_is_measured_against_the_others() -> None:
    truth = torch.ones(10, 4, dtype=torch.float64)
    truth[3] = 1e-9
    Ruler(truth, 1e-3).check(truth + 1e-5)


def test_guards_notice_a_byte_on_either_side() -> None:
    for offset in (-1, 6):
        guarded = Guarded(torch.zeros(6), "out")
        guarded.check()
        guarded.view.as_strided((1,), (1,), guarded.view.storage_offset() + offset).fill_(3.0)
        with pytest.raises(CheckFailedError, match="before" if offset < 0 else "after"):
            guarded.check(unchanged=False)


def test_bits_are_compared_as_bits() -> None:
    same_bits(torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), 0.0]), "x")
    with pytest.raises(CheckFailedError):
        same_bits(torch.tensor([0.0]), torch.tensor([-0.0]), "x")


def test_unsupported_cases_are_not_run_and_expected_failures_must_fail(machine: Machine, monkeypatch) -> None:
    plan = plan_of("reference.linear", reference("linear"), machine)
    case = next(case for case in plan.cases() if case.check == "threads")
    hoped, never = Expectations(expected_failures={"reference.linear/threads/*": "not yet"}), Expectations({case.id: "by nature"})
    assert run_case(plan, case, expected=never).status is Status.UNSUPPORTED
    assert run_case(plan, case, expected=hoped).status is Status.STALE

    def fails(bench: object) -> Verdict:
        raise CheckFailedError("no")

    monkeypatch.setitem(FUNCTIONS, "threads", fails)
    assert run_case(plan, case, expected=hoped).status is Status.EXPECTED
    assert run_case(plan, case).status is Status.FAILED


def test_entries_that_no_case_has_are_stale_in_a_full_run(machine: Machine) -> None:
    lists = Expectations(unsupported={"reference.gone/*": "the kernel was renamed", "reference.linear/threads/*": "x"})
    plan = plan_of("reference.linear", reference("linear"), machine)
    assert lists.unmatched(case.id for case in plan.cases()) == ("reference.gone/*",)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"unsuported": {}}', '{"unsupported": {"a": ""}}', '{"unsupported": {"a": 3}}', '{"unsupported": []}', "[" * 100000],
    ids=["empty", "list", "misspelt", "no reason", "number", "wrong table", "deep"],
)
def test_bad_lists_are_a_clear_error(text: str) -> None:
    with pytest.raises(ValueDecodeError):
        Expectations.parse(text)


def test_a_kernel_that_raises_anything_is_a_failed_case(machine: Machine) -> None:
    from core.fakes import kernel

    plan = plan_of("fake.fast", kernel(), machine)  # its prepare is not implemented
    statuses = {run_case(plan, case).status for case in plan.cases() if case.check == "update"}
    assert statuses == {Status.FAILED}


def test_a_kernel_for_another_machine_is_skipped_with_the_reason() -> None:
    from core.fakes import MACHINE, kernel

    plan = plan_of("fake.far", kernel(devices=("cuda",), isa=()), MACHINE)
    by_check = {case.check: run_case(plan, case) for case in plan.cases()}
    assert by_check["update"].status is Status.SKIPPED
    assert "cuda" in by_check["update"].reason
    assert by_check["declaration"].status is Status.PASSED
    assert by_check["refusals"].status is Status.REFUSED


def test_hal_core_does_not_import_the_kit_and_the_plugin_is_light() -> None:
    code = "import hal_core, sys; a = 'hal_core.testing' in sys.modules; import hal_core.testing.plugin; print(a, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split() == ["False", "False"]


def test_without_pytest_the_test_class_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "import hal_core.testing as t\nt.kit_of\n"
        "try: t.BackendConformance\nexcept Exception as e: print(type(e).__name__, e)"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told.startswith(MissingDependencyError.__name__)
    assert "hal-core[testing]" in told
    assert "hal verify" in told


class TestReference:
    """The reference has no kernel faster than its definition; the kit judges it as any other."""

    @pytest.mark.parametrize("op", ["linear", "embedding", "moe"])
    def test_reference_conforms(self, op: str, machine: Machine) -> None:
        from hal_core.testing.expectations import REFERENCE_EXPECTATIONS

        torch.set_num_threads(1)
        plan = plan_of(f"reference.{op}", reference(op), machine)
        report = Kit((plan,), {"reference": REFERENCE_EXPECTATIONS}).run(seed=3)
        assert [f"{r.case}: {r.reason}" for r in report.failures] == []


@pytest.fixture(scope="module")
def small_report(machine: Machine) -> Report:
    plan = plan_of("reference.linear", reference("linear"), machine)
    cases = [case for case in plan.cases() if case.check in {"declaration", "effects", "determinism"}]
    return Report(0, full=False, plans=(plan,), results=tuple(run_case(plan, case) for case in cases))


def test_matrix_says_yes_no_and_declared(small_report: Report) -> None:
    served = next(table for table in tables_of(small_report) if table.name == "served")
    rows = {label: cells[0] for label, cells in served.rows}
    assert rows["bias"] == "yes"
    assert rows["act-order"] == "declared"  # nothing of this short run used it
    assert "lora" not in rows  # served by none of the columns
    assert rows["deterministic"] == "yes"


def test_matrix_is_json_and_markdown(small_report: Report) -> None:
    from hal_core.testing.writers import as_json

    assert json.loads(json.dumps(as_json(small_report)))["counts"]["failed"] == 0
    assert "| bias | yes |" in as_markdown(small_report)


def headings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("#", "| |"))]


def labels(text: str) -> list[str]:
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ") and not line.startswith("| |")]


def test_page_of_the_support_matrix_has_every_kernel_and_row() -> None:
    """Not its numbers, which a machine measures: its structure. ``hal verify --markdown docs/support-matrix.md`` writes it."""
    page = (ROOT / "docs" / "support-matrix.md").read_text(encoding="utf-8")
    rows = {row.name for row in default_registry().rows() if row.loaded}
    if "cpu" not in rows:
        pytest.skip("the hal-backend-cpu wheel is not installed")
    empty = Report(0, full=False, plans=kit_of(("cpu", "reference")).plans, results=())
    assert headings(page) == headings(as_markdown(empty)), "the page is older than the kernels: run hal verify --markdown"
    assert labels(page) == labels(as_markdown(empty)), "the page is older than the kernels: run hal verify --markdown"
    assert "FAILS" not in page


def test_every_declared_feature_of_the_contract_is_in_the_matrix() -> None:
    from dataclasses import fields

    from hal_core.kernel import LinearEpilogue, MoEEpilogue

    linear = {feature.label for feature in features_of(reference("linear"))}
    experts = {feature.label for feature in features_of(reference("moe"))}
    assert {field.name for field in fields(LinearEpilogue)} <= linear
    assert {field.name for field in fields(MoEEpilogue)} - {"activations"} <= experts


def verify(*arguments: str):
    from hal_core.cli.main import app

    return CliRunner().invoke(app, ["verify", *arguments])


def test_command_exits_with_one_when_something_fails(monkeypatch) -> None:
    def fails(bench: object) -> Verdict:
        raise CheckFailedError("planted")

    for check in FUNCTIONS:
        monkeypatch.setitem(FUNCTIONS, check, (lambda bench: Verdict()) if check != "threads" else fails)
    for check in CACHE_FUNCTIONS:
        monkeypatch.setitem(CACHE_FUNCTIONS, check, lambda bench: Verdict())
    done = verify("reference", "--seed", "5")
    assert done.exit_code == 1
    assert "planted" in done.output
    assert "does NOT conform" in done.output
    assert "seed 5" in done.output


def test_an_installed_backend_that_does_not_load_is_not_passed_over(tmp_path, machine: Machine, monkeypatch) -> None:
    from core.fakes import entry_points, install

    from hal_core.registry import Registry

    install(tmp_path, "broken", code="raise OSError('undefined symbol')")
    install(tmp_path, "old", data="{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    kit = kit_of(registry=Registry(entry_points(tmp_path), machine), machine=machine)
    assert {plan.name for plan in kit.plans} == {"reference.linear", "reference.moe", "reference.embedding", "reference.kv"}
    (broken,), (left_out,) = kit.broken, kit.left_out
    assert "undefined symbol" in broken
    assert left_out.startswith("old")
    assert not Report(0, full=False, plans=(), results=(), broken=kit.broken).good


def test_command_writes_markdown_and_exits_with_zero(monkeypatch, tmp_path: Path) -> None:
    for check in FUNCTIONS:
        monkeypatch.setitem(FUNCTIONS, check, lambda bench: Verdict())
    for check in CACHE_FUNCTIONS:
        monkeypatch.setitem(CACHE_FUNCTIONS, check, lambda bench: Verdict())
    done = verify("reference", "--markdown", str(tmp_path / "m.md"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "m.md").read_text().startswith("# Support matrix")


@pytest.mark.parametrize("loss", [2.0**-8, 2.0**-11])
def test_a_scale_is_moved_by_more_than_a_transform_may_lose(loss: float) -> None:
    for value in (0.0, 0.5, -0.5, *(-loss / (0.02 + 4 * loss) * step for step in (0.98, 1.0, 1.02))):
        before = torch.tensor([1.0, value], dtype=torch.bfloat16)
        after = state._moved(before, loss)
        assert after[0] == before[0]
        assert abs(float(after[1] - before[1])) > loss * abs(value), value


def test_what_rounding_alone_does_in_float64_is_allowed_and_not_more() -> None:
    truth = torch.randn(4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rounded = truth.clone()
    rounded[2] *= 1.5
    for rows in (slice(2, 3), slice(None), torch.tensor([2, 0])):
        Ruler(truth, 0.1, rounded=lambda: rounded).check(rounded[rows].float(), rows)
    opposite = truth - (rounded - truth)
    for wrong, told in ((rounded, lambda: None), (opposite, lambda: rounded), (rounded + 0.5, lambda: rounded)):
        with pytest.raises(CheckFailedError, match="allowed"):
            Ruler(truth, 0.1, rounded=told).check(wrong)


def test_one_row_may_be_off_by_more_than_most_rows() -> None:
    truth = torch.randn(20, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, all_rows = truth.clone(), truth * 1.015
    one[3] *= 1.05
    Ruler(truth, 0.02, 0.01).check(one)
    with pytest.raises(CheckFailedError, match="half of 20 rows"):
        Ruler(truth, 0.02, 0.01).check(all_rows)
