"""What is here: the machine, every backend with its verdict, and what could be installed for what was seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hal_core.jsonable import JsonValue, dumps, loads, to_json
from hal_core.machine import Machine
from hal_core.manifest import INSTALL_HINTS
from hal_core.refusal import Refusal
from hal_core.registry import BackendRow
from hal_core.verdicts import Trial
from hal_core.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hal_core.registry import RegisteredKernel

__all__ = ["Probe", "probe_from", "rows_elsewhere"]


@dataclass(frozen=True)
class Probe:
    """hints: devices without a backend, and how to install one; what kernels call and do not find. trials: of an isolated probe."""

    hal_core: str
    machine: Machine
    backends: tuple[BackendRow, ...]
    hints: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> Probe:
        """Decode the JSON text that :meth:`dumps` wrote."""
        return loads(cls, text)

    def to_json(self) -> JsonValue:
        """Plain JSON types."""
        return to_json(self)

    def dumps(self, indent: int | None = 2) -> str:
        """JSON text."""
        return dumps(self, indent)

    def __str__(self) -> str:
        lines = [f"hal-core {self.hal_core}", "", str(self.machine), "", "backends"]
        width = max((len(row.name) for row in self.backends), default=0)
        for row in self.backends:
            kernels = ", ".join(name.partition(".")[2] for name in row.kernels) or ("no kernels" if row.loaded else "")
            lines.append(f"  {row.name:{width}}  {row.status:9}  {row.distribution} {row.version}  {kernels}".rstrip())
            tested = "" if row.manifest is None else row.manifest.tested
            lines += [f"  {'':{width}}  {line}" for line in (*[tested] * bool(tested), *row.remarks, *map(str, row.refusals))]
        lines += [f"tried: {trial}" for trial in self.trials]
        lines += [f"hint: {hint}" for hint in self.hints]
        return "\n".join(lines)


def probe_from(machine: Machine, rows: Sequence[BackendRow], kernels: Sequence[RegisteredKernel] = ()) -> Probe:
    """A probe of given facts and backends, and of the kernels that these registered."""
    named = {row.name for row in rows}
    seen = dict.fromkeys(device.kind for device in machine.devices)
    hints = []
    for kind in seen:
        if kind in INSTALL_HINTS and kind not in named:
            devices = [device for device in machine.devices if device.kind == kind]
            architectures, names = (
                ", ".join(dict.fromkeys(texts)) for texts in zip(*((d.architecture, d.name) for d in devices), strict=True)
            )
            hints.append(f"{architectures} seen ({names}), and no {kind} backend is installed: {INSTALL_HINTS[kind]}")
    for row in rows:
        if row.status == "ready":
            hints += [f"{row.name}: {lack}" for lack in _lacking(machine, [k for k in kernels if k.backend == row.name])]
    return Probe(__version__, machine, tuple(rows), tuple(hints))


def _lacking(machine: Machine, kernels: Sequence[RegisteredKernel]) -> tuple[str, ...]:
    """What is missing, each once with the kernels that call it."""
    found: dict[str, list[str]] = {}
    for k in kernels:
        try:
            reasons = [str(reason) for reason in k.kernel.lacks(machine)]
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            reasons = [f"lacks() raised {type(error).__name__}: {error}"]
        for reason in reasons:
            found.setdefault(reason, []).append(k.name.partition(".")[2])
    shown = {reason: names if len(names) < len(kernels) else ["every kernel"] for reason, names in found.items()}
    return tuple(f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: {r}" for r, names in shown.items())


def rows_elsewhere(machine: Machine, rows: Sequence[BackendRow], kernels: Sequence[RegisteredKernel]) -> tuple[BackendRow, ...]:
    """The table for a machine that is not this one: every backend that loads here, judged anew; the others keep their reasons."""
    out = []
    for row in rows:
        reasons = row.manifest.refusals(machine) if row.loaded and row.manifest is not None else ()
        if not row.loaded:
            out.append(row)
        elif reasons:
            out.append(replace(row, status="refused", refusals=reasons, remarks=()))
        else:
            served = {kind for k in kernels if k.backend == row.name for kind in k.kernel.devices}
            here = {device.kind for device in machine.devices}
            missing = Refusal(
                "backend.device", f"a {' or '.join(sorted(served))} device", f"devices: {', '.join(sorted(here))}", "choose another box"
            )
            ready = bool(served & {*here, "any"})
            out.append(replace(row, status="ready" if ready else "no_device", refusals=() if ready else (missing,), remarks=()))
    return tuple(out)
