"""The workflows: valid, one for each backend, over commands and targets that exist, and no stranger's code on machines of ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
VENDORS = ["cpu", *(name for name in ("cuda", "rocm", "xpu") if f"test-{name}" in TARGETS)]


def jobs(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def scripts(path: Path) -> list[str]:
    return [step["run"] for job in jobs(path).values() for step in job.get("steps", ()) if "run" in step]


def test_actionlint_finds_nothing():
    beside = Path(sys.executable).with_name("actionlint")
    tool = str(beside) if beside.exists() else shutil.which("actionlint")
    if tool is None:
        assert not os.environ.get("HAL_TEST_INSTALLED"), "make installs actionlint"
        pytest.skip("actionlint is not installed")
    done = subprocess.run([tool, *map(str, PAGES)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_scripts_parse_and_name_targets_that_exist(path):
    for script in scripts(path):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        for line in re.findall(r"^make (.+)$", script, re.MULTILINE):
            assert [word for word in line.split() if word not in TARGETS] == []


@pytest.mark.parametrize("vendor", VENDORS)
def test_every_backend_is_built_tested_and_verified_for_the_rows_of_its_matrix(vendor):
    found = jobs(ROOT / ".github" / "workflows" / f"{vendor}.yml")
    script = "\n".join(step.get("run", "") for step in found["build"]["steps"])
    assert re.search(rf"^make .*test(-{vendor})?\b", script, re.MULTILINE)
    assert re.search(rf"/hal matrix --vendor {vendor} .*--json", script)
    hardware = found["hardware"]
    assert hardware["with"]["vendor"] == vendor
    assert hardware["with"]["rows"] == "${{ needs.build.outputs.rows }}"
    wheel = (ROOT / f"backend_{vendor}" / "pyproject.toml").read_text()
    assert hardware["with"].get("extras", "") == ("[runtime]" if re.search(r"^runtime = ", wheel, re.MULTILINE) else "")
    assert "github.event_name != 'pull_request'" in hardware["if"], "a stranger's code would run on a machine of ours"
    uploads = [step["with"]["name"] for step in found["build"]["steps"] if "upload-artifact" in step.get("uses", "")]
    assert f"wheels-{vendor}" in uploads


def test_hardware_takes_its_jobs_from_the_rows_and_sends_back_what_was_found():
    (job,) = jobs(ROOT / ".github" / "workflows" / "hardware.yml").values()
    assert job["strategy"]["matrix"] == "${{ fromJSON(inputs.rows) }}"
    assert any("hal_backend_$VENDOR" in script and "$EXTRAS" in script for script in (step.get("run", "") for step in job["steps"]))
    fields = set(re.findall(r"matrix\.(\w+)", str(job)))
    from hal_core.matrix import MatrixRow

    assert fields <= set(MatrixRow.__dataclass_fields__)
    uploaded = next(step for step in job["steps"] if "upload-artifact" in step.get("uses", ""))
    assert {"facts.json", "verify.json", "hal_coverage.json"} <= set(uploaded["with"]["path"].split())


def test_nothing_of_an_event_is_pasted_into_a_script():
    pasted = {path.name: re.findall(r"\$\{\{.*?\}\}", script) for path in PAGES for script in scripts(path)}
    assert {name: found for name, found in pasted.items() if found} == {}, "give it by env: what it holds would be run"
