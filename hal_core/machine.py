"""What a machine has, as a value: devices, usable instruction sets, versions, and how each fact is known."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum

from hal_core import settings
from hal_core.errors import ValueDecodeError
from hal_core.jsonable import JsonValue, dumps, from_json, loads, to_json
from hal_core.processor import Processor

__all__ = ["DEVICE_KINDS", "FACTS_VERSION", "Denied", "Device", "FactMark", "Machine", "Mark", "Version"]

#: Version of the facts' form. Fields are only added; a change of meaning raises it.
FACTS_VERSION = 1

DEVICE_KINDS = ("cpu", "cuda", "xpu", "rocm")
#: No device of this decade comes near; a larger number is a mistake or an attack.
_MAX_BYTES = 1 << 50


class Mark(str, Enum):
    """How a fact is known: asked of the hardware, told by the operating system or a driver, or read in a document."""

    MEASURED = "measured"
    REPORTED = "reported"
    DATASHEET = "datasheet"


@dataclass(frozen=True)
class Device:
    """One device. ``units``: cores this process may use, SMs, CUs or Xe cores. None: not known without a device context."""

    kind: str
    vendor: str
    architecture: str
    name: str
    units: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in DEVICE_KINDS:
            raise ValueDecodeError("device.kind", f"{self.kind!r} is unknown", f"use one of {', '.join(DEVICE_KINDS)}")
        for field, value, most in (("units", self.units, 1 << 20), ("memory_bytes", self.memory_bytes, _MAX_BYTES)):
            if value is not None and not 0 < value <= most:
                raise ValueDecodeError(f"device.{field}", f"{value} is not between 1 and {most}")

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self.name}", self.architecture]
        parts += [f"{self.units} units"] if self.units else []
        parts += [f"{self.memory_bytes / 2**30:.1f} GiB"] if self.memory_bytes else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Denied:
    """A feature or device that is there and may not be used: why, and what would change that."""

    name: str
    reason: str
    fix: str


@dataclass(frozen=True)
class Version:
    """An installed piece of software that a backend may depend on."""

    name: str
    version: str


@dataclass(frozen=True)
class FactMark:
    """How the fact at a dotted path is known, e.g. ``isa`` or ``devices.0.memory_bytes``; it holds for all below the path.

    source: who said so, e.g. ``CPUID leaves`` or the name of a datasheet.
    """

    fact: str
    mark: Mark
    source: str = ""


@functools.cache
def _detect(level: str | None) -> Machine:
    from hal_core.detect import detect

    return detect(level, settings.device_masks())


@dataclass(frozen=True)
class Machine:
    """Facts only, so that a selection can be made for a machine that is not at hand.

    platform: ``linux_x86_64`` form. isa: features that this process may use (the processor has them, the operating
    system saves their state and permits them, no setting lowers them). denied: what is there and may not be used.
    """

    platform: str
    devices: tuple[Device, ...]
    isa: tuple[str, ...] = ()
    denied: tuple[Denied, ...] = ()
    versions: tuple[Version, ...] = ()
    marks: tuple[FactMark, ...] = ()
    processor: Processor = Processor()
    facts_version: int = FACTS_VERSION

    def __post_init__(self) -> None:
        if self.facts_version != FACTS_VERSION:
            older = self.facts_version < FACTS_VERSION
            fix = "write them again with 'hal facts'" if older else "pip install --upgrade hal-core"
            shown = self.facts_version if abs(self.facts_version) < 1 << 31 else "out of all proportion"
            raise ValueDecodeError("machine.facts_version", f"{shown}, this hal-core reads {FACTS_VERSION}", fix)

    def __hash__(self) -> int:
        # Part of the key of every cached selection: computed once, the fields never change.
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = hash((self.platform, self.devices, self.isa, self.denied, self.versions))
            object.__setattr__(self, "_hash", found)
        return found

    @classmethod
    def detect(cls) -> Machine:
        """This machine, without creating a device context. Cached per value of ``HAL_CPU_ISA``.

        Masks that hide devices (``CUDA_VISIBLE_DEVICES`` ...) count as they are at the first call, as for the vendors' runtimes.

        Where AMX is present the operating system is asked for permission to use it, which lasts for the process.
        """
        return _detect(settings.cpu_isa())

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Decode the JSON text that :meth:`dumps` wrote."""
        return loads(cls, text)

    @classmethod
    def from_data(cls, data: JsonValue) -> Machine:
        """Decode plain JSON types."""
        return from_json(cls, data)

    def to_json(self) -> JsonValue:
        """Plain JSON types."""
        return to_json(self)

    def dumps(self, indent: int | None = 2) -> str:
        """JSON text, e.g. for ``hal facts > box.json``."""
        return dumps(self, indent)

    def version(self, name: str) -> str | None:
        """Version of a piece of software (``python``, ``torch``, ...), or None when it is not there."""
        return next((v.version for v in self.versions if v.name == name), None)

    def mark(self, fact: str) -> Mark | None:
        """How a fact is known: the mark of the longest path that leads to it."""
        leading = [m for m in self.marks if fact == m.fact or fact.startswith(m.fact + ".")]
        return max(leading, key=lambda m: len(m.fact)).mark if leading else None

    def why_not(self, feature: str) -> str:
        """Why a processor feature may not be used; empty when it may."""
        if feature in self.isa:
            return ""
        denied = next((d for d in self.denied if d.name == feature), None)
        if denied is not None:
            return denied.reason
        cpu = next((d.name for d in self.devices if d.kind == "cpu"), "no processor")
        return f"not in this processor ({cpu})"

    def remedy(self, feature: str) -> str:
        """What would make a processor feature usable."""
        denied = next((d for d in self.denied if d.name == feature), None)
        return denied.fix if denied is not None else "run on a processor that has it, or use another kernel"

    def __str__(self) -> str:
        software = ", ".join(f"{v.name} {v.version}" for v in self.versions)
        lines = [f"{self.platform} ({software})", *(f"  {device}" for device in self.devices)]
        lines += [f"  processor: {self.processor}"] if str(self.processor) else []
        lines.append(f"  isa: {' '.join(self.isa) or 'none known'}")
        lines += [f"  not usable: {d.name}: {d.reason}; {d.fix}" for d in self.denied]
        return "\n".join(lines)
