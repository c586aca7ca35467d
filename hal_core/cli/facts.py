"""``hal facts``: this machine as a value, for selections made on another one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hal_core.cli.common import JSON, check_output, console, examples, print_json

if TYPE_CHECKING:
    from hal_core.machine import Machine

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("facts", epilog=examples("hal facts > box.json", "hal facts --out box.json"))
    def facts_command(
        out: Annotated[Path | None, typer.Option("--out", help="Write the facts to this file.", show_default="standard output")] = None,
        as_json: JSON = False,
    ) -> None:
        """Print the facts of this machine as JSON, each marked measured, reported or datasheet."""
        from hal_core.machine import Machine

        machine = Machine.detect()
        if out is None:
            typer.echo(machine.dumps())
            return
        target = check_output(out)
        write_facts(target, machine)
        if as_json:
            print_json({"out": str(target), "bytes": target.stat().st_size})
        else:
            console().print(f"wrote {target}: {'; '.join(map(str, machine.devices))}", markup=False)


def write_facts(target: Path, machine: Machine) -> None:
    """The file holds one JSON object and ends with a newline."""
    target.write_text(machine.dumps() + "\n", encoding="utf-8")
