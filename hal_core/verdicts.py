"""What isolated trials of backends found, remembered for the same wheel, drivers, torch and instruction sets; a small file of JSON.

A damaged or foreign file is ignored with a warning and replaced by the next result. Writing is atomic and locked, so that two
processes lose nothing of each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hal_core import settings
from hal_core.errors import HalWarning, OutputError, ValueDecodeError
from hal_core.jsonable import dumps, loads
from hal_core.outputs import whole_file
from hal_core.reading import read_small_text, short
from hal_core.refusal import Refusal
from hal_core.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib import metadata

    from hal_core.machine import Machine

__all__ = ["Trial", "Verdict", "crashed_before", "recall", "remember", "verdict_file", "wheel_key"]

_VERSION = 1
_MOST_BYTES = 8 << 20
_MOST_VERDICTS = 200
#: Files whose change makes another wheel of it, also where an installation keeps no RECORD.
_CODE = (".py", ".so", ".json", ".pyd", ".dylib", ".co", ".cubin", ".spv")


@dataclass(frozen=True)
class Trial:
    """One kernel tried on a tiny problem. outcome: ``passed``, ``failed`` or ``skipped``. error: relative L2 against the reference."""

    kernel: str
    outcome: str
    detail: str = ""
    error: float | None = None

    def __str__(self) -> str:
        return f"{self.kernel}: {self.outcome}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class Verdict:
    """key: see :func:`wheel_key`. status: as of a backend's row. signal: what killed it, or empty. when: date of the trial."""

    key: str
    backend: str
    status: str
    when: str
    refusals: tuple[Refusal, ...] = ()
    kernels: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()
    signal: str = ""


@dataclass(frozen=True)
class _File:
    version: int
    verdicts: tuple[Verdict, ...]


def verdict_file() -> Path:
    """Where results are kept: ``isolated.json`` in the cache folder."""
    return settings.cache_folder() / "isolated.json"


def wheel_key(dist: metadata.Distribution | None, machine: Machine) -> str | None:
    """A digest of the wheel's files and of what it runs with; None where the files are not known, and nothing can be remembered."""
    files = None if dist is None else dist.files
    if dist is None or files is None:
        return None
    digest = hashlib.sha256(f"{_VERSION} {__version__} {machine.platform} {' '.join(machine.isa)}".encode())
    drivers = [v for v in machine.versions if v.name in ("torch", "python") or v.name.endswith("_driver")]
    digest.update(repr(sorted((v.name, v.version) for v in drivers)).encode())
    digest.update(repr([(d.kind, d.architecture) for d in machine.devices]).encode())
    digest.update((dist.read_text("RECORD") or "").encode())
    for file in sorted(files, key=str):
        if str(file).endswith(_CODE):
            with contextlib.suppress(OSError):
                stat = Path(str(file.locate())).stat()
                digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def recall(key: str) -> Verdict | None:
    """What is remembered for a key."""
    return next((verdict for verdict in _read() if verdict.key == key), None)


def crashed_before(dist: metadata.Distribution | None, machine: Machine) -> Refusal | None:
    """Why a wheel must not be imported: a signal killed it when it was tried. A hang may be the machine's load, and does not count."""
    if dist is None or not verdict_file().is_file():
        return None
    if not any(verdict.signal for verdict in _read()):
        return None
    key = wheel_key(dist, machine)
    verdict = None if key is None else recall(key)
    if verdict is None or not verdict.signal:
        return None
    reason = next((refusal for refusal in verdict.refusals if refusal.code == "backend.crash"), None)
    return None if reason is None else Refusal(reason.code, reason.asked, f"{reason.found} on {verdict.when}", reason.fix)


def remember(verdict: Verdict) -> None:
    """Keep a result beside the others; where the folder cannot be written, a warning says that nothing is remembered."""
    path = verdict_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            others = [old for old in _read() if old.key != verdict.key]
            text = dumps(_File(_VERSION, (*others[-_MOST_VERDICTS + 1 :], verdict)), indent=1)
            with whole_file(path) as partial:
                partial.write_text(text, encoding="utf-8")
    except (OSError, OutputError) as error:
        warnings.warn(f"{path}: {short(error)}; results of isolated probes are not remembered", HalWarning, stacklevel=2)


def _read() -> tuple[Verdict, ...]:
    path = verdict_file()
    if not path.exists():
        return ()
    try:
        file = loads(_File, read_small_text(path, _MOST_BYTES, str(path)))
    except ValueDecodeError as error:
        warnings.warn(f"{path} is ignored: {short(error)}", HalWarning, stacklevel=3)
        return ()
    return file.verdicts if file.version == _VERSION else ()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time, by a lock file beside; the operating system frees it when its holder dies."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: the replacement alone is atomic
        yield
        return
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
