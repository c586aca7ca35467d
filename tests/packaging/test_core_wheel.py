"""The hal-core wheel: pure, typed, without tests, with honest requirements."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

# import name: distribution
DISTRIBUTION = {"huggingface_hub": "huggingface-hub"}


def requirements(wheel) -> dict[str, list[Requirement]]:
    """Requirements by extra; "" holds the unconditional ones."""
    out: dict[str, list[Requirement]] = {"": []}
    for line in wheel.metadata().get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        extra = re.search(r'extra == "([^"]+)"', str(requirement.marker or ""))
        out.setdefault(extra.group(1) if extra else "", []).append(requirement)
    return out


def imports_of(source: bytes) -> set[str]:
    """Top-level names of every absolute import in a module, at any depth."""
    out: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            out |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            out.add(node.module.split(".")[0])
    return out


def third_party(wheel) -> dict[str, list[str]]:
    """Imported distribution name to the modules of the wheel that import it."""
    out: dict[str, list[str]] = {}
    for name in wheel.names():
        if name.endswith(".py"):
            for top in imports_of(wheel.read(name)) - set(sys.stdlib_module_names) - {"hal_core"}:
                out.setdefault(DISTRIBUTION.get(top, top), []).append(name)
    return out


def test_wheel_is_pure(core_wheel):
    assert core_wheel.tag == "py3-none-any"
    assert b"Root-Is-Purelib: true" in core_wheel.info("WHEEL")
    assert [n for n in core_wheel.names() if n.endswith((".so", ".pyd", ".dylib"))] == []


def test_wheel_is_typed_and_holds_nothing_but_the_package(core_wheel):
    names = core_wheel.names()
    assert "hal_core/py.typed" in names
    assert "hal_core/__init__.py" in names
    assert {n.split("/")[0] for n in names} == {"hal_core", names[-1].split("/")[0]}
    assert [n for n in names if "test_" in n or n.startswith("tests/") or n.endswith(".pyc")] == []


def test_wheel_holds_every_module_of_the_checkout_as_it_is_now(core_wheel, repository):
    here = {p.relative_to(repository).as_posix(): p.read_bytes() for p in (repository / "hal_core").rglob("*.py")}
    there = {n: core_wheel.read(n) for n in core_wheel.names() if n.endswith(".py")}
    assert sorted(here) == sorted(there)
    assert [n for n in here if here[n] != there[n]] == [], "dist/ is older than the sources: run `make build`"


def test_metadata_names_version_licence_and_python(core_wheel):
    metadata = core_wheel.metadata()
    assert metadata["Name"] == "hal-core"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert b"Apache License" in core_wheel.info("licenses/LICENSE")


def test_torch_has_a_lower_bound_and_no_upper_bound(core_wheel):
    (torch,) = [r for r in requirements(core_wheel)[""] if r.name == "torch"]
    assert str(torch.specifier) == ">=2.11"


def test_no_requirement_has_an_upper_bound_but_the_engine_whose_interfaces_move(core_wheel):
    bounded = [str(r) for group in requirements(core_wheel).values() for r in group if re.search("<|==|~=", str(r.specifier))]
    assert [text for text in bounded if not text.startswith("vllm")] == []


def test_every_runtime_requirement_is_imported(core_wheel):
    used = {**third_party(core_wheel), "numpy": ["torch warns on every import without it"]}
    assert [r.name for r in requirements(core_wheel)[""] if r.name not in used] == []


def test_every_import_is_a_declared_requirement(core_wheel):
    declared = {r.name for group in requirements(core_wheel).values() for r in group}
    undeclared = {name: modules for name, modules in third_party(core_wheel).items() if name not in declared and name != "triton"}
    assert undeclared == {}


@pytest.mark.parametrize("extra", ["transformers", "vllm", "dev"])
def test_extras_exist(core_wheel, extra):
    assert extra in core_wheel.metadata().get_all("Provides-Extra")


def test_command_and_plugin_are_registered(core_wheel):
    registered = core_wheel.info("entry_points.txt").decode()
    assert "hal = hal_core.cli.start:main" in registered
    assert "[vllm.general_plugins]\nhal_core = hal_core.integrations.vllm:register" in registered


def test_the_plugin_asks_for_the_releases_that_it_serves(core_wheel):
    from hal_core.integrations.vllm import TESTED, is_tested

    (needed,) = requirements(core_wheel)["vllm"]
    assert needed.specifier == Requirement(f"vllm>={TESTED[0]},<{TESTED[1]}").specifier
    served = {"0.32.0": True, "0.32.1.dev3+cpu": True, "0.31.9": False, "0.33.0rc1": False, "1.32": False, "unknown": False}
    assert {release: is_tested(release) for release in served} == served


def test_wheel_holds_no_machine_path(core_wheel, repository):
    found = [n for n in core_wheel.names() if str(repository).encode() in core_wheel.read(n)]
    assert found == []


def test_every_module_of_the_checkout_belongs_to_a_package(repository):
    folders = {p.parent for p in (repository / "hal_core").rglob("*.py")}
    assert sorted(str(f.relative_to(repository)) for f in folders if not (f / "__init__.py").exists()) == []


def test_tests_run_on_the_installed_wheel_under_make(repository):
    import os

    import hal_core

    if not os.environ.get("HAL_TEST_INSTALLED"):
        pytest.skip("not started by make")
    assert "site-packages" in pathlib.Path(hal_core.__file__).parts


def test_import_is_light():
    code = (
        "import sys, hal_core; "
        "heavy = ['triton', 'transformers', 'gguf', 'hal_backend_cpu', 'typer', 'rich', 'huggingface_hub']; "
        "print(','.join(m for m in heavy if m in sys.modules)); "
        "import torch; print(torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["", "False"]
