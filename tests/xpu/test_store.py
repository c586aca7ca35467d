"""Compiled programs on disk: found again, made anew where damaged, shared between processes, and quick."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from hal_backend_xpu import native, store
from hal_backend_xpu.session import Session

pytestmark = pytest.mark.usefixtures("sycl_device")

CPU = torch.device("cpu")
SORTED = "rows.hpp"
#: Starts a process of its own, and prints how long all programs of the four-bit ops took.
START = """
import time, torch
from hal_backend_xpu.session import session
here = session(torch.device("cpu"))
start = time.perf_counter()
for header, name, element in (("rows.hpp", "sum_slots", None), ("rows_int4.hpp", "rows_int4", None),
                              ("grouped_int4.hpp", "gated_int4_0", "bf16"), ("grouped_int8.hpp", "gated_int8_0", "int8")):
    here.kernel(header, name, element)
print(time.perf_counter() - start)
"""


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
    return tmp_path / "xpu"


def start() -> float:
    return float(subprocess.run([sys.executable, "-c", START], check=True, capture_output=True, text=True).stdout)


def test_a_second_start_of_all_programs_is_quick():
    start()
    assert start() < 2.0


def test_a_program_is_kept_as_spirv_and_as_a_binary_and_taken_from_either(empty, caplog):
    engine = Session(CPU).engine("int8")
    Session(CPU).program(SORTED, engine)
    assert sorted(path.suffix for path in empty.iterdir()) == [".bin", ".spv"]
    assert "compiling rows.hpp" in caplog.text
    caplog.clear()
    both = {path: path.read_bytes() for path in empty.iterdir()}
    for kept in both:
        for path, data in both.items():
            path.unlink(missing_ok=True)
            if path == kept:
                path.write_bytes(data)
        assert Session(CPU).program(SORTED, engine).kernel("sort_slots")
        assert any(path.suffix == ".bin" for path in empty.iterdir())
    assert caplog.text == ""


@pytest.mark.parametrize("damage", [lambda data: data[:-7], lambda data: data[:100] + b"\0\1\2" + data[103:], lambda data: b""])
def test_a_damaged_entry_is_made_anew(empty, damage, caplog):
    engine = Session(CPU).engine("int8")
    Session(CPU).program(SORTED, engine)
    for path in empty.iterdir():
        path.write_bytes(damage(path.read_bytes()))
    assert Session(CPU).program(SORTED, engine).kernel("sum_slots")
    assert "is damaged" in caplog.text
    assert all(store.read(path.name) for path in empty.iterdir())


def test_an_entry_that_the_driver_does_not_take_is_made_anew(empty, caplog):
    engine = Session(CPU).engine("int8")
    Session(CPU).program(SORTED, engine)
    for path in empty.iterdir():
        store.write(path.name, (b"not a program",))
    assert Session(CPU).program(SORTED, engine).kernel("sum_slots")
    assert "is not taken" in caplog.text


def test_two_processes_may_start_at_once(empty):
    code = "import torch; from hal_backend_xpu.session import session; s = session(torch.device('cpu')); s.kernel('rows.hpp', 'sum_slots')"
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(timeout=300) for process in both] == [0, 0]
    assert len(list(empty.iterdir())) == 2  # nothing half-written is left
    assert all(store.read(path.name) for path in empty.iterdir())


def test_a_kernel_that_is_not_there_is_an_error():
    here = Session(CPU)
    with pytest.raises(native.NativeError, match="no kernel nothing_of_the_kind"):
        here.kernel(SORTED, "nothing_of_the_kind")


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words():
    began = time.perf_counter()
    with pytest.raises(native.NativeError, match="unknown type name 'nonsense'"):
        native.Program.compiled(native.cpu_queue(), "nonsense here;\n", ())
    assert time.perf_counter() - began < 120


def test_a_number_that_a_kernel_cannot_hold_is_an_error():
    here = Session(CPU)
    with pytest.raises(native.NativeError, match="32 bits do not hold"):
        here.launch(here.kernel(SORTED, "sum_slots"), (1, 1, 1), (1, 1, 16), (None, None, None, 1 << 31, 1, 1, 1.0, None, 0))
