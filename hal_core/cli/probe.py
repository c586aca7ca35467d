"""``hal probe``: what is on this machine, which backends fit it, and why others do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from hal_core.cli.common import JSON, console, examples, human_bytes, print_json

if TYPE_CHECKING:
    import typer

    from hal_core.probe import Probe

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("probe", epilog=examples("hal probe", "hal probe --json > probe.json"))
    def probe_command(as_json: JSON = False) -> None:
        """Show devices, usable instruction sets, and every installed backend with its kernels or its refusals."""
        from hal_core.api import probe
        from hal_core.jsonable import to_json

        found = probe()
        if as_json:
            print_json(to_json(found))
        else:
            _print(found)


def _print(found: Probe) -> None:
    out = console()
    devices = Table(title="Devices", title_justify="left")
    for header in ("kind", "vendor", "architecture", "name", "units", "memory"):
        devices.add_column(header)
    for d in found.machine.devices:
        memory = human_bytes(d.memory_bytes) if d.memory_bytes else "?"
        devices.add_row(d.kind, d.vendor, d.architecture, d.name, str(d.units or "?"), memory)
    out.print(devices)
    out.print(Text("Usable instruction sets: ").append(", ".join(found.machine.isa) or "none known", style="cyan"))
    backends = Table(title="Backends", title_justify="left", show_lines=True)
    for header in ("backend", "wheel", "status", "kernels or reasons"):
        backends.add_column(header, overflow="fold")
    for row in found.backends:
        style = "green" if not row.refusals else "red"
        detail = "\n".join(map(str, row.refusals)) or ", ".join(kernel.partition(".")[2] for kernel in row.kernels)
        backends.add_row(row.name, f"{row.distribution} {row.version}", Text(row.status, style=style), Text(detail))
    out.print(backends)
