"""The hal-backend-rocm wheel: pure Python, with its manifest, and light to list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile

import pytest


@pytest.fixture(scope="module")
def wheel(repository):
    found = sorted((repository / "dist").glob("hal_backend_rocm-*.whl"))
    if len(found) != 1:
        reason = f"dist/ holds {len(found)} wheels hal_backend_rocm-*.whl, not one; `make test-rocm` makes it"
        if os.environ.get("HAL_TEST_INSTALLED"):
            pytest.fail(reason)
        pytest.skip(reason)
    return zipfile.ZipFile(found[0])


def info(wheel, name: str) -> str:
    (member,) = [n for n in wheel.namelist() if n.endswith(f".dist-info/{name}")]
    return wheel.read(member).decode()


def test_one_wheel_for_every_python(wheel):
    assert "Root-Is-Purelib: true" in info(wheel, "WHEEL")
    assert [n for n in wheel.namelist() if n.endswith((".so", ".pyc", ".hip", ".hsaco"))] == []


def test_manifest_lies_in_dist_info_and_agrees_with_the_metadata(wheel):
    manifest = json.loads(info(wheel, "hal_backend.json"))
    assert manifest["name"] == "rocm"
    assert f"Name: {manifest['distribution']}" in info(wheel, "METADATA")
    assert manifest["install"] == f"pip install {manifest['distribution']}"
    assert "rocm = hal_backend_rocm.backend:backend" in info(wheel, "entry_points.txt")
    assert "Provides-Extra: aiter" in info(wheel, "METADATA")


def test_wheel_holds_the_python_of_the_checkout_as_it_is_now(wheel, repository):
    folder = repository / "backend_rocm"
    here = {p.relative_to(folder).as_posix(): p.read_bytes() for p in (folder / "hal_backend_rocm").rglob("*.py")}
    assert here == {n: wheel.read(n) for n in wheel.namelist() if n.endswith(".py")}, "dist/ is older than the sources"


def test_listing_kernels_imports_neither_triton_nor_aiter():
    both = "hal_backend_rocm.kernels, hal_backend_rocm.aiter_provider.kernels"
    code = f"import {both}, sys; print([n for n in ('triton', 'aiter') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_every_kernel_of_the_wheel_is_of_a_kind_that_the_manifest_names(repository):
    from hal_backend_rocm.aiter_provider.kernels import KERNELS as PROVIDED
    from hal_backend_rocm.kernels import KERNELS

    from hal_core.contract import kernel_problems

    ops = tuple(json.loads((repository / "backend_rocm" / "hal_backend.json").read_text(encoding="utf-8"))["ops"])
    problems = {kernel.name: kernel_problems(kernel, ops) for kernel in (*KERNELS, *PROVIDED)}
    assert {name: found for name, found in problems.items() if found} == {}
    assert len(problems) == len(KERNELS) + len(PROVIDED), "two kernels of one name"


@pytest.mark.skipif(not os.environ.get("HAL_TEST_INSTALLED"), reason="needs the installed wheels; `make test-rocm` installs them")
def test_probe_says_that_it_never_ran_and_every_wheel_beside_it_is_listed():
    code = "import hal_core; print(hal_core.probe())"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    lines = told.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.strip().startswith("rocm ")]
    assert "linear_triton" in lines[at]
    assert lines[at + 1].strip() == "compiled and interpreted, never run"
    assert any(line.strip().startswith("cuda ") for line in lines)
