"""A report as JSON, as Markdown, and as rich tables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hal_core.jsonable import to_json
from hal_core.testing.case import CHECKS, Status
from hal_core.testing.matrix import FAILS, tables_of

if TYPE_CHECKING:
    from rich.console import Console

    from hal_core.testing.kit import Report
    from hal_core.testing.matrix import Table

__all__ = ["as_json", "as_markdown", "print_report", "write"]

_HEAD = """\
# Support matrix

What each kernel of this repository serves, as the conformance kit measured it. `hal verify --markdown docs/support-matrix.md` writes
this page. [Conformance](conformance.md) tells what the checks mean, and how to run them on a backend of your own.

*yes*: specs that use it were computed within the error bound. *no*: not declared, and such specs are refused with a reason. *declared*:
not tried, because this machine lacks the device or the kit has no input for it. Errors are relative L2 against float64, rounded up to
one digit.
"""


def as_json(report: Report) -> dict[str, Any]:
    """Everything, as plain JSON types."""
    return {
        "seed": report.seed,
        "profile": "full" if report.full else "quick",
        "good": report.good,
        "machine": report.plans[0].machine.to_json() if report.plans else None,
        "counts": {status.value: report.count(status) for status in Status},
        "stale": list(report.stale),
        "broken": list(report.broken),
        "left_out": list(report.left_out),
        "matrix": [to_json(table) for table in tables_of(report)],
        "results": [to_json(result) for result in report.results],
    }


def as_markdown(report: Report) -> str:
    """The page ``docs/support-matrix.md``."""
    parts = [_HEAD, f"Machine: {_machine(report)}. Profile: {'full' if report.full else 'quick'}, seed {report.seed}.\n"]
    for table in tables_of(report):
        heading = f"## {table.title}\n\n" if table.name == "served" else f"### {table.title}: checks\n\n"
        parts.append(heading + _markdown_table(table))
    if report.failures:
        parts.append("## Failures\n\n" + "".join(f"- `{r.case}`: {r.reason}\n" for r in report.failures))
    return "\n".join(parts)


def _machine(report: Report) -> str:
    if not report.plans:
        return "none"
    machine = report.plans[0].machine
    return f"{', '.join(sorted({device.kind for device in machine.devices}))} with {', '.join(machine.isa) or 'no known ISA'}"


def _markdown_table(table: Table) -> str:
    lines = [f"| | {' | '.join(f'`{column}`' for column in table.columns)} |", f"|---|{'---|' * len(table.columns)}"]
    lines += [f"| {label} | {' | '.join(cells)} |" for label, cells in table.rows]
    return "\n".join(lines) + "\n"


def print_report(report: Report, out: Console) -> None:
    """Tables, then every failure with its reason."""
    from rich.table import Table as RichTable
    from rich.text import Text

    for table in tables_of(report):
        shown = RichTable(title=f"{table.title}: {table.name}", title_justify="left")
        shown.add_column("")
        for column in table.columns:
            shown.add_column(column, overflow="fold")
        for label, cells in table.rows:
            if any(cell != "–" for cell in cells):
                shown.add_row(label, *(Text(cell, style=_style(cell)) for cell in cells))
        out.print(shown)
    for result in report.failures:
        out.print(Text(f"{result.status.value}: {result.case}", style="red"))
        out.print(Text(f"  {result.reason}"))
        out.print(Text(f"  {CHECKS[result.check]}", style="dim"))
    for backend in report.broken:
        out.print(Text(f"broken: {backend}", style="red"))
    for backend in report.left_out:
        out.print(Text(f"left out: {backend}", style="yellow"))
    for entry in report.stale:
        out.print(Text(f"stale: no case matches {entry!r}; take it off the list", style="red"))


def _style(cell: str) -> str:
    if cell == FAILS or Status.FAILED.value in cell or "stale" in cell:
        return "red"
    return {"yes": "green", "no": "dim", "declared": "yellow"}.get(cell, "")


def write(report: Report, path: Any) -> None:
    """To a file: Markdown if its name says so, JSON otherwise."""
    text = as_markdown(report) if str(path).endswith(".md") else json.dumps(as_json(report), indent=2, allow_nan=False) + "\n"
    path.write_text(text, encoding="utf-8")
