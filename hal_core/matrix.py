"""What a backend can run, as rows of a build matrix: architecture, torch, Python, and how each kernel was tried there."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from hal_core.coverage import Coverage, How, Tried, read_coverage
from hal_core.errors import PolicyError, ValueDecodeError
from hal_core.jsonable import from_json
from hal_core.machine import Device, Machine
from hal_core.manifest import INSTALL_HINTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hal_core.jsonable import JsonValue
    from hal_core.registry import BackendRow, RegisteredKernel

__all__ = ["MatrixRow", "coverage_of", "matrix_of", "narrowed", "vendor_row", "with_results"]

#: Checks that compare results with the truth.
_WITH_NUMBERS = ("accuracy", "effects")
#: Reasons that say that a kernel is not for an architecture; all others can be changed by its user.
_ARCHITECTURE = ("device.arch", "device.isa", "device.missing")


@dataclass(frozen=True)
class MatrixRow:
    """One job: an architecture with a release each of torch and Python, and the backend's kernels for it by how they were tried there.

    runs: whether any kernel ran on such a device with these releases. A kernel stands under each way in which it was tried, or
    under ``untried``.
    """

    vendor: str
    architecture: str
    torch: str
    python: str
    runs: bool
    ran: tuple[str, ...]
    failed: tuple[str, ...]
    interpreted: tuple[str, ...]
    compiled: tuple[str, ...]
    bound: tuple[str, ...]
    untried: tuple[str, ...]


def vendor_row(vendor: str, rows: Sequence[BackendRow]) -> BackendRow:
    """The loaded backend of a name.

    Raises:
        PolicyError: not installed, or refused; the message holds its reasons.
    """
    found = [row for row in rows if row.name == vendor]
    for row in found:
        if row.loaded and row.manifest is not None:
            return row
    reasons = "; ".join(str(reason) for row in found for reason in row.refusals)
    loaded = ", ".join(row.name for row in rows if row.loaded and row.manifest is not None) or "none"
    fix = INSTALL_HINTS.get(vendor, "install its wheel") if not found else "see hal probe"
    raise PolicyError(f"vendor {vendor[:80]!r}", reasons or f"not installed; installed: {loaded}", fix)


def coverage_of(row: BackendRow, machine: Machine) -> Coverage:
    """What the backend's wheel says; of one that says nothing, this process's releases with nothing tried."""
    found = read_coverage(row.distribution)
    return found if found is not None else Coverage((_torch(machine),), (_python(),))


def matrix_of(row: BackendRow, coverage: Coverage, kernels: Sequence[RegisteredKernel]) -> tuple[MatrixRow, ...]:
    """Every architecture with every pair of releases. Pure."""
    own = {k.name.partition(".")[2]: k for k in kernels if k.backend == row.name}
    kinds = dict.fromkeys(kind for k in own.values() for kind in k.kernel.devices if kind != "any")
    machines = _machines(row, coverage, next(iter(kinds), "cpu"))
    served = {name: [short for short, k in own.items() if _served(k, machine)] for name, machine in machines.items()}
    return tuple(
        _row(row.name, architecture, torch, python, coverage, served[architecture])
        for architecture, torch, python in product(served, coverage.torch, coverage.python)
    )


def narrowed(
    rows: Sequence[MatrixRow], architectures: Sequence[str] = (), torch: Sequence[str] = (), python: Sequence[str] = ()
) -> tuple[MatrixRow, ...]:
    """Those of the named architectures and releases; an empty list is no limit.

    Raises:
        ValueDecodeError: a name that no row has.
    """
    limits = {"architecture": architectures, "torch": torch, "python": python}
    for field, wanted in limits.items():
        known = tuple(dict.fromkeys(getattr(row, field) for row in rows))
        for word in wanted:
            if word not in known:
                raise ValueDecodeError(f"{field} {word[:80]!r}", "no row has it", f"use {', '.join(known)}")
    return tuple(row for row in rows if all(not wanted or getattr(row, field) in wanted for field, wanted in limits.items()))


def with_results(coverage: Coverage, row: BackendRow, results: JsonValue) -> Coverage:
    """With what ``hal verify --json`` found on some machine: kernels whose numbers were right there and those of which a check failed.

    Raises:
        ValueDecodeError: not such results, or none of this backend's kernels ran.
    """
    fix = "give what hal verify --json printed"
    if not isinstance(results, dict) or not isinstance(results.get("results"), list) or "machine" not in results:
        raise ValueDecodeError("results", "not those of hal verify", fix)
    machine = from_json(Machine, results["machine"], "$.machine")
    passed, failed = set[str](), set[str]()
    for each in results["results"]:
        backend, _, kernel = str(each.get("kernel") if isinstance(each, dict) else "").partition(".")
        if backend == row.name and each.get("status") in ("failed", "stale expectation"):
            failed.add(kernel)
        elif backend == row.name and each.get("check") in _WITH_NUMBERS and each.get("status") == "passed":
            passed.add(kernel)
    here = _architectures_of(machine, row, coverage)
    if not (passed | failed) or not here:
        found = f"kernels that ran: {len(passed)}; architectures: {', '.join(here) or 'none'}"
        raise ValueDecodeError(f"results for {row.name}", found, "run hal verify on a machine with such a device")
    by, python = f"hal verify, seed {results.get('seed')}", _release(machine.version("python") or "")
    for how, kernels in ((How.RAN, passed - failed), (How.FAILED, failed)):
        coverage = coverage.adding(Tried(how, tuple(sorted(kernels)), here, _torch(machine), python, by))
    return coverage


def _architectures_of(machine: Machine, row: BackendRow, coverage: Coverage) -> tuple[str, ...]:
    if coverage.levels:
        return tuple(level.name for level in coverage.levels if set(level.isa) <= set(machine.isa))
    known = row.manifest.architectures if row.manifest is not None else ()
    seen = {device.architecture for device in machine.devices}
    return tuple(architecture for architecture in known if architecture in seen)


def _machines(row: BackendRow, coverage: Coverage, kind: str) -> dict[str, Machine]:
    """A machine with a device of each architecture and nothing else; of each level, a processor with its features."""
    processor = Device("cpu", "unknown", "x86_64", "any")
    if coverage.levels:
        return {level.name: Machine("any", (processor,), level.isa) for level in coverage.levels}
    architectures = (row.manifest.architectures if row.manifest is not None else ()) or ("any",)
    return {name: Machine("any", (processor, Device(kind, "unknown", name, name))) for name in architectures}


def _served(registered: RegisteredKernel, machine: Machine) -> bool:
    """Whether the kernel is for such a device at all, asked with the first problem of what it declares."""
    from hal_core.testing.space import specs_of

    first = next(iter(specs_of(registered.kernel)), None)
    if first is None:
        return False
    return not any(reason.code in _ARCHITECTURE for reason in registered.kernel.refusals(first[0], machine))


def _row(vendor: str, architecture: str, torch: str, python: str, coverage: Coverage, kernels: Sequence[str]) -> MatrixRow:
    tried = {name: coverage.how(name, architecture, torch, python) for name in kernels}
    by = {how: tuple(name for name, found in tried.items() if how in found) for how in How}
    untried = tuple(name for name, found in tried.items() if not found)
    ran, failed, interpreted, compiled, bound = (by[how] for how in How)
    return MatrixRow(vendor, architecture, torch, python, bool(ran), ran, failed, interpreted, compiled, bound, untried)


def _release(text: str) -> str:
    try:
        version = Version(text)
    except InvalidVersion as error:
        raise ValueDecodeError(f"version {text[:80]!r}", "not a release", "give the machine's facts with its versions") from error
    return f"{version.major}.{version.minor}"


def _torch(machine: Machine) -> str:
    return _release(machine.version("torch") or "")


def _python() -> str:
    return _release(platform.python_version())
