"""Who takes part: the kernels that accept the spec, the peers that are asked for, and the machine's limits."""

from __future__ import annotations

import datetime as dt
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hal_core.api import candidates, select
from hal_core.bench.contestants import Contestant, KernelContestant
from hal_core.bench.peers import PeerContestant, find_peers, peer_entries
from hal_core.bench.probes import ceilings_of
from hal_core.bench.problem import Problem, threads_of
from hal_core.bench.report import SCHEMA, Absence, Report
from hal_core.bench.run import Plan, measure
from hal_core.bench.timer import timer_of
from hal_core.errors import SettingError
from hal_core.machine import Machine, Version
from hal_core.policy import PolicyRule
from hal_core.registry import REFERENCE, default_registry
from hal_core.testing.bench import torch_device
from hal_core.version import __version__

if TYPE_CHECKING:
    from hal_core.registry import RegisteredKernel
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["Options", "bench"]

_SLOW = "the definition, slow on purpose; --policy require:reference times it"
#: Of the memory that is free, what copies of weights may take.
_SHARE = 0.6
#: Parts of the names of kernels, with globs.
_IN_NAMES = re.compile(r"[A-Za-z0-9_*?]+\Z")
#: More copies than this are small enough to be of no use beside each other.
_MOST_COPIES = 64


@dataclass(frozen=True)
class Options:
    """What ``hal bench`` was asked. kernels: ``all`` that accept, or the one ``selected``. rotate: bytes that copies of weights fill."""

    shape: str
    spec: LinearSpec | MoESpec
    plan: Plan
    policy: str | None = None
    kernels: str = "all"
    against: tuple[str, ...] = ()
    peers: Path | None = None
    threads: int | None = None
    rotate: int = 512 << 20
    outliers: bool = False
    ceilings: bool = True
    command: str = ""


def bench(options: Options, progress: Callable[[str], None] = lambda _: None) -> Report:
    """Run the benchmark.

    Raises:
        NoKernelError, PolicyError: nothing may serve the spec under the policy.
        SettingError: a peer of that name is not known, or the memory does not suffice.
    """
    chosen, absent = _kernels(options)
    device = torch_device(chosen[0].kernel)
    rivals, others = _rivals(options, device)
    entries, missing = _peers(options, others)
    absent += missing
    chosen = [kernel for kernel in chosen if kernel not in rivals]
    timer = timer_of(device)
    with threads_of(options.threads) as threads, _scratch(bool(entries)) as folder:
        progress("making weights")
        problem = Problem(options.spec, options.plan.seed, outliers=options.outliers)
        plan = replace(options.plan, copies=_copies(problem, options, len(chosen) + len(rivals) + len(entries), device))
        peers = [PeerContestant(entry, threads, folder) for entry in entries]
        limits = ceilings_of(device, timer, options.spec.dtype) if options.ceilings else []
        contestants: list[tuple[str, Contestant]] = [(k.name, KernelContestant(k, device, timer, "peer")) for k in rivals]
        contestants += [(peer.name, peer) for peer in peers]
        contestants += [(k.name, KernelContestant(k, device, timer)) for k in chosen]
        contestants += [(limit.name, limit) for limit in limits]
        found = measure(problem, contestants, plan, timer, progress)
        versions = _versions() + tuple(Version(f"{p.name}: {name}", v) for p in peers for name, v in p.versions.items())
    return Report(
        SCHEMA, options.command, dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"), Machine.detect(), versions,
        options.shape, options.spec, str(device), timer.name, threads, plan.rounds, plan.seed, options.outliers, plan.copies,
        found.rows, found.ceilings, (*absent, *found.absent),
    )  # fmt: skip


def _kernels(options: Options) -> tuple[list[RegisteredKernel], list[Absence]]:
    """The kernels to time, all of one device; and the others with their reasons."""
    selection = select(options.spec, policy=options.policy)
    judged = candidates(options.spec, policy=options.policy)
    accepted = list(selection.kernels) if options.kernels == "selected" else [c.kernel for c in judged if c.accepted]
    # The reference takes part only where it is what the policy chooses.
    slow = [name for name in accepted if name.startswith(f"{REFERENCE}.") and name not in selection.kernels]
    by_name = {k.name: k for k in default_registry().kernels()}
    device = torch_device(by_name[selection.kernel].kernel)
    other = [name for name in accepted if name not in slow and torch_device(by_name[name].kernel) != device]
    absent = [Absence(c.kernel, "; ".join(map(str, c.refusals)), refused=True) for c in judged if not c.accepted]
    absent += [Absence(name, _SLOW, refused=True) for name in slow]
    absent += [Absence(name, f"runs on another device than {selection.kernel}: require it with --policy", refused=True) for name in other]
    return [by_name[name] for name in accepted if name not in slow and name not in other], absent


def _rivals(options: Options, device: torch.device) -> tuple[list[RegisteredKernel], tuple[str, ...]]:
    """The kernels of ``--against`` that accept the spec, by name, backend or glob; and the names that are of no kernel.

    Raises:
        SettingError: kernels that refuse the spec, or that run on another device than the others.
    """
    registered = default_registry().kernels()
    found: list[RegisteredKernel] = []
    others: list[str] = []
    for name in options.against:
        meant = [k for k in registered if PolicyRule(name).matches(k.name)] if all(map(_IN_NAMES.match, name.split("."))) else []
        if not meant:
            others.append(name)
            continue
        accepted = {c.kernel for c in candidates(options.spec, policy=f"require:{name}") if c.accepted}
        able = [k for k in meant if k.name in accepted and torch_device(k.kernel) == device]
        if not able:
            fix = f"hal explain --policy require:{name} says why"
            raise SettingError(f"--against {name}", f"none of its kernels serves {options.spec} on {device}", fix)
        found += [k for k in able if k not in found]
    return found, tuple(others)


def _peers(options: Options, against: tuple[str, ...]) -> tuple[list[Any], list[Absence]]:
    if not against:
        return [], []
    folder = find_peers(options.peers)
    if folder is None:
        reason = "no runners here: start hal in a checkout, or give its benchmarks/peers with --peers"
        return [], [Absence(name, reason) for name in against]
    entries = peer_entries(folder)
    unknown = [name for name in against if name not in entries]
    if unknown:
        raise SettingError(f"--against {','.join(unknown)}", "no such peer", f"known: {', '.join(entries)}")
    return [entries[name] for name in against], []


@contextmanager
def _scratch(wanted: bool) -> Iterator[Path]:
    """A folder for the files that pass between this process and the peers."""
    if not wanted:
        yield Path()
        return
    with tempfile.TemporaryDirectory(prefix="hal-bench-") as name:
        yield Path(name)


def _copies(problem: Problem, options: Options, contestants: int, device: torch.device) -> int:
    """How often each contestant holds the weights: enough to fill ``rotate`` bytes, and no more than fits into memory."""
    one = sum(part.nbytes for part in problem.parts.values())
    wanted = max(1, min(_MOST_COPIES, -(-options.rotate // one)))
    free = _free_bytes(device)
    if free is None:
        return wanted
    fits = int(free * _SHARE // (one * max(1, contestants)))
    if fits < 1:
        needs = f"{contestants} contestants hold {one / 1e9:.1f} GB each, {free / 1e9:.1f} GB are free"
        raise SettingError(f"--shape {options.shape}", needs, "time fewer at once (--kernels selected, --against), or give a smaller shape")
    return min(wanted, fits)


def _free_bytes(device: torch.device) -> int | None:
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _versions() -> tuple[Version, ...]:
    rows = default_registry().rows()
    own = [Version("hal-core", __version__), Version("torch", torch.__version__)]
    return (*own, *(Version(row.distribution, row.version) for row in rows if row.name != REFERENCE and row.version))
