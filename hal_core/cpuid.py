"""CPUID leaves of this processor, read without a line of machine code: the C library did it at start and publishes the result.

glibc 2.33 and later export ``__x86_get_cpuid_feature_leaf`` (sys/platform/x86.h). For each leaf it gives the bits of CPUID, and the
bits that are *active*: those whose register state the operating system enabled in XCR0. Elsewhere (musl, older glibc, other systems)
this module knows nothing, and the flags of the kernel stand alone.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass

__all__ = ["BITS", "LeafBits", "read_leaves", "read_states"]

#: Leaf and subleaf to the index by which glibc stores it.
_INDEX = {(0x1, 0): 0, (0x7, 0): 1, (0x7, 1): 6}
_REGISTERS = ("eax", "ebx", "ecx", "edx")
#: Where CPUID tells of a feature: leaf, subleaf, register, bit. Names are those of Linux's /proc/cpuinfo.
BITS: dict[str, tuple[int, int, str, int]] = {
    "avx2": (0x7, 0, "ebx", 5), "fma": (0x1, 0, "ecx", 12), "f16c": (0x1, 0, "ecx", 29), "avx_vnni": (0x7, 1, "eax", 4),
    "avx512f": (0x7, 0, "ebx", 16), "avx512bw": (0x7, 0, "ebx", 30), "avx512vl": (0x7, 0, "ebx", 31), "avx512dq": (0x7, 0, "ebx", 17),
    "avx512_vnni": (0x7, 0, "ecx", 11), "avx512_bf16": (0x7, 1, "eax", 5), "avx512_fp16": (0x7, 0, "edx", 23),
    "avx512vbmi": (0x7, 0, "ecx", 1), "amx_tile": (0x7, 0, "edx", 24), "amx_int8": (0x7, 0, "edx", 25), "amx_bf16": (0x7, 0, "edx", 22),
    "amx_fp16": (0x7, 1, "eax", 21),
}  # fmt: skip
#: Register states of XCR0 by the bits that must all be set.
_STATES = {"avx": 0b110, "avx512": 0b1110_0110, "amx_tile": 0b11 << 17}
_SYS_ARCH_PRCTL, _GET_XCOMP_SUPP = 158, 0x1021


@dataclass(frozen=True)
class LeafBits:
    """One feature by CPUID: whether the processor has it, and whether the operating system enabled what it needs."""

    present: bool
    active: bool


def read_leaves() -> dict[str, LeafBits]:
    """Every known feature by name; empty when this system does not publish the leaves."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return {}
    try:
        leaf = ctypes.CDLL(None).__x86_get_cpuid_feature_leaf
    except (OSError, AttributeError):
        return {}
    leaf.restype, leaf.argtypes = ctypes.POINTER(ctypes.c_uint32 * 8), [ctypes.c_uint]
    words = {key: tuple(pointer.contents) for key, index in _INDEX.items() if (pointer := leaf(index))}
    return {name: _bits(words[spot[:2]], spot) for name, spot in BITS.items() if any(words.get(spot[:2], ())[:4])}


def _bits(words: tuple[int, ...], spot: tuple[int, int, str, int]) -> LeafBits:
    at = _REGISTERS.index(spot[2])
    return LeafBits(bool(words[at] >> spot[3] & 1), bool(words[4 + at] >> spot[3] & 1))


def read_states() -> tuple[str, ...]:
    """Register states that the operating system saves (its XCR0), by ``arch_prctl``; empty when it does not say (Linux before 5.16)."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ()
    call, mask = ctypes.CDLL(None, use_errno=True).syscall, ctypes.c_ulong(0)
    call.restype = ctypes.c_long
    if call(ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(_GET_XCOMP_SUPP), ctypes.byref(mask)):
        return ()
    return tuple(name for name, bits in _STATES.items() if mask.value & bits == bits)
