"""Runs the tests of the native CPU ops under the address and undefined-behaviour sanitizers.

    python scripts/test_native.py build/asan/backend_cpu/_hal_backend_cpu.so [pytest arguments]

The library must be built with the sanitizers (``cmake --preset asan``). It replaces the one of the installed package in a copy of
that package, and the sanitizer's run-time library is loaded before all others, as an interpreter that was built without it needs.
Memory that torch allocates is then guarded on both sides, to the byte. That this is so is tried first, with a read that is one
byte off: an order of libraries that disarms the sanitizer must not look like success.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: Files with the cases that touch memory in every way; what measures accuracy at real sizes takes minutes more and finds no more.
TESTS = (
    "tests/cpu/native/test_fuzz.py", "tests/cpu/test_native_pack.py", "tests/cpu/test_native_unpack.py", "tests/cpu/test_native_lookup.py",
    "tests/cpu/test_native_linear.py", "tests/cpu/test_native_moe.py", "tests/cpu/test_native_int8.py", "tests/cpu/test_native_tiles.py",
    "tests/cpu/test_native_layer.py", "tests/cpu/test_kv_native.py", "tests/cpu/test_kv_bad_input.py",
)  # fmt: skip
UNFIT = "not real_size and not compile and not meta"
PROBE = 'extern "C" int byte_at(const unsigned char* p, long i) { return p[i]; }'
TRY = """
import ctypes, sys, torch
data = torch.zeros(int(sys.argv[2]), dtype=torch.uint8)
library = ctypes.CDLL(sys.argv[1])
library.byte_at.argtypes = [ctypes.c_void_p, ctypes.c_long]
print("read", library.byte_at(data.data_ptr(), int(sys.argv[3])))
"""


def overlay(library: pathlib.Path, folder: pathlib.Path) -> None:
    """The installed package's Python files beside ``library``."""
    spec = importlib.util.find_spec("hal_backend_cpu")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("hal_backend_cpu is not installed: make install")
    package = pathlib.Path(spec.submodule_search_locations[0])
    target = folder / "hal_backend_cpu"
    shutil.copytree(package, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy2(library, target / "_hal_backend_cpu.so")


def environment(folder: pathlib.Path, compiler: str) -> dict[str, str]:
    """Variables of a process under the sanitizers."""

    def found(name: str) -> str:
        return subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()

    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        # libstdc++ too: the sanitizer wraps the functions that throw, and finds them only if they are loaded by then
        "LD_PRELOAD": f"{found('libasan.so')} {found('libstdc++.so')}",
        # the interpreter and torch never free everything
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "2",
    }


def check_armed(folder: pathlib.Path, env: dict[str, str], compiler: str) -> None:
    """Reads inside a tensor pass, and one past its end is reported; exits otherwise."""
    source, library = folder / "probe.cpp", folder / "probe.so"
    source.write_text(PROBE)
    subprocess.run([compiler, "-g", "-fsanitize=address", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    for size in (1, 13, 64, 1000):
        for index in (size - 1, size, -1):
            command = [sys.executable, "-c", TRY, str(library), str(size), str(index)]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            inside = 0 <= index < size
            if (done.returncode == 0) != inside or ("heap-buffer-overflow" in done.stderr) == inside:
                raise SystemExit(f"byte {index} of {size} was {'refused' if inside else 'read'}: not armed\n{done.stderr[-2000:]}")


def main() -> int:
    """The exit code of the tests."""
    if len(sys.argv) < 2 or not pathlib.Path(sys.argv[1]).is_file():
        raise SystemExit(__doc__)
    compiler = os.environ.get("CXX", "g++")
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        overlay(pathlib.Path(sys.argv[1]), folder)
        env = environment(folder, compiler)
        check_armed(folder, env, compiler)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=sys", "-k", UNFIT, *TESTS, *sys.argv[2:]]
        return subprocess.run(command, env=env, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
