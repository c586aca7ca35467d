"""Each backend imported and tried in a process of its own: an illegal instruction, a hang or an exit is a row, and hides nobody.

The parent imports no plugin. The child writes one line of JSON for each step, so that a crash is known by the step that it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal_core.errors import HalError
from hal_core.jsonable import from_json, to_json
from hal_core.machine import Machine
from hal_core.refusal import Refusal
from hal_core.registry import GROUP, BackendRow, Judged, judged, loaded
from hal_core.verdicts import Trial, Verdict, recall, remember, wheel_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hal_core.probe import Probe

__all__ = ["TIME_LIMIT", "IsolatedProbe", "child", "crash_refusal", "isolated_probe", "probe_isolated", "smoke_refusal"]

#: Seconds for one backend: importing torch may take most of a minute on a cold disk.
TIME_LIMIT = 120.0
_DEATHS = {
    "SIGILL": "an illegal instruction", "SIGSEGV": "a memory fault", "SIGBUS": "a bus error", "SIGABRT": "an abort",
    "SIGFPE": "an arithmetic fault",
}  # fmt: skip


@dataclass(frozen=True)
class IsolatedProbe:
    """remembered: a sentence for each backend whose result is of an earlier trial."""

    rows: tuple[BackendRow, ...]
    trials: tuple[Trial, ...] = ()
    remembered: tuple[str, ...] = ()


def probe_isolated(
    machine: Machine, entry_points: Iterable[metadata.EntryPoint] | None = None, limit_s: float = TIME_LIMIT, *, fresh: bool = False
) -> IsolatedProbe:
    """Try every backend that its manifest does not refuse; results are remembered for the same wheel, drivers and torch.

    Args:
        machine: this machine.
        entry_points: those to try; None for all installed.
        limit_s: seconds for each backend.
        fresh: try again what is remembered.
    """
    if not limit_s > 0:
        raise HalError(f"time limit of {limit_s} s", "not above zero", "give seconds, e.g. 60")
    entries, foreign = judged(machine, entry_points)
    rows, trials, notes = list(foreign), list[Trial](), []
    for entry in entries:
        if entry.row is not None and entry.row.status != "crashed":
            rows.append(entry.row)
            continue
        key = wheel_key(entry.entry_point.dist, machine)
        verdict = None if fresh or key is None else recall(key)
        if verdict is None:
            verdict = _tried(entry, key or "", limit_s)
            if key is not None:
                remember(verdict)
        else:
            notes.append(f"{verdict.backend}: tried on {verdict.when} with the same wheel and drivers; --fresh tries again")
        rows.append(_row(entry, verdict))
        trials += verdict.trials
    return IsolatedProbe(tuple(sorted(rows, key=lambda row: (row.name, row.distribution))), tuple(trials), tuple(notes))


def isolated_probe(limit_s: float = TIME_LIMIT, *, fresh: bool = False) -> Probe:
    """As ``hal.probe()``, with every installed backend tried in a process of its own; the built-in reference is not tried."""
    from hal_core.probe import probe_from
    from hal_core.registry import Registry

    machine = Machine.detect()
    found = probe_isolated(machine, None, limit_s, fresh=fresh)
    probe = probe_from(machine, (*found.rows, *Registry((), machine).rows()))
    return replace(probe, trials=found.trials, hints=(*probe.hints, *found.remembered))


def _row(entry: Judged, verdict: Verdict) -> BackendRow:
    dist = entry.entry_point.dist
    name, version = (dist.metadata["Name"], dist.version) if dist is not None else (entry.entry_point.value, "")
    return BackendRow(entry.entry_point.name, name, version, verdict.status, verdict.refusals, entry.manifest, verdict.kernels)


def _tried(entry: Judged, key: str, limit_s: float) -> Verdict:
    """Run the child and read how far it came."""
    owner, when = entry.entry_point, datetime.now(timezone.utc).date().isoformat()
    blank = Verdict(key, owner.name, "crashed", when)
    with tempfile.TemporaryDirectory(prefix="hal-probe-") as folder:
        events = Path(folder) / "events"
        ended, last_words = _run(owner, events, limit_s)
        steps = _events(events)
    trials = tuple(from_json(Trial, step["trial"]) for step in steps if "trial" in step)
    row = next((from_json(BackendRow, step["row"]) for step in steps if "row" in step), None)
    if row is not None and any("done" in step for step in steps):
        return _finished(blank, row, trials)
    at = next((step["step"] for step in reversed(steps) if "step" in step), "starting Python")
    dist = owner.dist.metadata["Name"] if owner.dist is not None else owner.value
    reason = crash_refusal(owner.name, dist, f"{ended.told} while {at}", last_words)
    return replace(blank, refusals=(reason,), kernels=row.kernels if row else (), trials=trials, signal=ended.signal)


def crash_refusal(backend: str, distribution: str, end: str, last_words: str = "") -> Refusal:
    """The reason of a backend whose process ended, in the words of ``end``."""
    found = end + (f"; its last words: {last_words}" if last_words else "")
    fix = (
        f"pip install --force-reinstall --no-deps {distribution}, or pip uninstall {distribution}; hal probe --isolated --fresh tries again"
    )
    return Refusal("backend.crash", f"backend {backend!r} in a process of its own", found, fix)


def smoke_refusal(trial: Trial) -> Refusal:
    """The reason of a backend one of whose kernels failed its trial."""
    fix = f"leave {trial.kernel} out by a policy, and tell the backend's authors"
    return Refusal("backend.smoke", f"{trial.kernel} on a tiny problem", trial.detail, fix)


def _finished(blank: Verdict, row: BackendRow, trials: tuple[Trial, ...]) -> Verdict:
    reasons = tuple(smoke_refusal(trial) for trial in trials if trial.outcome == "failed")
    status = "failed" if reasons else row.status
    return replace(blank, status=status, refusals=(*row.refusals, *reasons), kernels=row.kernels, trials=trials)


@dataclass(frozen=True)
class _End:
    told: str
    signal: str = ""


def _run(entry_point: metadata.EntryPoint, events: Path, limit_s: float) -> tuple[_End, str]:
    """The child's end, and the last line of its standard error."""
    dist = entry_point.dist
    job = {
        "path": sys.path, "name": entry_point.name, "value": entry_point.value, "events": str(events),
        "distribution": dist.metadata["Name"] if dist is not None else None,
    }  # fmt: skip
    # sys.path is the parent's, and nothing of the working folder comes before it.
    code = (
        "import sys; sys.path[:] = filter(None, sys.path); import json; job = json.loads(sys.argv[1]); sys.path[:] = job['path']; "
        "from hal_core.isolated import child; child(job)"
    )
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(job)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            code_or_signal = process.wait(timeout=limit_s)
            end = _end(code_or_signal)
        except subprocess.TimeoutExpired:
            end = _End(f"did not end within {limit_s:g} s")
        finally:
            _end_group(process)
        errors.seek(max(errors.seek(0, os.SEEK_END) - 4000, 0))
        lines = errors.read(4000).decode(errors="replace").splitlines()
    words = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return end, "".join(c for c in words if c.isprintable())[:200]


def _end(code: int) -> _End:
    if code >= 0:
        return _End(f"ended with exit code {code}")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    meaning = _DEATHS.get(name)
    # SIGKILL and the like come from outside and say nothing of the wheel.
    return _End(f"was ended by {name}" + (f" ({meaning})" if meaning else ""), name if meaning else "")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the child, and what it may have started in its own session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _events(path: Path) -> list[dict[str, Any]]:
    """Complete lines; the last may have been cut by the crash."""
    found = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                data = json.loads(line)
                found += [data] if isinstance(data, dict) else []
    return found


# In the child


def child(job: dict[str, Any]) -> None:
    """Import and try one backend; every step is written before it is taken. Ends the process."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with Path(job["events"]).open("a", encoding="utf-8", buffering=1) as events:

        def tell(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")

        _try(job, tell)
        tell(done=True)
    # Not through atexit and destructors: a hang there is no fault that matters, and the result is written.
    os._exit(0)


def _try(job: dict[str, Any], tell: Any) -> None:
    entry_point = _find(job)
    machine = Machine.detect()
    tell(step=f"importing {entry_point.value}")
    entry = next(iter(judged(machine, (entry_point,))[0]))
    row, kernels = loaded(entry, machine)
    tell(row=to_json(row))
    if row.status != "ready":
        return
    tell(step="importing torch")
    from hal_core.smoke import try_kernel

    for registered in kernels:
        tell(step=f"running {registered.name}")
        tell(trial=to_json(try_kernel(registered.name, registered.kernel, machine)))


def _find(job: dict[str, Any]) -> metadata.EntryPoint:
    for dist in metadata.distributions():
        with contextlib.suppress(Exception):  # metadata of strangers
            if dist.metadata["Name"] == job["distribution"]:
                for entry_point in dist.entry_points:
                    if (entry_point.group, entry_point.name, entry_point.value) == (GROUP, job["name"], job["value"]):
                        return entry_point
    return metadata.EntryPoint(job["name"], job["value"], GROUP)
