"""The front for oneAPI's compiler, which is not here: both of its passes are checked by those that are, the host's and the run-time one."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from hal_backend_xpu import native

pytestmark = pytest.mark.usefixtures("sycl_device")

TRAITS = "sycl/ext/oneapi/experimental/free_function_traits.hpp"


@pytest.fixture(scope="module")
def csrc(repository):
    return repository / "backend_xpu/csrc"


def headers() -> Path:
    files = metadata.files("intel-sycl-rt") or ()
    return next(Path(str(file.locate())).resolve().parents[1] for file in files if str(file).endswith("include/sycl/sycl.hpp"))


def host_pass(csrc: Path, shim: Path) -> str:
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wno-unknown-pragmas", "-isystem", shim, "-isystem", headers(), csrc / "aot.cpp"]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_the_host_pass_compiles(csrc, tmp_path):
    # what a function is, oneAPI's compiler tells its own host pass in a generated header
    (tmp_path / TRAITS).parent.mkdir(parents=True)
    (tmp_path / TRAITS).write_text((headers() / TRAITS).read_text().replace("= false", "= true"))
    assert "error" not in host_pass(csrc, tmp_path)
    assert "get_kernel_id" in host_pass(csrc, tmp_path / "nothing")  # a fault in the table would be seen


def test_the_device_pass_compiles_and_sees_a_slip(csrc):
    source = (csrc / "aot.cpp").read_text()
    native.Program.compiled(native.cpu_queue(), source, (f"-I{csrc}",))
    with pytest.raises(native.NativeError, match="no member named 'maker'"):
        native.Program.compiled(native.cpu_queue(), source.replace("row.make(queue)", "row.maker(queue)"), (f"-I{csrc}",))
