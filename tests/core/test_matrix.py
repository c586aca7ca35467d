"""What a backend can run: rows from its own declarations, and what hal verify found added to them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from core.fakes import MACHINE, registered, row

from hal_core.cli.main import app_main
from hal_core.coverage import Coverage, How, Level, Tried
from hal_core.errors import HalError, PolicyError, ValueDecodeError
from hal_core.machine import Device, Version
from hal_core.manifest import BackendManifest
from hal_core.matrix import coverage_of, matrix_of, narrowed, vendor_row, with_results

GPU = BackendManifest("cuda", "hal-backend-cuda", 1, "", ("linear",), "pip install hal-backend-cuda", architectures=("sm_80", "sm_90"))
ROW = replace(row("cuda", "cuda.old", "cuda.new"), manifest=GPU)
KERNELS = (
    registered("cuda.old", devices=("cuda",), isa=(), architectures=("sm_80", "sm_90")),
    registered("cuda.new", devices=("cuda",), isa=(), architectures=("sm_90",)),
    registered("other.one"),
)
COVERAGE = Coverage(
    ("2.11", "2.13"),
    ("3.12",),
    (
        Tried(How.COMPILED, ("*",), ("sm_80", "sm_90"), "2.13", "3.12"),
        Tried(How.RAN, ("n*",), ("sm_90",), "2.13", "3.12", "one GPU"),
    ),
)
H = replace(
    MACHINE,
    devices=(*MACHINE.devices, Device("cuda", "nvidia", "sm_90", "H200")),
    versions=(Version("python", "3.12.3"), Version("torch", "2.11.0+cu130")),
)


def results(*found: tuple[str, str, str], machine=H) -> dict:
    entries = [{"kernel": kernel, "check": check, "status": status} for kernel, check, status in found]
    return {"machine": machine.to_json(), "seed": 7, "results": entries}


def test_rows_are_architectures_and_releases_with_kernels_by_how_they_were_tried() -> None:
    rows = matrix_of(ROW, COVERAGE, KERNELS)
    assert [(r.architecture, r.torch, r.runs) for r in rows] == [
        ("sm_80", "2.11", False), ("sm_80", "2.13", False), ("sm_90", "2.11", False), ("sm_90", "2.13", True),
    ]  # fmt: skip
    assert (rows[0].untried, rows[0].compiled) == (("old",), ())
    assert (rows[3].ran, rows[3].compiled, rows[3].untried) == (("new",), ("old", "new"), ())


def test_levels_of_a_processor_take_the_place_of_architectures() -> None:
    coverage = Coverage(("2.13",), ("3.12",), (), (Level("low", ("avx2",)), Level("high", ("avx2", "amx_int8"))))
    kernels = (registered("cuda.plain"), registered("cuda.tiles", isa=("avx2", "amx_int8")))
    assert [(r.architecture, r.untried) for r in matrix_of(ROW, coverage, kernels)] == [("low", ("plain",)), ("high", ("plain", "tiles"))]


def test_rows_are_narrowed_by_names_that_exist() -> None:
    rows = matrix_of(ROW, COVERAGE, KERNELS)
    assert narrowed(rows, ["sm_90"], ["2.13"]) == (rows[3],)
    with pytest.raises(ValueDecodeError, match="architecture 'sm_91': no row has it; use sm_80, sm_90"):
        narrowed(rows, ["sm_91"])


def test_a_backend_that_is_not_there_or_refused_says_why() -> None:
    with pytest.raises(PolicyError, match="installed: cuda; pip install hal-backend-rocm"):
        vendor_row("rocm", (ROW,))
    with pytest.raises(PolicyError, match="see hal probe"):
        vendor_row("cuda", (replace(ROW, status="refused"),))


def test_a_wheel_without_coverage_has_this_processes_releases_and_nothing_tried() -> None:
    found = coverage_of(replace(ROW, distribution="no-such-wheel"), MACHINE)
    assert (found.torch, found.tried) == (("2.13",), ())


def test_results_add_the_kernels_that_were_right_and_failed_nowhere() -> None:
    found = results(
        ("cuda.old", "accuracy", "passed"), ("cuda.new", "accuracy", "passed"), ("cuda.new", "rows", "failed"),
        ("other.one", "accuracy", "passed"), ("cuda.third", "layout", "passed"),
    )  # fmt: skip
    once = with_results(COVERAGE, ROW, found)
    ran = Tried(How.RAN, ("old",), ("sm_90",), "2.11", "3.12", "hal verify, seed 7")
    assert once.tried[-2:] == (ran, replace(ran, how=How.FAILED, kernels=("new",)))
    assert with_results(once, ROW, found) == once, "the same results twice are one entry"
    assert Coverage.parse(once.dumps()) == once
    row = matrix_of(ROW, once, KERNELS)[2]
    assert (row.torch, row.ran, row.failed, row.untried) == ("2.11", ("old",), ("new",), ())
    mended = with_results(once, ROW, results(("cuda.old", "accuracy", "passed"), ("cuda.new", "accuracy", "passed")))
    assert mended.tried[-1] == replace(ran, kernels=("new", "old")), "what failed before and does not any more is gone"


@pytest.mark.parametrize(
    ("found", "match"),
    [
        ([], "not those of hal verify"),
        ({"results": [], "machine": 3}, "expected an object"),
        (results(("cuda.old", "layout", "passed")), "kernels that ran: 0"),
        (results(("cuda.old", "accuracy", "passed"), machine=MACHINE), "architectures: none"),
        (results(("cuda.old", "accuracy", "passed"), machine=replace(H, versions=())), "not a release"),
        (results(("cuda.o\x1b[2J", "accuracy", "passed")), "not plain names"),
    ],
)
def test_results_that_say_nothing_are_refused(found, match) -> None:
    with pytest.raises(HalError, match=match):
        with_results(COVERAGE, ROW, found)


@pytest.mark.parametrize(
    "change", [{"torch": ["2.11.0"]}, {"python": "3.12"}, {"tried": [{"how": "guessed"}]}, {"more": 1}, {"torch": ["2.1"] * 257}]
)
def test_malformed_coverage_is_an_error(change) -> None:
    with pytest.raises(ValueDecodeError):
        Coverage.parse(json.dumps({"torch": ["2.11"], "python": ["3.12"], **change}))


def test_command_prints_an_include_list_and_writes_what_was_added(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hal_core.registry.Registry.rows", lambda _: (ROW,))
    monkeypatch.setattr("hal_core.registry.Registry.kernels", lambda _: KERNELS)
    (tmp_path / "verify.json").write_text(json.dumps(results(("cuda.new", "accuracy", "passed"))))
    added = ["--add", str(tmp_path / "verify.json"), "--out", str(tmp_path / "hal_coverage.json")]
    with pytest.raises(SystemExit) as stop:
        app_main(["matrix", "--vendor", "cuda", "--architecture", "sm_90", "--torch", "2.11", "--python", "3.12", "--json", *added])
    assert stop.value.code == 0
    (shown,) = json.loads(capsys.readouterr().out)["include"]
    assert (shown["vendor"], shown["runs"], shown["ran"], shown["untried"]) == ("cuda", True, ["new"], ["old"])
    assert Coverage.parse((tmp_path / "hal_coverage.json").read_text()).tried[-1].by == "hal verify, seed 7"
