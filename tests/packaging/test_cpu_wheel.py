"""The hal-backend-cpu wheel: one file for every Python and every later torch, nothing foreign inside."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
from packaging.requirements import Requirement

# What the library may link to: torch, which is in the process already, and the system's C and C++ runtime.
ALLOWED = {
    "libtorch.so", "libtorch_cpu.so", "libc10.so",
    "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2",
}  # fmt: skip


@pytest.fixture(scope="module")
def library(cpu_wheel, tmp_path_factory):
    (name,) = [n for n in cpu_wheel.names() if n.endswith(".so")]
    path = tmp_path_factory.mktemp("wheel") / "library.so"
    path.write_bytes(cpu_wheel.read(name))
    return path


def readelf(*arguments) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("readelf (binutils) is not installed")
    return subprocess.run(["readelf", "-W", *arguments], check=True, capture_output=True, text=True).stdout


def undefined_symbols(library) -> list[str]:
    return re.findall(r"\bUND (\S+)", readelf("--dyn-syms", library))


def test_one_wheel_serves_every_python(cpu_wheel):
    assert re.fullmatch(r"py3-none-(manylinux\w+|linux)_x86_64", cpu_wheel.tag)
    assert b"Root-Is-Purelib: false" in cpu_wheel.info("WHEEL")


def test_manifest_lies_in_dist_info_and_agrees_with_the_metadata(cpu_wheel):
    manifest = json.loads(cpu_wheel.info("hal_backend.json"))
    assert manifest["name"] == "cpu"
    assert manifest["distribution"] == cpu_wheel.metadata()["Name"] == "hal-backend-cpu"
    assert set(manifest["ops"]) >= {"linear", "moe"}
    assert manifest["install"] == "pip install hal-backend-cpu"


def test_entry_point_is_registered(cpu_wheel):
    text = cpu_wheel.info("entry_points.txt").decode()
    assert "[hal_core.backends]" in text
    assert "cpu = hal_backend_cpu.backend:backend" in text


def test_requires_hal_core_and_leaves_torch_to_it(cpu_wheel):
    names = [Requirement(line).name for line in cpu_wheel.metadata().get_all("Requires-Dist") or []]
    assert names == ["hal-core"]


def test_versions_of_both_wheels_agree(core_wheel, cpu_wheel):
    assert core_wheel.metadata()["Version"] == cpu_wheel.metadata()["Version"]


def test_licence_is_stated(cpu_wheel):
    assert cpu_wheel.metadata()["License-Expression"] == "Apache-2.0"


def test_wheel_holds_one_library_and_no_sources(cpu_wheel):
    assert len([n for n in cpu_wheel.names() if ".so" in n]) == 1
    assert [n for n in cpu_wheel.names() if n.endswith((".cpp", ".h", ".o", ".a", ".cmake", ".pyc"))] == []


def test_wheel_holds_the_python_of_the_checkout_as_it_is_now(cpu_wheel, repository):
    folder = repository / "backend_cpu"
    here = {p.relative_to(folder).as_posix(): p.read_bytes() for p in (folder / "hal_backend_cpu").rglob("*.py")}
    there = {n: cpu_wheel.read(n) for n in cpu_wheel.names() if n.endswith(".py")}
    assert here == there, "dist/ is older than the sources: run `make build`"


def test_library_links_to_nothing_foreign(library):
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("-d", library)))
    assert needed <= ALLOWED, "for example libgomp or libpython would be a second runtime in the process"


def test_library_records_no_search_path(library):
    assert re.findall(r"\((?:RPATH|RUNPATH)\).*", readelf("-d", library)) == []


def test_library_uses_no_python_symbol(library):
    assert [s for s in undefined_symbols(library) if re.match(r"_?Py[A-Z_]", s)] == []


def test_library_uses_only_the_stable_abi_of_torch(library):
    # Mangled names of torch's C++ namespaces would bind the wheel to one torch release.
    mangled = r"_ZNK?R?(2at|3c10|5torch)|_Z\w*N(2at|3c10|5torch)\d"
    assert [s for s in undefined_symbols(library) if re.match(mangled, s)] == []


def test_library_exports_no_code_of_its_own(library):
    # Visible symbols could be taken over by, or take over, those of another extension in the process.
    defined = re.findall(r"FUNC\s+GLOBAL\s+DEFAULT\s+\d+ (\S+)", readelf("--dyn-syms", library))
    assert [s for s in defined if s not in {"_init", "_fini"} and not s.startswith(("_ZNSt", "_ZSt", "_ZNKSt"))] == []


def test_wheel_holds_no_machine_path(cpu_wheel, repository):
    patterns = [re.escape(str(repository).encode()), rb"/(?:root|home|tmp|Users)/[\w.-]+/[\w./-]+"]
    for name in cpu_wheel.names():
        for pattern in patterns:
            found = re.search(pattern, cpu_wheel.read(name))
            assert found is None, f"{name} holds {found.group().decode()!r}"
