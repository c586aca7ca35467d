"""``hal facts``: this machine as a value, for selections made on another one; and the machines that are known without a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hal_core.cli.common import JSON, console, examples, print_json
from hal_core.outputs import check_output, whole_file

if TYPE_CHECKING:
    from hal_core.machine import Machine

__all__ = ["FACTS", "machine_of", "register"]

FACTS = Annotated[
    str | None,
    typer.Option(
        "--facts", help="Decide for another machine: a file of 'hal facts', or a stored name such as h200.", show_default="this one"
    ),
]


def machine_of(facts: str | None) -> Machine:
    """The machine of ``--facts``, with this process's software where the facts name none; this machine without the option."""
    from hal_core.machine import Machine

    local = Machine.detect()
    if facts is None:
        return local
    from hal_core.stored import load_facts, with_software

    return with_software(load_facts(facts), local)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(
        "facts", epilog=examples("hal facts > box.json", "hal facts --out box.json", "hal facts --facts mi300x", "hal facts --stored")
    )
    def facts_command(
        out: Annotated[Path | None, typer.Option("--out", help="Write the facts to this file.", show_default="standard output")] = None,
        facts: FACTS = None,
        stored: Annotated[bool, typer.Option("--stored", help="List the machines that --facts knows by name.")] = False,
        as_json: JSON = False,
    ) -> None:
        """Print the facts of this machine as JSON, each marked measured, reported or datasheet; ``--facts`` of any command reads them."""
        from hal_core.machine import Machine
        from hal_core.stored import load_facts

        if stored:
            _list(as_json)
            return
        machine = Machine.detect() if facts is None else load_facts(facts)
        if out is None:
            typer.echo(machine.dumps())
            return
        target = check_output(out)
        _check_replaced(target)
        write_facts(target, machine)
        if as_json:
            print_json({"out": str(out), "bytes": target.stat().st_size})
        else:
            console().print(f"wrote {out}: {'; '.join(map(str, machine.devices))}", markup=False)


def _check_replaced(target: Path) -> None:
    """An existing file is replaced only when it holds facts: anything else was named by mistake."""
    from hal_core.errors import OutputError, ValueDecodeError
    from hal_core.stored import load_facts

    if not target.exists() or target.stat().st_size == 0:
        return
    try:
        load_facts(str(target))
    except ValueDecodeError as error:
        raise OutputError(f"output {target}", "exists and holds no facts", "choose another name") from error


def _list(as_json: bool) -> None:
    from hal_core.stored import load_facts, stored_names

    machines = {name: load_facts(name) for name in stored_names()}
    if as_json:
        print_json({name: machine.to_json() for name, machine in machines.items()})
        return
    for name, machine in machines.items():
        marks = sorted({mark.mark.value for mark in machine.marks})
        console().print(f"{name:15} {'; '.join(map(str, machine.devices))} ({', '.join(marks)})", markup=False)


def write_facts(target: Path, machine: Machine) -> None:
    """The file holds one JSON object and ends with a newline."""
    with whole_file(target) as partial:
        partial.write_text(machine.dumps() + "\n", encoding="utf-8")
