"""``hal verify``: the conformance kit on installed backends."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hal_core.cli.common import JSON, console, examples, print_json
from hal_core.outputs import check_output

if TYPE_CHECKING:
    from hal_core.testing.kit import Kit, Report

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("verify", epilog=examples("hal verify", "hal verify cpu --full", "hal verify --markdown docs/support-matrix.md"))
    def verify_command(
        backends: Annotated[
            list[str] | None, typer.Argument(metavar="[BACKEND]...", help="Backends to verify.", show_default="all installed")
        ] = None,
        full: Annotated[bool, typer.Option("--full", help="Ten times the cases: minutes instead of seconds.")] = False,
        seed: Annotated[
            int | None, typer.Option(min=0, max=2**31 - 1, help="Seed of random weights and inputs.", show_default="a new one each time")
        ] = None,
        markdown: Annotated[Path | None, typer.Option(help="Write the support matrix to this file.", show_default=False)] = None,
        expect: Annotated[
            Path | None, typer.Option(help="JSON lists of unsupported cases and expected failures.", show_default="the wheel's own")
        ] = None,
        as_json: JSON = False,
    ) -> None:
        """Check that kernels are what they declare: numbers, refusals, memory, layouts, threads, compilation. Exit code 1 if one is not."""
        from hal_core.testing.kit import kit_of
        from hal_core.testing.writers import as_json as json_of
        from hal_core.testing.writers import print_report, write

        target = check_output(markdown) if markdown is not None else None
        kit = _with_expectations(kit_of(tuple(backends or ()), full=full), expect)
        report = _run(kit, secrets.randbelow(1 << 31) if seed is None else seed, quiet=as_json)
        if target is not None:
            write(report, target)
        if as_json:
            print_json(json_of(report))
        else:
            print_report(report, console())
            console().print(_last_line(report), markup=False)
        if not report.good:
            raise typer.Exit(1)


def _with_expectations(kit: Kit, path: Path | None) -> Kit:
    """The lists of a file are added to those that the wheels carry."""
    if path is None:
        return kit
    from hal_core.testing.expectations import Expectations

    extra = Expectations.parse(path.read_text(encoding="utf-8"))
    return replace(kit, expected={name: expected.merged(extra) for name, expected in kit.expected.items()})


def _run(kit: Kit, seed: int, quiet: bool) -> Report:
    if quiet:
        return kit.run(seed)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("verifying", total=len(kit.cases()))
        return kit.run(seed, lambda result: bar.update(task, advance=1, description=result.kernel))


def _last_line(report: Report) -> str:
    from hal_core.testing.case import Status

    counts = ", ".join(f"{report.count(status)} {status.value}" for status in Status if report.count(status))
    verdict = "conforms" if report.good else "does NOT conform"
    names = ", ".join(sorted({plan.name.partition(".")[0] for plan in report.plans}))
    return f"{names} {verdict}: {counts}; seed {report.seed}"
