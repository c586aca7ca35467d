"""All wheels in one environment: each says what it can and cannot do here, none breaks another, and one that goes leaves the others."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

#: A stored machine with a device of the vendor.
BOXES = {"cpu": "epyc-zen4", "cuda": "h200", "rocm": "mi300x", "xpu": "pvc"}
#: What a process of the environment is asked.
ASKED = """
import json, sys
import hal_core as hal
from hal_core.jsonable import to_json
from hal_core.matrix import coverage_of, matrix_of
from hal_core.probe import rows_elsewhere
from hal_core.registry import default_registry
from hal_core.stored import load_facts, with_software

registry, boxes, here = default_registry(), json.loads(sys.argv[1]), hal.Machine.detect()
box = {name: with_software(load_facts(stored), here) for name, stored in boxes.items()}
rows = [row for row in registry.rows() if row.name in boxes]
there = {row.name: rows_elsewhere(box[row.name], (row,), registry.kernels())[0].status for row in rows}
covers = {row.name: coverage_of(row, here) for row in rows if row.loaded}
print(json.dumps({
    "rows": {row.name: to_json(row) for row in rows},
    "there": there,
    "coverage": to_json(covers),
    "matrix": {row.name: to_json(matrix_of(row, covers[row.name], registry.kernels())) for row in rows if row.loaded},
    "loaded": sorted(name for name in ("triton", "aiter", "flashinfer", "dpctl") if name in sys.modules),
}))
"""


class Environment:
    """A virtual environment that sees this one's libraries, but none of its hal wheels."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        beside = folder / "libraries"
        beside.mkdir()
        for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for found in Path(place).iterdir():
                if not found.name.startswith(("hal_", "__pycache__")):
                    (beside / found.name).symlink_to(found)
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        (site / "libraries.pth").write_text(f"{beside}\n")

    def pip(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, "--no-input", "--disable-pip-version-check", "-q", *arguments]
        subprocess.run(list(map(str, command)), check=True)

    def ask(self) -> dict:
        command = [self.python, "-c", ASKED, json.dumps(BOXES)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def environment(core_wheel, backend_wheels, tmp_path_factory):
    made = Environment(tmp_path_factory.mktemp("side"))
    made.pip("install", "--no-deps", "--no-index", core_wheel.path, *(wheel.path for wheel in backend_wheels.values()))
    return made


@pytest.fixture(scope="module")
def told(environment):
    return environment.ask()


def test_no_file_belongs_to_two_wheels(core_wheel, backend_wheels):
    owners = Counter(name for wheel in (core_wheel, *backend_wheels.values()) for name in wheel.names())
    assert [name for name, count in owners.items() if count > 1] == []


def test_every_backend_is_a_row_with_kernels_or_with_reasons(told, backend_wheels):
    assert set(told["rows"]) == set(backend_wheels)
    for name, row in told["rows"].items():
        assert row["status"] in {"ready", "no_device", "refused"}, f"{name}: {row['refusals']}"
        assert row["kernels"] if row["status"] != "refused" else row["refusals"], name
        wrong = {"backend.manifest", "backend.contract"}.intersection(reason["code"] for reason in row["refusals"])
        assert not wrong, f"{name}: {row['refusals']}"
        assert all(reason["fix"] for reason in row["refusals"])


def test_probing_imports_none_of_the_libraries_that_kernels_call(told):
    assert told["loaded"] == []


def test_every_backend_is_ready_for_a_machine_with_its_device(told):
    loaded = {name for name, row in told["rows"].items() if row["status"] != "refused"}
    assert {name: status for name, status in told["there"].items() if name in loaded and status != "ready"} == {}


def test_every_row_of_the_matrix_has_kernels_and_every_trial_names_some(told):
    for vendor, rows in told["matrix"].items():
        words = ("ran", "failed", "interpreted", "compiled", "bound", "untried")
        kernels = {row["architecture"]: {name for word in words for name in row[word]} for row in rows}
        assert all(kernels.values()), f"{vendor}: an architecture without kernels"
        for tried in told["coverage"][vendor]["tried"]:
            assert set(tried["architectures"]) <= set(kernels), f"{vendor}: {tried}"
            here = {name for architecture in tried["architectures"] for name in kernels[architecture]}
            assert [g for g in tried["kernels"] if not any(fnmatchcase(name, g) for name in here)] == [], f"{vendor}: {tried['by']}"


def test_one_that_goes_leaves_the_others_as_they_were(environment, told):
    left = dict(told["rows"])
    for name in list(told["rows"]):
        environment.pip("uninstall", "--yes", f"hal-backend-{name}")
        del left[name]
        assert environment.ask()["rows"] == left, f"after {name} was uninstalled"
