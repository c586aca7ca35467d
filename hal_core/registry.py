"""Finds the backends that are installed. Each is judged by its manifest before import; a bad one is a row with its reason."""

from __future__ import annotations

import importlib
import logging
import threading
import traceback
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hal_core import settings
from hal_core.contract import checked_kernels, checked_unpackers
from hal_core.foreign_wheels import FOREIGN, foreign_manifest, foreign_refusals
from hal_core.kernel import Kernel
from hal_core.machine import Machine
from hal_core.manifest import BackendManifest, read_manifest
from hal_core.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hal_core.formats.unpack import Unpacker

__all__ = [
    "GROUP", "REFERENCE", "BackendRow", "Judged", "RegisteredKernel", "RegisteredUnpacker", "Registry", "default_registry", "judged",
    "loaded",
]  # fmt: skip

GROUP = "hal_core.backends"
REFERENCE = "reference"
_REFERENCE_OBJECT = ("hal_core.reference.backend", "backend")
_log = logging.getLogger("hal_core.registry")


@dataclass(frozen=True)
class BackendRow:
    """One installed backend, with its verdict.

    status: ``ready``; ``no_device`` (loaded, and this machine has no device for it); ``refused`` (by its manifest, not
    imported); ``failed`` (raised, or registered something invalid); ``crashed`` (in a process of its own, not imported
    here). kernels: full names. remarks: what the backend says of this machine, e.g. with which units it multiplies.
    """

    name: str
    distribution: str
    version: str
    status: str
    refusals: tuple[Refusal, ...] = ()
    manifest: BackendManifest | None = None
    kernels: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def loaded(self) -> bool:
        """Whether its kernels are registered."""
        return self.status in ("ready", "no_device")


@dataclass(frozen=True, eq=False)
class RegisteredKernel:
    """A kernel under its full name ``backend.kernel``."""

    name: str
    backend: str
    kernel: Kernel[Any]


@dataclass(frozen=True, eq=False)
class RegisteredUnpacker:
    """An op that reads checkpoints, under its full name ``backend.unpacker``."""

    name: str
    unpacker: Unpacker


@dataclass(frozen=True)
class _Found:
    """What became of one backend; nothing is registered unless its row is healthy."""

    row: BackendRow
    kernels: tuple[RegisteredKernel, ...] = ()
    unpackers: tuple[RegisteredUnpacker, ...] = ()


@dataclass(frozen=True)
class _Owner:
    name: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"backend {self.name!r} ({self.distribution} {self.version})".replace(" )", ")")


@dataclass(frozen=True)
class Judged:
    """An entry point after its verdict before import: a row of its own when refused (then ``row`` is set), else still to load."""

    entry_point: metadata.EntryPoint
    manifest: BackendManifest | None
    row: BackendRow | None = None


class Registry:
    """The backends of this process, loaded on first use and kept.

    Args:
        entry_points: those to use; None for all installed in group ``hal_core.backends``.
        machine: the machine of this process; None to detect it when first needed.
        reference: whether to include the built-in reference backend.
    """

    def __init__(
        self, entry_points: Iterable[metadata.EntryPoint] | None = None, machine: Machine | None = None, *, reference: bool = True
    ) -> None:
        self._given = None if entry_points is None else tuple(entry_points)
        self._machine, self._reference = machine, reference
        self._lock = threading.RLock()
        self._loaded: tuple[tuple[BackendRow, ...], tuple[RegisteredKernel, ...], tuple[RegisteredUnpacker, ...]] | None = None

    def rows(self) -> tuple[BackendRow, ...]:
        """Every backend found, healthy or not, sorted by name; the reference backend last."""
        return self._load()[0]

    def kernels(self) -> tuple[RegisteredKernel, ...]:
        """Kernels of the loaded backends, sorted by full name."""
        return self._load()[1]

    def unpackers(self) -> tuple[RegisteredUnpacker, ...]:
        """Readers' ops of the backends that have a device here, sorted by full name."""
        return self._load()[2]

    def kernel(self, name: str) -> Kernel[Any]:
        """The kernel of a full name.

        Raises:
            KeyError: not registered.
        """
        for registered in self.kernels():
            if registered.name == name:
                return registered.kernel
        raise KeyError(name)

    def refresh(self) -> None:
        """Look again at the next use, e.g. after a wheel was installed; modules already imported stay as they are."""
        with self._lock:
            importlib.invalidate_caches()
            self._loaded = None

    def _load(self) -> tuple[tuple[BackendRow, ...], tuple[RegisteredKernel, ...], tuple[RegisteredUnpacker, ...]]:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._read()
            return self._loaded

    def _read(self) -> tuple[tuple[BackendRow, ...], tuple[RegisteredKernel, ...], tuple[RegisteredUnpacker, ...]]:
        machine = self._machine or Machine.detect()
        entries, rows = judged(machine, self._given)
        table, every = list(rows), list[_Found]()
        taken = {REFERENCE: _Owner(REFERENCE, "hal-core", "")}
        for entry in entries:
            found = _found(entry, machine, taken)
            table.append(found.row)
            every.append(found)
            if found.row.loaded:
                taken[found.row.name] = _owner(entry.entry_point)
        table.sort(key=lambda row: (row.name, row.distribution))
        if self._reference:
            every.append(_reference(machine))
            table.append(every[-1].row)
        kernels = sorted((kernel for found in every for kernel in found.kernels), key=lambda k: k.name)
        unpackers = sorted((each for found in every if found.row.status == "ready" for each in found.unpackers), key=lambda u: u.name)
        return tuple(table), tuple(kernels), tuple(unpackers)


def judged(machine: Machine, given: Iterable[metadata.EntryPoint] | None = None) -> tuple[tuple[Judged, ...], tuple[BackendRow, ...]]:
    """Every entry point (``given``, or all installed) with its verdict before import, in a fixed order; and rows of other wheels."""
    found, rows = _installed(machine) if given is None else (tuple(given), ())
    # A fixed order, so that the same one of two equal names wins whatever the order of sys.path.
    ordered = sorted(found, key=lambda ep: (ep.name, _owner(ep).distribution, ep.value))
    return tuple(_judge(entry_point, machine) for entry_point in ordered), rows


def _judge(entry_point: metadata.EntryPoint, machine: Machine) -> Judged:
    from hal_core.verdicts import crashed_before

    owner, manifest = _owner(entry_point), read_manifest(entry_point)
    if isinstance(manifest, Refusal):
        return Judged(entry_point, None, _bad(owner, "refused", (manifest,)))
    refusals = manifest.refusals(machine)
    if refusals:
        return Judged(entry_point, manifest, _bad(owner, "refused", refusals, manifest))
    crash = crashed_before(entry_point.dist, machine)
    return Judged(entry_point, manifest, None if crash is None else _bad(owner, "crashed", (crash,), manifest))


def loaded(entry: Judged, machine: Machine) -> tuple[BackendRow, tuple[RegisteredKernel, ...]]:
    """Import what passed its verdict; its row, and its kernels when it is healthy."""
    found = _imported(entry, machine)
    return found.row, found.kernels


def _imported(entry: Judged, machine: Machine) -> _Found:
    return _guarded(entry.entry_point.load, _owner(entry.entry_point), entry.manifest, machine)


def _installed(machine: Machine) -> tuple[tuple[metadata.EntryPoint, ...], tuple[BackendRow, ...]]:
    """Entry points of all distributions, each read on its own: one broken metadata folder must not hide the others."""
    found, rows, seen = [], [], set()
    for dist in metadata.distributions():
        try:
            name = _name(dist)
            key = name.lower().replace("_", "-").replace(".", "-") if name else str(dist)
            if key in seen:
                continue  # shadowed by an earlier folder of sys.path, as for imports
            seen.add(key)
            if GROUP in (dist.read_text("entry_points.txt") or ""):
                found += [ep for ep in dist.entry_points if ep.group == GROUP]
            if key in FOREIGN:
                rows += _foreign(key, dist, machine)
        except Exception as error:  # noqa: BLE001 - metadata of strangers; what may be ours becomes a row
            if GROUP in _entry_points_text(dist):
                reason = Refusal("backend.manifest", f"readable metadata of {dist}", _told(error), "reinstall it")
                rows.append(BackendRow(str(dist), str(dist), "", "refused", (reason,)))
    return tuple(found), tuple(rows)


def _name(dist: metadata.Distribution) -> str | None:
    """The distribution's name from the head of its metadata: parsing the whole of all of them costs a tenth of a second."""
    head = (dist.read_text("METADATA") or "").partition("\n\n")[0]
    named = next((line for line in head.splitlines() if line.startswith("Name:")), None)
    return named[5:].strip() or None if named is not None else dist.metadata["Name"]


def _foreign(key: str, dist: metadata.Distribution, machine: Machine) -> list[BackendRow]:
    """A row for a known wheel of others that does not fit."""
    version = dist.version
    manifest = foreign_manifest(key, version)
    refusals = () if manifest is None else foreign_refusals(manifest, version, machine)
    return [BackendRow(manifest.name, key, version, "refused", refusals, manifest)] if manifest is not None and refusals else []


def _entry_points_text(dist: metadata.Distribution) -> str:
    try:
        return dist.read_text("entry_points.txt") or ""
    except (OSError, ValueError):
        return ""


def _owner(entry_point: metadata.EntryPoint) -> _Owner:
    dist = entry_point.dist
    if dist is None:
        return _Owner(entry_point.name, f"entry point {entry_point.value}", "")
    return _Owner(entry_point.name, dist.metadata["Name"] or "unnamed distribution", dist.metadata["Version"] or "")


def _found(entry: Judged, machine: Machine, taken: dict[str, _Owner]) -> _Found:
    owner = _owner(entry.entry_point)
    if owner.name in taken and entry.manifest is not None:
        other = taken[owner.name].distribution
        found = f"{owner.distribution} and {other} both register it; {other} is used"
        reason = Refusal("backend.invalid", f"one backend named {owner.name!r}", found, f"pip uninstall {owner.distribution}, or {other}")
        return _Found(_bad(owner, "refused", (reason,), entry.manifest))
    return _Found(entry.row) if entry.row is not None else _imported(entry, machine)


def _reference(machine: Machine) -> _Found:
    from hal_core.version import __version__

    module, name = _REFERENCE_OBJECT
    return _guarded(lambda: getattr(importlib.import_module(module), name), _Owner(REFERENCE, "hal-core", __version__), None, machine)


def _guarded(load: Callable[[], Any], owner: _Owner, manifest: BackendManifest | None, machine: Machine) -> _Found:
    """Run a plugin's code. Whatever it raises, also SystemExit, becomes its row; only the user's Ctrl-C passes."""
    try:
        backend = load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a plugin may raise anything
        _trace(owner)
        fix = f"pip install --force-reinstall --no-deps {owner.distribution}; HAL_DEBUG=1 shows the traceback"
        return _Found(_bad(owner, "failed", (Refusal("backend.import", f"an importable {owner}", _told(error), fix),), manifest))
    try:
        kernels, refusals = checked_kernels(backend, manifest, str(owner))
        unpackers, problems = ((), ()) if refusals else checked_unpackers(backend)
        refusals += tuple(_invalid(owner, problem) for problem in problems)
        devices = () if refusals else tuple(backend.devices(machine))
        remarks = _remarks(backend, machine)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a plugin may raise anything
        _trace(owner)
        found = f"registering raised {_told(error)}"
        refusals = (Refusal("backend.invalid", f"a valid {owner}", found, "tell its authors; HAL_DEBUG=1 shows the traceback"),)
    if refusals:
        return _Found(_bad(owner, "failed", refusals, manifest))
    registered = tuple(RegisteredKernel(f"{owner.name}.{kernel.name}", owner.name, kernel) for kernel in kernels)
    readers = tuple(RegisteredUnpacker(f"{owner.name}.{each.name}", each) for each in unpackers)
    names = tuple(sorted(k.name for k in registered))
    status, reasons = ("ready", ()) if devices else ("no_device", (_no_device(owner, machine),))
    row = BackendRow(owner.name, owner.distribution, owner.version, status, reasons, backend.manifest, names, remarks)
    return _Found(row, registered, readers)


def _remarks(backend: Any, machine: Machine) -> tuple[str, ...]:
    say = getattr(backend, "remarks", None)
    return tuple(str(line)[:300] for line in say(machine)) if callable(say) else ()


def _invalid(owner: _Owner, problem: str) -> Refusal:
    fix = "the plugin's author must answer it; see docs/write-a-backend.md"
    return Refusal("backend.invalid", f"a valid backend from {owner}", problem, fix)


def _no_device(owner: _Owner, machine: Machine) -> Refusal:
    kinds = ", ".join(sorted({device.kind for device in machine.devices})) or "none"
    return Refusal("backend.device", f"a device that {owner} serves", f"devices: {kinds}", "run on a machine with one")


def _bad(owner: _Owner, status: str, refusals: tuple[Refusal, ...], manifest: BackendManifest | None = None) -> BackendRow:
    return BackendRow(owner.name, owner.distribution, owner.version, status, refusals, manifest)


def _trace(owner: _Owner) -> None:
    """The traceback of what is being handled: to the log, and to standard error under HAL_DEBUG."""
    _log.debug("%s failed", owner, exc_info=True)
    if settings.debug():
        traceback.print_exc()


def _told(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return text if len(text) <= 300 else text[:297] + "..."


_DEFAULT = Registry()


def default_registry() -> Registry:
    """The registry that ``hal.select`` and the others use."""
    return _DEFAULT
