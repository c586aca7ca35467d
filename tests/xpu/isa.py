"""Kernel headers compiled for GPUs that are not here: SPIR-V from the SYCL runtime, instructions from Intel's offline compiler."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import time
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


def kernels_in(header: str) -> dict[str, int]:
    """Kernels that a header defines for tiles of 8 rows, with the products in one step of each one's loop; 0 where it has none."""
    text = _joined(header)
    found = dict.fromkeys(re.findall(r"^HAL_KERNEL void (\w+)\(", text, re.MULTILINE), 0)
    # the last of two definitions is that for 8 rows
    for name, rm, rn in re.findall(r"^HAL_NARROW\((\w+), (\d), (\d), \d\)", text, re.MULTILINE):
        found[name] = int(rm) * int(rn)
    ladder = _joined("grouped.hpp").rpartition("#define HAL_LADDER(MAKE, NAME, GATED)")[2].partition("#endif")[0]
    for name, gated in re.findall(r"^HAL_LADDER\(\w+, (\w+), ([01])\)", text, re.MULTILINE):
        for rung, rm, rn in re.findall(r"MAKE\(NAME##(_\d), ([^,]+), ([^,]+), GATED\)", ladder):
            tiles = [eval(words, {"GATED": int(gated)}) for words in (rm, rn)]
            found[name + rung] = tiles[0] * tiles[1] * (1 + int(gated))
    return found


def _joined(header: str) -> str:
    return re.sub(r"\\\n", " ", (KERNELS / header).read_text())


def spirv(header: str, engine: str, lanes: int, folder: Path) -> tuple[bytes, ...]:
    """The images of a header in an engine of ``lanes`` columns: the compiler parts kernels that need different features of a device.

    The process ends when they are written: what the host's device would make of them takes longer, and is not looked at.
    """
    dump = {"SYCL_DUMP_IMAGES": "1", "SYCL_DUMP_IMAGES_PREFIX": f"{folder}/{engine}{lanes}_", "HAL_CACHE_DIR": str(folder)}
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _DUMP, header, engine, str(lanes)], env={**os.environ, **dump}, stdout=output, stderr=output
        )
        try:
            images = _written(process, folder, f"{engine}{lanes}_*.spv")
        finally:
            process.kill()
            process.wait()
    assert images, f"{header} does not compile for {engine}: {log.read_text()}"
    return images


def _written(process: subprocess.Popen, folder: Path, pattern: str) -> tuple[bytes, ...]:
    """The files, once they have not changed for two seconds, or the process has ended."""
    before, since, start = None, time.monotonic(), time.monotonic()
    while time.monotonic() - start < 240:
        ended = process.poll() is not None
        now = {path: path.stat().st_size for path in sorted(folder.glob(pattern))}
        if now != before:
            before, since = now, time.monotonic()
        if ended or (now and time.monotonic() - since > 2):
            return tuple(path.read_bytes() for path in now)
        time.sleep(0.1)
    return ()


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
