"""Which way of multiplying a device has, and with what tiles; see csrc/kernels/engine.hpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.errors import SettingError

if TYPE_CHECKING:
    from hal_backend_xpu.native import DeviceFacts, Matrix
    from hal_core.machine import Device, Machine

__all__ = ["ELEMENTS", "ENGINES", "Engine", "choose", "expected"]

#: By the number that the headers know it under.
ENGINES = ("emulation", "dpas", "joint_matrix")
#: Elements of both operands: the runtime's name of the type, bytes, and that of the sums.
ELEMENTS = {"int8": ("s8", 1, "s32"), "bf16": ("bf16", 2, "fp32"), "fp16": ("fp16", 2, "fp32")}


@dataclass(frozen=True)
class Engine:
    """name: of ENGINES. sub_group: lanes, which is the number of columns of a tile. rows: of a tile. step: bytes of K."""

    name: str
    sub_group: int = 16
    rows: int = 8
    step: int = 32

    @property
    def defines(self) -> tuple[str, ...]:
        """Options for the compiler."""
        number = ENGINES.index(self.name)
        return (f"-DHAL_ENGINE={number}", f"-DHAL_SG={self.sub_group}", f"-DHAL_TM={self.rows}", f"-DHAL_KB={self.step}")

    def __str__(self) -> str:
        return f"{self.name}, tiles of {self.rows}x{self.sub_group}, {self.step} bytes of K"


def choose(facts: DeviceFacts, element: str, asked: str | None = None) -> Engine:
    """The engine for products of ``element`` on a device: matrix units where it has them for that type, else emulation.

    Args:
        facts: of the device.
        element: a key of ELEMENTS.
        asked: a name of ENGINES instead; for tests, and for programs that run elsewhere.

    Raises:
        SettingError: an engine that is not known, or that the device does not have.
    """
    narrow = Engine("", 16 if 16 in facts.sub_groups or not facts.sub_groups else 8)
    if asked in ("emulation", "dpas"):
        return Engine(asked, narrow.sub_group)
    if asked not in (None, "joint_matrix"):
        raise SettingError(f"engine {asked!r}", "unknown", f"use one of {', '.join(ENGINES)}")
    found = [tile for matrix in facts.matrices if (tile := _tile(matrix, element)) is not None and tile.sub_group in facts.sub_groups]
    if found:
        return max(found, key=lambda engine: engine.rows)
    if asked:
        raise SettingError(f"engine {asked} for {element}", f"{facts.name} has no matrix unit for it", "use emulation")
    return Engine("emulation", narrow.sub_group)


def _tile(matrix: Matrix, element: str) -> Engine | None:
    """The tile of a product that a device reports; None where it is for another type, or of a shape not written here."""
    name, size, sums = ELEMENTS[element]
    if (matrix.a, matrix.b, matrix.c) != (name, name, sums):
        return None
    if matrix.max_m >= 16 and matrix.max_n >= 16 and matrix.max_k * size >= 64:  # AMX: anything up to that
        return Engine("joint_matrix", 16, 16, 64)
    if matrix.n in (8, 16) and matrix.k * size == 32 and matrix.m in (0, 8) and (matrix.m or matrix.max_m >= 8):  # XMX
        return Engine("joint_matrix", matrix.n, 8, 32)
    return None


def expected(device: Device, machine: Machine) -> str:
    """What ``choose`` will find, told by facts that need no runtime: a sentence for ``hal probe``."""
    if device.kind == "xpu":
        return f"{device.architecture} multiplies by {Engine('joint_matrix', 8 if device.architecture == 'dg2' else 16)}"
    if {"amx_int8", "amx_bf16"} <= set(machine.isa):
        return f"the processor multiplies int8 and bf16 by {Engine('joint_matrix', 16, 16, 64)}, on AMX; fp16 is emulated"
    return f"the processor has no AMX: products are emulated ({Engine('emulation')})"
