"""A backend from outside: its wheel is built, installed beside hal-core, found, and judged by the kit in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "outside_backend"
#: An installed hal-core registers the kit's plugin by itself; a source folder does not.
PLUGINS = ("-p", "no:cacheprovider", "-p", "hal_core.testing.plugin")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the example's wheel installed."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling, which builds the wheel, is not installed")
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--target", str(target)]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, str(EXAMPLE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def run(site: Path, *command: str) -> subprocess.CompletedProcess:
    paths = [str(site), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env=environment, cwd=site, timeout=280)


def hal(site: Path, *arguments: str) -> subprocess.CompletedProcess:
    return run(site, "-c", "from hal_core.cli.main import app_main; app_main()", *arguments)


def conformance(site: Path, *arguments: str) -> subprocess.CompletedProcess:
    return run(site, "-m", "pytest", "-q", *PLUGINS, "--pyargs", "hal_core.testing", *arguments)


def test_wheel_holds_the_package_and_its_two_files(site: Path) -> None:
    (info,) = site.glob("hal_backend_example-*.dist-info")
    assert {"hal_backend.json", "hal_conformance.json"} <= {path.name for path in info.iterdir()}
    assert not list(site.rglob("faults.py"))


def test_verify_judges_the_installed_backend(site: Path) -> None:
    done = hal(site, "verify", "example", "--seed", "7", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, [r for r in report["results"] if r["status"] == "failed"]
    assert report["good"]
    assert report["seed"] == 7
    assert report["counts"]["passed"] > 300
    assert {r["kernel"] for r in report["results"]} == {"example.linear", "example.experts"}
    served = {table["title"]: dict(table["rows"]) for table in report["matrix"] if table["name"] == "served"}
    assert served["Linear"]["weights int4"] == ["yes"]
    assert served["Experts"]["limit"] == ["yes"]
    assert "router_weight_on_input" not in served["Experts"]  # nobody in this report serves it


def test_pyargs_runs_it_with_pytest_and_writes_a_report(site: Path, tmp_path: Path) -> None:
    page = tmp_path / "matrix.md"
    done = conformance(site, "--hal-backend", "example", "--hal-report", str(page), "-k", "example.linear and not compile")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "## Linear" in page.read_text()
    assert "| bias | yes |" in page.read_text()


def test_a_backend_that_is_not_there_is_named_with_those_that_are(site: Path) -> None:
    done = hal(site, "verify", "exampel")
    assert done.returncode == 2
    assert "exampel" in done.stderr
    assert "example" in done.stderr.split("these can be verified")[1]


def test_a_list_of_expected_failures_that_went_stale_fails(site: Path, tmp_path: Path) -> None:
    lists = tmp_path / "lists.json"
    lists.write_text(json.dumps({"expected_failures": {"example.linear/declaration/all": "it once failed"}}))
    done = hal(site, "verify", "example", "--seed", "1", "--expect", str(lists), "--json")
    assert done.returncode == 1
    (stale,) = [r for r in json.loads(done.stdout)["results"] if r["status"] == "stale expectation"]
    assert "take it off the list" in stale["reason"]


def test_its_own_ten_line_test_passes(site: Path) -> None:
    test = EXAMPLE / "tests" / "test_conformance.py"
    assert len([line for line in test.read_text().splitlines() if line.strip()]) <= 10
    options = ("-q", *PLUGINS, "-c", os.devnull, "-k", "declaration or refusals or effects")
    done = run(site, "-m", "pytest", *options, str(test))
    assert done.returncode == 0, done.stdout[-2000:]
