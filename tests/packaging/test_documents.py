"""README, licences, Makefile and CI say the same things."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HAL = pathlib.Path(sys.executable).with_name("hal")


@pytest.fixture(scope="module")
def readme(repository):
    return (repository / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def targets(repository):
    text = (repository / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


def commands(readme: str) -> list[str]:
    return [line.strip().split("#")[0].strip() for line in readme.splitlines() if re.match(r" {4}\S", line)]


def test_readme_starts_with_the_two_commands(readme):
    assert commands(readme)[:2] == ["make demo", "make test"]


def test_every_make_command_of_the_readme_exists(readme, targets):
    named = {match for line in commands(readme) for match in re.findall(r"\bmake ([a-z-]+)", line)}
    assert named >= {"demo", "test"}
    assert named <= targets


def test_every_target_says_what_it_does(repository, targets):
    shown = subprocess.run(["make", "-s", "help"], cwd=repository, check=True, capture_output=True, text=True).stdout
    assert {line.split()[1] for line in shown.splitlines()} == targets


def test_every_hal_command_of_the_readme_exists(readme):
    if not HAL.exists():
        pytest.skip("the hal command is not installed beside this Python")
    named = {match for line in commands(readme) for match in re.findall(r"^hal ([a-z]+)", line)}
    assert named >= {"probe", "explain", "run"}
    for name in sorted(named):
        done = subprocess.run([HAL, name, "--help"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"hal {name} --help: {done.stderr}"


@pytest.mark.parametrize("name", ["cuda", "xpu", "rocm"])
def test_relative_links_of_the_backends_lead_somewhere(repository, name):
    path = repository / f"backend_{name}" / "README.md"
    links = re.findall(r"\]\((?!\w+:)([^)#]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_every_runtime_requirement_of_the_wheels_is_in_the_licences(core_wheel, cpu_wheel, repository):
    page = (repository / "docs" / "licences.md").read_text(encoding="utf-8")
    listed = {canonicalize_name(name) for name in re.findall(r"^\| ([\w.-]+) \|", page, re.MULTILINE)} | {"hal-core"}
    for wheel in (core_wheel, cpu_wheel):
        for line in wheel.metadata().get_all("Requires-Dist") or []:
            name = canonicalize_name(Requirement(line).name)
            assert name in listed, f"{name} is not in docs/licences.md"


def test_every_locked_package_is_in_the_licences_with_its_version(repository):
    page = (repository / "docs" / "licences.md").read_text(encoding="utf-8")
    constraints = (repository / "constraints.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)$", constraints, re.MULTILINE)
    assert len(pins) > 30
    assert [f"{n}=={v}" for n, v in pins if f"| {n} | {v} |" not in page] == [], "run `make licences`"


def test_constraints_pin_everything_that_is_asked_for(core_wheel, repository):
    constraints = (repository / "constraints.txt").read_text(encoding="utf-8")
    pinned = {name.lower().replace("_", "-") for name in re.findall(r"^([\w.-]+)==", constraints, re.MULTILINE)}
    asked = {Requirement(line).name for line in core_wheel.metadata().get_all("Requires-Dist")}
    # vLLM is tested in an environment of its own, at the version that the Makefile names
    assert asked - pinned == {"vllm"}


def test_nothing_is_installed_at_a_version_that_is_not_pinned(repository):
    if not os.environ.get("HAL_TEST_INSTALLED") or not metadata.version("torch").endswith("+cpu"):
        pytest.skip("not the environment that make builds, or one with the libraries of a CUDA torch")
    constraints = (repository / "constraints.txt").read_text(encoding="utf-8")
    pins = {canonicalize_name(n): v for n, v in re.findall(r"^([\w.-]+)==([^\s;]+)$", constraints, re.MULTILINE)}
    own = {"hal-core", "hal-backend-cpu", "pip", "setuptools"}
    installed = {canonicalize_name(d.name): d.version.split("+")[0] for d in metadata.distributions()}
    assert {n: v for n, v in installed.items() if n not in own and pins.get(n) != v} == {}


def test_gpu_backends_are_not_claimed(repository, readme):
    for name in ("cuda", "xpu", "rocm"):
        if not (repository / f"backend_{name}" / "pyproject.toml").exists():
            assert f"| [not built yet](backend_{name}/README.md) |" in readme
            assert "Nothing is built from this folder yet" in (repository / f"backend_{name}" / "README.md").read_text(encoding="utf-8")


def test_ci_script_is_executable_and_parses(repository):
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text(encoding="utf-8")
    assert [step for step in ("make lint", "make test", "make demo") if step not in text] == []


def test_workflow_runs_the_same_script(repository):
    assert "run: bash .ci/run" in (repository / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
