"""The hal-backend-xpu wheel: one for every Python, with its kernels as sources and nothing of Intel's runtime, and light to list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile

import pytest


@pytest.fixture(scope="module")
def wheel(repository):
    found = sorted((repository / "dist").glob("hal_backend_xpu-*.whl"))
    if len(found) != 1:
        reason = f"dist/ holds {len(found)} wheels hal_backend_xpu-*.whl, not one; `make test-xpu` makes it"
        if os.environ.get("HAL_TEST_INSTALLED"):
            pytest.fail(reason)
        pytest.skip(reason)
    return zipfile.ZipFile(found[0])


def info(wheel, name: str) -> str:
    (member,) = [n for n in wheel.namelist() if n.endswith(f".dist-info/{name}")]
    return wheel.read(member).decode()


def test_one_wheel_for_every_python_with_one_library(wheel):
    assert "Tag: py3-none-linux_x86_64" in info(wheel, "WHEEL")
    assert [n for n in wheel.namelist() if ".so" in n] == ["hal_backend_xpu/_hal_backend_xpu.so"]
    assert wheel.getinfo("hal_backend_xpu/_hal_backend_xpu.so").file_size < 1 << 20


def test_manifest_lies_in_dist_info_and_agrees_with_the_metadata(wheel):
    manifest, metadata = json.loads(info(wheel, "hal_backend.json")), info(wheel, "METADATA")
    assert manifest["name"] == "xpu"
    assert f"Name: {manifest['distribution']}" in metadata
    assert "xpu = hal_backend_xpu.backend:backend" in info(wheel, "entry_points.txt")
    assert "Provides-Extra: runtime" in metadata
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert all("extra ==" in line for line in needed if "intel" in line)


def test_wheel_holds_the_sources_of_the_checkout_as_they_are_now(wheel, repository):
    folder = repository / "backend_xpu"
    here = {p.relative_to(folder).as_posix(): p.read_bytes() for p in (folder / "hal_backend_xpu").rglob("*.py")}
    here |= {f"hal_backend_xpu/kernels/{p.name}": p.read_bytes() for p in (folder / "csrc/kernels").glob("*.hpp")}
    assert here == {n: wheel.read(n) for n in wheel.namelist() if n.endswith((".py", ".hpp"))}, "dist/ is older than the sources"


def test_listing_kernels_loads_no_native_code():
    code = "import hal_backend_xpu.backend; print([l for l in open('/proc/self/maps') if 'libsycl' in l or '_hal_backend_xpu' in l])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_every_kernel_of_the_wheel_is_of_a_kind_that_the_manifest_names(repository):
    from hal_backend_xpu.backend import backend

    from hal_core.contract import kernel_problems

    ops = tuple(json.loads((repository / "backend_xpu/hal_backend.json").read_text())["ops"])
    kernels = backend.kernels()
    assert {op for kernel in kernels for op in (kernel.op,)} == set(ops)
    assert [problem for kernel in kernels for problem in kernel_problems(kernel, ops)] == []


def test_a_missing_runtime_is_told_with_what_brings_it():
    from dataclasses import replace

    from hal_backend_xpu.kernels import LinearInt4

    from hal_core.machine import Machine
    from hal_core.schemes import WeightScheme
    from hal_core.spec import LinearSpec

    spec, here = LinearSpec(64, 128, WeightScheme.parse("int4:g32")), Machine.detect()
    bare = replace(here, versions=tuple(v for v in here.versions if not v.name.startswith("intel-")))
    found = {reason.code: reason for reason in LinearInt4().refusals(spec, bare)}
    assert set(found) == {"device.missing", "backend.package"}
    assert found["backend.package"].fix == 'pip install "hal-backend-xpu[runtime]"'
