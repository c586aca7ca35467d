"""Finds the facts of this machine from what the operating system publishes: no driver library, no device context."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from hal_core.machine import Denied, Device, FactMark, Machine, Mark, Version

__all__ = ["detect", "detect_from"]

#: x86 features that kernels may name, in the order shown. Names are those of Linux's /proc/cpuinfo.
_X86 = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "avx512_vbmi", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
)  # fmt: skip
_ARM = ("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2")
#: Prefixes of the features that a level of HAL_CPU_ISA takes away; ``avx512`` means F, BW, VL and DQ alone.
_BEYOND_AVX512 = ("avx512_", "avx_vnni", "amx")
_ABOVE = {
    "avx2": ("avx512", "avx_vnni", "amx"),
    "avx512": _BEYOND_AVX512,
    "avx512bf16": tuple(name for name in _X86 if name.startswith(_BEYOND_AVX512) and name != "avx512_bf16"),
}
_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "hygon"}

# From the kernel's arch/x86/include/uapi/asm/prctl.h; the tile data state is bit 18 of XCR0.
_SYS_ARCH_PRCTL, _GET_XCOMP_SUPP, _GET_XCOMP_PERM, _REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1021, 0x1022, 0x1023, 18


@functools.cache
def detect(level: str | None) -> Machine:
    """The facts of this machine with instruction sets lowered to ``level`` (None: as they are)."""
    return detect_from(Path("/"), level)


def detect_from(root: Path, level: str | None = None) -> Machine:
    """As :func:`detect`, reading ``proc`` and ``sys`` under ``root``; tests give a folder of their own."""
    info = _cpuinfo(root)
    present = _features(info)
    denied = [*_amx_denied(present), *_lowered(present, level)]
    barred = {d.name for d in denied}
    vendor = _VENDORS.get(info.get("vendor_id", ""), "unknown")
    cpu = Device("cpu", vendor, platform.machine().lower(), _cpu_name(info), _cores(), _memory(root))
    devices = (cpu, *_nvidia(root), *_amd(root), *_intel(root))
    marks = [FactMark("platform", Mark.REPORTED), FactMark("devices", Mark.REPORTED), FactMark("versions", Mark.REPORTED)]
    # Flags are what the kernel left after checking CPUID and XCR0; AMX was asked for in this process.
    marks += [FactMark("isa", Mark.MEASURED if sys.platform == "linux" else Mark.REPORTED)]
    return Machine(
        platform=f"{sys.platform}_{platform.machine().lower()}",
        devices=devices,
        isa=tuple(name for name in present if name not in barred),
        denied=tuple({d.name: d for d in denied}.values()),
        versions=_versions(),
        marks=tuple(marks),
    )


def _read(path: Path) -> str:
    """Text of a file of /proc or /sys; empty when it is absent or not readable, which is how these trees say no."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _cpuinfo(root: Path) -> dict[str, str]:
    """Fields of the first processor."""
    first = _read(root / "proc/cpuinfo").strip().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _features(info: dict[str, str]) -> tuple[str, ...]:
    """Known features among the kernel's flags. Linux clears a flag whose register state it does not save."""
    flags = set(info.get("flags", info.get("Features", "")).split())
    return tuple(name for name in (*_X86, *_ARM) if name in flags)


def _cpu_name(info: dict[str, str]) -> str:
    return info.get("model name") or platform.processor() or platform.machine() or "unknown"


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
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


def _nvidia(root: Path) -> list[Device]:
    """GPUs of NVIDIA's kernel driver. Architecture, units and memory need NVML and are not guessed from the name."""
    found = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        fields = dict(line.partition(":")[::2] for line in _read(path).splitlines())
        found.append(Device("cuda", "nvidia", "unknown", fields.get("Model", "").strip() or "NVIDIA GPU"))
    return found


def _amd(root: Path) -> list[Device]:
    """GPUs of the AMD compute driver, by its topology files; processors appear there as nodes without SIMDs."""
    found = []
    for path in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        pairs = (line.split() for line in _read(path).splitlines())
        fields = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
        target, simds = fields.get("gfx_target_version", 0), fields.get("simd_count", 0)
        if not target or not simds:
            continue
        # 90402 is gfx942, 90010 is gfx90a: decimal pairs, written in hexadecimal digits.
        architecture = f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"
        units = simds // max(fields.get("simd_per_cu", 0), 1)
        banks = (_read(bank) for bank in (path.parent / "mem_banks").glob("*/properties"))
        sizes = (line.split() for bank in banks for line in bank.splitlines())
        memory = sum(int(size[1]) for size in sizes if len(size) == 2 and size[0] == "size_in_bytes" and size[1].isdecimal())
        found.append(Device("rocm", "amd", architecture, _read(path.parent / "name").strip() or architecture, units, memory or None))
    return found


#: PCI device ids of Intel GPUs that have matrix engines. Others (older integrated graphics) are not listed as devices.
_INTEL = {
    **dict.fromkeys(("0x0bd5", "0x0bd6", "0x0bd9", "0x0bda", "0x0bdb"), ("pvc", "Intel Data Center GPU Max")),
    **dict.fromkeys(("0x56a0", "0x56a1", "0x56a5", "0x56a6", "0x56c0", "0x56c1"), ("dg2", "Intel Arc A-series or Flex")),
    **dict.fromkeys(("0xe20b", "0xe20c", "0xe211", "0xe212"), ("bmg", "Intel Arc B-series")),
}


def _intel(root: Path) -> list[Device]:
    found = []
    for path in sorted((root / "sys/class/drm").glob("card[0-9]*/device/vendor")):
        if "-" in path.parent.parent.name or _read(path).strip() != "0x8086":
            continue
        known = _INTEL.get(_read(path.parent / "device").strip().lower())
        if known is not None:
            found.append(Device("xpu", "intel", *known))
    return found


def _versions() -> tuple[Version, ...]:
    """Read from package metadata: importing torch only to learn its version would cost seconds."""
    found = [Version("python", platform.python_version())]
    for name in ("torch", "transformers", "triton"):
        try:
            found.append(Version(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)
