"""``hal probe``: what is on this machine, which backends fit it, and why others do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from hal_core.cli.common import JSON, console, examples, human_bytes, print_json
from hal_core.cli.facts import FACTS, machine_of
from hal_core.errors import SettingError

if TYPE_CHECKING:
    from hal_core.machine import Machine
    from hal_core.probe import Probe

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("probe", epilog=examples("hal probe", "hal probe --isolated", "hal probe --facts mi300x", "hal probe --json > probe.json"))
    def probe_command(
        facts: FACTS = None,
        isolated: Annotated[bool, typer.Option("--isolated", help="Import and try each backend in a process of its own.")] = False,
        limit: Annotated[float, typer.Option("--limit", help="Seconds for each backend of --isolated.")] = 120.0,
        fresh: Annotated[bool, typer.Option("--fresh", help="With --isolated: try again what is remembered.")] = False,
        as_json: JSON = False,
    ) -> None:
        """Show devices, usable instruction sets, and every installed backend with its kernels or its refusals."""
        from hal_core.jsonable import to_json

        if isolated and facts is not None:
            raise SettingError("hal probe", "--isolated with --facts", "a backend can be tried on this machine only")
        found = _isolated(limit, fresh) if isolated else _probe(machine_of(facts), facts)
        if as_json:
            print_json(to_json(found))
        else:
            _print(found)


def _probe(machine: Machine, facts: str | None) -> Probe:
    from hal_core.probe import probe_from, rows_elsewhere
    from hal_core.registry import default_registry

    registry = default_registry()
    rows, kernels = registry.rows(), registry.kernels()
    return probe_from(machine, rows if facts is None else rows_elsewhere(machine, rows, kernels), kernels)


def _isolated(limit: float, fresh: bool) -> Probe:
    from hal_core.isolated import isolated_probe

    return isolated_probe(limit, fresh=fresh)


def _print(found: Probe) -> None:
    out = console()
    devices = Table(title="Devices", title_justify="left")
    for header in ("kind", "vendor", "architecture", "name", "units", "memory"):
        devices.add_column(header)
    for d in found.machine.devices:
        memory = human_bytes(d.memory_bytes) if d.memory_bytes else "?"
        devices.add_row(d.kind, d.vendor, d.architecture, Text(d.name), str(d.units or "?"), memory)
    out.print(devices)
    if str(found.machine.processor):
        out.print(Text(f"Processor: {found.machine.processor}"))
    out.print(Text("Usable instruction sets: ").append(", ".join(found.machine.isa) or "none known", style="cyan"))
    for denied in found.machine.denied:
        out.print(Text(f"Not usable: {denied.name}: {denied.reason}; {denied.fix}", style="yellow"))
    backends = Table(title="Backends", title_justify="left", show_lines=True)
    for header in ("backend", "wheel", "status", "kernels or reasons"):
        backends.add_column(header, overflow="fold")
    for row in found.backends:
        style = "green" if not row.refusals else "red"
        detail = "\n".join(map(str, row.refusals)) or ", ".join(kernel.partition(".")[2] for kernel in row.kernels)
        remarks = [row.manifest.tested] if row.manifest is not None and row.manifest.tested else []
        status = Text(row.status, style=style).append("".join(f"\n{line}" for line in (*remarks, *row.remarks)), style="yellow")
        backends.add_row(row.name, f"{row.distribution} {row.version}", status, Text(detail))
    out.print(backends)
    _print_trials(found)
    for hint in found.hints:
        out.print(Text(f"hint: {hint}", style="yellow"))


def _print_trials(found: Probe) -> None:
    if not found.trials:
        return
    table = Table(title="Tried in processes of their own", title_justify="left")
    for header in ("kernel", "outcome", "error", "problem or reason"):
        table.add_column(header, overflow="fold")
    styles = {"passed": "green", "failed": "red"}
    for trial in found.trials:
        error = "" if trial.error is None else f"{trial.error:.1e}"
        table.add_row(trial.kernel, Text(trial.outcome, style=styles.get(trial.outcome, "yellow")), error, Text(trial.detail))
    console().print(table)
