"""Kernel headers compiled for GPUs that are not here: SPIR-V from the SYCL runtime, instructions from Intel's offline compiler."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hal_backend_xpu.session import KERNELS

#: Sub-groups by the offline compiler's name of a device.
DEVICES = {"pvc": 16, "dg2-g10": 8}
_PREFIX = "__sycl_kernel_"
_DUMP = """
import sys
from hal_backend_xpu import native
from hal_backend_xpu.engine import Engine
from hal_backend_xpu.session import KERNELS
header, engine, lanes = sys.argv[1:]
try:
    options = (f"-I{KERNELS}", *Engine(engine, int(lanes)).defines)
    native.Program.compiled(native.cpu_queue(), f'#include "{header}"\\n', options)
except native.NativeError as error:  # the host's device cannot link GPU builtins; the image is written before
    print(error, file=sys.stderr)
"""


def kernels_in(header: str) -> dict[str, tuple[str, ...]]:
    """Kernels that a header defines, with the further arguments of the macro that makes each."""
    text = re.sub(r"\\\n", " ", (KERNELS / header).read_text())
    text = re.sub(r"^#define.*$", "", text, flags=re.MULTILINE)
    plain = re.findall(r"^HAL_KERNEL void (\w+)\(", text, re.MULTILINE)
    made = re.findall(r"^HAL_[A-Z0-9_]+\((\w+)((?:, *[\w:]+)*)\)", text, re.MULTILINE)
    return {**dict.fromkeys(plain, ()), **{name: tuple(re.findall(r"[\w:]+", more)) for name, more in made}}


def spirv(header: str, engine: str, lanes: int, folder: Path) -> tuple[bytes, ...]:
    """The images of a header in an engine of ``lanes`` columns: the compiler parts kernels that need different features of a device."""
    environment = {
        **os.environ,
        "SYCL_DUMP_IMAGES": "1",
        "SYCL_DUMP_IMAGES_PREFIX": f"{folder}/{engine}{lanes}_",
        "HAL_CACHE_DIR": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-c", _DUMP, header, engine, str(lanes)], env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    images = sorted(folder.glob(f"{engine}{lanes}_*.spv"))
    assert images, f"{header} does not compile for {engine}: {done.stdout}{done.stderr}"
    return tuple(image.read_bytes() for image in images)


def cooperative_products(images: tuple[bytes, ...]) -> dict[str, int]:
    """OpCooperativeMatrixMulAddKHR by kernel, those of called functions among them (SPIR-V specification, unified1)."""
    return {name: count for image in images for name, count in _products(image).items()}


def _products(image: bytes) -> dict[str, int]:
    words = struct.unpack(f"<{len(image) // 4}I", image)
    assert words[0] == 0x07230203, "not SPIR-V"
    entries, calls, products, at, here = {}, {}, {}, 5, 0
    while at < len(words):
        size, opcode = words[at] >> 16, words[at] & 0xFFFF
        if opcode == 15 and words[at + 1] == 6:  # OpEntryPoint Kernel, id, name
            name = struct.pack(f"<{size - 3}I", *words[at + 3 : at + size]).split(b"\0")[0].decode()
            entries[name] = words[at + 2]
        elif opcode == 54:  # OpFunction
            here = words[at + 2]
            calls[here], products[here] = set(), 0
        elif opcode == 57:  # OpFunctionCall
            calls[here].add(words[at + 3])
        elif opcode == 4459:
            products[here] += 1
        at += max(size, 1)

    def all_of(function: int, seen: frozenset[int] = frozenset()) -> int:
        inner = (all_of(other, seen | {function}) for other in calls.get(function, ()) if other not in seen)
        return products.get(function, 0) + sum(inner)

    return {name.removeprefix(_PREFIX): all_of(function) for name, function in entries.items()}


@dataclass(frozen=True)
class Instructions:
    """What a kernel became. products: ``(repeats x depth, sum, weights, rows)`` of each dpas inside a loop. spills: accesses of spilled
    registers inside the innermost loops with a dpas."""

    products: tuple[tuple[str, str, str, str], ...]
    spills: int


def offline_compiler() -> str:
    """The compiler's path; the test is skipped where there is none, or where it does not know the devices."""
    found = shutil.which("ocloc")
    if found is None:
        pytest.skip("ocloc, Intel's offline compiler, is not installed (Debian: intel-opencl-icd, libigc-tools)")
    return found


def instructions(images: tuple[bytes, ...], device: str, folder: Path) -> dict[str, Instructions]:
    """Every kernel of some images, compiled for ``device``."""
    compiler = offline_compiler()
    dumps, source = folder / "dumps", folder / "image.spv"
    environment = {**os.environ, "IGC_ShaderDumpEnable": "1", "IGC_DumpToCustomDir": str(dumps)}
    command = [compiler, "compile", "-file", str(source), "-spirv_input", "-device", device, "-output", "out", "-out_dir", str(folder)]
    for image in images:
        source.write_bytes(image)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250, cwd=folder)
        assert "Build succeeded." in done.stdout, f"{device}: {done.stdout}{done.stderr}"
    found = {}
    # a kernel that does not fit its registers is compiled again: the last one stays
    for path in sorted(dumps.glob("*.asm"), key=lambda file: file.stat().st_mtime_ns):
        text = path.read_text(errors="replace")
        name = re.search(rf"^//\.kernel {_PREFIX}(\w+)", text, re.MULTILINE)
        if name is not None:
            found[name[1]] = _read(text.splitlines())
    assert found, f"no instructions in {sorted(dumps.iterdir())}"
    return found


def _read(lines: list[str]) -> Instructions:
    labels = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"(\w+):", line))}
    jumping = [at for at, line in enumerate(lines) if re.search(r"\b(?:jmpi|goto|while)\b", line)]
    jumps = [(label, at) for at in jumping for label in re.findall(r"\s(\w+)", lines[at])]
    loops = [(labels[label], at) for label, at in jumps if labels.get(label, at) < at]
    products, inner = [], set()
    for at, line in enumerate(lines):
        found = re.search(r"\bdpas\.(\S+) \(.*?\)\s+\S+:(\w+)\s+\S+\s+\S+:(\w+)\s+\S+:(\w+)", line)
        around = [(last - first, first, last) for first, last in loops if first <= at <= last]
        if found and around:
            products.append(found.groups())
            inner.add(min(around)[1:])
    inside = {at for first, last in inner for at in range(first, last)}
    return Instructions(tuple(products), sum("spill to" in lines[at] or "fill from" in lines[at] for at in inside))
