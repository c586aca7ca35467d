"""Finds the facts of this machine from what the operating system, its C library and its drivers publish; no device context."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from hal_core import settings
from hal_core.cpuid import LeafBits, read_leaves, read_states
from hal_core.detect_gpu import SeenGpu, amd, intel, nvidia, read_text
from hal_core.machine import Denied, Device, FactMark, Machine, Mark, Version
from hal_core.nvml import NvidiaFacts, read_nvidia
from hal_core.processor import Cache, NumaNode, Processor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Answers", "detect", "detect_from"]

#: x86 features that kernels may name, in the order shown. Names are those of Linux's /proc/cpuinfo.
_X86 = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "avx512vbmi", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
)  # fmt: skip
_ARM = ("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2")
#: Prefixes of the features that a level of HAL_CPU_ISA takes away; ``avx512`` means F, BW, VL and DQ alone.
_BEYOND_AVX512 = ("avx512_", "avx_vnni", "amx")
_ABOVE = {
    "avx2": ("avx512", "avx_vnni", "amx"),
    "avx512": _BEYOND_AVX512,
    "avx512vnni": tuple(name for name in _X86 if name.startswith(_BEYOND_AVX512) and name != "avx512_vnni"),
    "avx512bf16": tuple(name for name in _X86 if name.startswith(_BEYOND_AVX512) and name not in {"avx512_vnni", "avx512_bf16"}),
    "amx": (),
}
_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "hygon"}

# From the kernel's arch/x86/include/uapi/asm/prctl.h; the tile data state is bit 18 of XCR0.
_SYS_ARCH_PRCTL, _GET_XCOMP_SUPP, _GET_XCOMP_PERM, _REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1021, 0x1022, 0x1023, 18


#: Register states by the features that need them.
_NEEDS = (("amx", "amx_tile"), ("avx512", "avx512"), ("", "avx"))


@dataclass(frozen=True)
class Answers:
    """What is asked of the running system rather than read from files; the defaults know nothing, as on another machine's files."""

    leaves: dict[str, LeafBits] = field(default_factory=dict)
    states: tuple[str, ...] = ()
    nvidia: NvidiaFacts = NvidiaFacts(problem="NVML was not asked")


@functools.cache
def detect(level: str | None, masks: tuple[str | None, ...] = ()) -> Machine:
    """The facts of this machine with instruction sets lowered to ``level`` (None: as they are) and devices hidden by ``masks``."""
    return detect_from(Path("/"), level, Answers(read_leaves(), read_states(), read_nvidia()), masks)


def detect_from(root: Path, level: str | None = None, answers: Answers | None = None, masks: Sequence[str | None] = ()) -> Machine:
    """As :func:`detect`, reading ``proc``, ``sys`` and ``dev`` under ``root``; tests give a folder and answers of their own."""
    answers, info = answers or Answers(), _cpuinfo(root)
    present = _features(info, answers.leaves)
    denied = [*_disabled(present, info, answers), *_amx_denied(present), *_lowered(present, level)]
    vendor = _VENDORS.get(info.get("vendor_id", ""), "unknown")
    cpu = Device("cpu", vendor, platform.machine().lower(), _cpu_name(info), _cores(), _memory(root))
    gpus, drivers = _gpus(root, answers, masks)
    usable = [gpu for gpu in gpus if not gpu.problem]
    denied += [gpu.denied(f"{gpu.device.kind} device") for gpu in gpus if gpu.problem]
    kept = {d.name: d for d in reversed(denied)}  # the first reason of a feature is the one that must go first
    return Machine(
        platform=f"{sys.platform}_{platform.machine().lower()}",
        devices=(cpu, *(gpu.device for gpu in usable)),
        isa=tuple(name for name in present if name not in kept),
        denied=tuple(dict.fromkeys(d for d in denied if kept[d.name] is d)),
        versions=(*_versions(), *drivers),
        marks=_marks(answers, usable),
        processor=_processor(root, info, answers.states),
    )


def _gpus(root: Path, answers: Answers, masks: Sequence[str | None]) -> tuple[list[SeenGpu], list[Version]]:
    mask = {**dict.fromkeys(settings.DEVICE_MASKS), **dict(zip(settings.DEVICE_MASKS, masks, strict=False))}
    found, drivers = nvidia(root, answers.nvidia, mask["CUDA_VISIBLE_DEVICES"])
    amd_masks = {name: mask[name] for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
    found += [*amd(root, amd_masks), *intel(root, mask["ZE_AFFINITY_MASK"])]
    for module in ("amdgpu", "i915", "xe"):
        version = read_text(root / "sys/module" / module / "version").strip()
        drivers += [Version(f"{module}_driver", version)] if version else []
    return found, drivers


def _marks(answers: Answers, usable: Sequence[SeenGpu]) -> tuple[FactMark, ...]:
    marks = [FactMark(name, Mark.REPORTED, "operating system") for name in ("platform", "devices", "processor", "versions")]
    if answers.leaves:
        states = "arch_prctl" if answers.states else "the C library"
        marks.append(FactMark("isa", Mark.MEASURED, f"CPUID leaves by the C library, XCR0 by {states}, /proc/cpuinfo"))
    else:
        marks.append(FactMark("isa", Mark.REPORTED, "/proc/cpuinfo"))
    for index, gpu in enumerate(usable, 1):
        if gpu.device.kind == "cuda":
            marks.append(FactMark(f"devices.{index}", Mark.REPORTED, "NVML"))
        marks += [FactMark(f"devices.{index}.{name}", Mark.DATASHEET, "table of PCI device ids") for name in gpu.table]
    return tuple(marks)


def _cpuinfo(root: Path) -> dict[str, str]:
    """Fields of the first processor."""
    first = read_text(root / "proc/cpuinfo").strip().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _features(info: dict[str, str], leaves: dict[str, LeafBits]) -> tuple[str, ...]:
    """Known features that the kernel's flags or CPUID name."""
    flags = set(info.get("flags", info.get("Features", "")).split())
    return tuple(name for name in (*_X86, *_ARM) if name in flags or (name in leaves and leaves[name].present))


def _disabled(present: Iterable[str], info: dict[str, str], answers: Answers) -> list[Denied]:
    """Features that the processor has and that one of kernel, C library and XCR0 does not allow: all must agree."""
    flags, out = set(info.get("flags", "").split()), []
    for name in present:
        leaf = answers.leaves.get(name)
        state = next(state for prefix, state in _NEEDS if name.startswith(prefix))
        if flags and name not in flags:
            reason = "CPUID has it, and the kernel does not list it in /proc/cpuinfo"
            fix = "remove clearcpuid= or noxsave from the kernel's options"
        elif answers.states and state not in answers.states and name in _X86:
            reason = f"the operating system does not save its registers ({state} is not in XCR0)"
            fix = "use a kernel or hypervisor that enables it"
        elif leaf is not None and leaf.present and not leaf.active:
            reason, fix = "not active for the C library (XCR0, or GLIBC_TUNABLES)", "unset GLIBC_TUNABLES, or use a kernel that enables it"
        elif leaf is not None and not leaf.present:
            reason, fix = "the kernel lists it, and CPUID does not have it", "tell the administrator: the hypervisor contradicts itself"
        else:
            continue
        out.append(Denied(name, reason, fix))
    return out


def _cpu_name(info: dict[str, str]) -> str:
    return info.get("model name") or platform.processor() or platform.machine() or "unknown"


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory(root: Path) -> int | None:
    return _kilobytes(read_text(root / "proc/meminfo"), "MemTotal:")


def _kilobytes(text: str, field_name: str) -> int | None:
    """A line ``[Node 0] MemTotal: 123 kB`` in bytes."""
    for line in text.splitlines():
        words = line.split()
        if field_name in words[:3]:
            number = _number((words[words.index(field_name) + 1 :] or [""])[0])
            return None if number is None else number * 1024
    return None


def _lowered(present: tuple[str, ...], level: str | None) -> list[Denied]:
    if level is None:
        return []
    prefixes = _ABOVE[level]
    reason = f"lowered by HAL_CPU_ISA={level}"
    return [Denied(name, reason, "unset HAL_CPU_ISA") for name in present if name.startswith(prefixes)]


def _amx_denied(present: tuple[str, ...]) -> list[Denied]:
    """Tile data needs the process's permission (Linux 5.16 and later); without it the first tile load is fatal."""
    names = [name for name in present if name.startswith("amx")]
    reason = _request_tiles() if names else ""
    fix = "allow arch_prctl(ARCH_REQ_XCOMP_PERM) in this container or virtual machine, with Linux 5.16 or later"
    return [Denied(name, reason, fix) for name in names] if reason else []


def _request_tiles() -> str:
    """Ask for the tile state; empty when granted, else why not."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "not permitted: no way to ask this operating system for AMX tile state"
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    mask = ctypes.c_ulong(0)
    for code, what in ((_GET_XCOMP_SUPP, "supported"), (_GET_XCOMP_PERM, "permitted")):
        if call(ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(code), ctypes.byref(mask)):
            return f"not permitted: asking whether AMX tile state is {what} failed ({os.strerror(ctypes.get_errno())})"
        if what == "supported" and not mask.value >> _XTILEDATA & 1:
            return "not permitted: the operating system does not save AMX tile state"
    if mask.value >> _XTILEDATA & 1:
        return ""
    if call(ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(_REQ_XCOMP_PERM), ctypes.c_long(_XTILEDATA)):
        return f"not permitted: the operating system refused AMX tile state ({os.strerror(ctypes.get_errno())})"
    return ""


def _processor(root: Path, info: dict[str, str], states: tuple[str, ...]) -> Processor:
    """Cores, memory nodes and caches by /sys; unknown parts stay out."""
    base = root / "sys/devices/system"
    siblings = {read_text(path).strip() for path in (base / "cpu").glob("cpu[0-9]*/topology/thread_siblings_list")} - {""}
    threads = sum(1 for _ in (base / "cpu").glob("cpu[0-9]*/topology")) or None
    return Processor(len(siblings) or _number(info.get("cpu cores", "")), threads, tuple(_numa(base)), tuple(_caches(base)), states)


def _numa(base: Path) -> list[NumaNode]:
    found = []
    for path in sorted((base / "node").glob("node[0-9]*"), key=lambda path: (len(path.name), path.name)):
        number = _number(path.name[4:])
        if number is not None:
            found.append(NumaNode(number, _count(read_text(path / "cpulist")), _kilobytes(read_text(path / "meminfo"), "MemTotal:")))
    return found


def _caches(base: Path) -> list[Cache]:
    found = []
    for path in sorted((base / "cpu/cpu0/cache").glob("index[0-9]*")):
        level, size = _number(read_text(path / "level").strip()), read_text(path / "size").strip()
        kilobytes = _number(size.removesuffix("K"))
        if level is not None and kilobytes is not None:
            shared = _count(read_text(path / "shared_cpu_list")) or 1
            found.append(Cache(level, read_text(path / "type").strip().lower() or "unified", kilobytes * 1024, shared))
    return found


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 12 else None


def _count(text: str) -> int:
    """How many a list such as ``0-3,8`` names."""
    total = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        start, end = _number(first), _number(last or first)
        total += max(end - start + 1, 0) if start is not None and end is not None else 0
    return total


#: Libraries of kernels and runtimes that backends call where they are installed.
_PROVIDERS = ("humming-kernels", "flashinfer-python", "amd-aiter", "intel-sycl-rt", "intel-opencl-rt")


def _versions() -> tuple[Version, ...]:
    """Read from package metadata: importing torch only to learn its version would cost seconds."""
    found = [Version("python", platform.python_version())]
    for name in ("torch", "transformers", "triton", *_PROVIDERS):
        try:
            found.append(Version(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)
