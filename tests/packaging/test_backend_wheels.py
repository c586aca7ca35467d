"""The wheel of every backend: for each Python, with its manifest and coverage where they are read before import, and nothing foreign."""

from __future__ import annotations

from pathlib import Path

import pytest

from hal_core.coverage import COVERAGE_FILE, Coverage
from hal_core.manifest import FILE_NAME, BackendManifest

VENDORS = sorted(path.parent.name.removeprefix("backend_") for path in Path(__file__).parents[2].glob("backend_*/pyproject.toml"))
NATIVE = ("cpu", "xpu")
EXTRAS = {"cpu": set(), "cuda": {"flashinfer", "humming"}, "rocm": {"aiter"}, "xpu": {"ark", "runtime", "vllm"}}


@pytest.fixture(params=VENDORS)
def vendor(request):
    return request.param


@pytest.fixture
def wheel(vendor, backend_wheels):
    return backend_wheels[vendor]


def test_one_wheel_for_every_python(vendor, wheel):
    assert wheel.tag.startswith("py3-none-")
    libraries = [name for name in wheel.names() if name.endswith(".so")]
    assert (len(libraries), wheel.tag == "py3-none-any") == ((1, False) if vendor in NATIVE else (0, True))
    assert [name for name in wheel.names() if name.endswith((".pyc", ".cpp", ".o", ".a", ".cu", ".hip", ".hsaco"))] == []


def test_manifest_and_coverage_lie_in_dist_info_and_agree_with_the_metadata(vendor, wheel, repository):
    manifest = BackendManifest.parse(wheel.info(FILE_NAME).decode())
    assert (manifest.name, manifest.distribution) == (vendor, wheel.metadata()["Name"])
    assert manifest.install.replace('"', "").startswith(f"pip install hal-backend-{vendor}")
    assert f"{vendor} = hal_backend_{vendor}.backend:backend" in wheel.info("entry_points.txt").decode()
    assert set(wheel.metadata().get_all("Provides-Extra") or ()) == EXTRAS[vendor]
    text = wheel.info(COVERAGE_FILE).decode()
    assert Coverage.parse(text).dumps() + "\n" == text, "write it with hal matrix --add"
    assert text == (repository / f"backend_{vendor}" / COVERAGE_FILE).read_text(encoding="utf-8")


def test_wheel_holds_the_python_of_the_checkout_as_it_is_now(vendor, wheel, repository):
    folder = repository / f"backend_{vendor}"
    here = {p.relative_to(folder).as_posix(): p.read_bytes() for p in (folder / f"hal_backend_{vendor}").rglob("*.py")}
    assert here == {name: wheel.read(name) for name in wheel.names() if name.endswith(".py")}, "dist/ is older than the sources"


def test_version_is_that_of_hal_core(wheel, core_wheel):
    assert wheel.metadata()["Version"] == core_wheel.metadata()["Version"]
    assert wheel.metadata()["License-Expression"] == "Apache-2.0"
