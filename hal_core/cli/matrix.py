"""``hal matrix``: what a backend can run, as the rows of a build matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from hal_core.cli.common import JSON, console, examples, print_json
from hal_core.errors import ValueDecodeError
from hal_core.outputs import check_output, whole_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hal_core.coverage import Coverage
    from hal_core.matrix import MatrixRow
    from hal_core.registry import BackendRow

__all__ = ["register"]

#: A full run of every backend of this repository is a tenth of it.
_MOST_BYTES = 1 << 28
_EXAMPLES = examples(
    "hal matrix --vendor cpu",
    "hal matrix --vendor rocm --torch 2.13 --python 3.12 --json",
    "hal matrix --vendor cuda --add verify.json --out hal_coverage.json",
)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("matrix", epilog=_EXAMPLES)
    def matrix_command(
        vendor: Annotated[str, typer.Option(help="The backend: cpu, cuda, xpu, rocm, or another one's name.", show_default=False)],
        architecture: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.", show_default="all")] = None,
        torch: Annotated[list[str] | None, typer.Option(help="Only this release of torch; may be repeated.", show_default="all")] = None,
        python: Annotated[list[str] | None, typer.Option(help="Only this release of Python; may be repeated.", show_default="all")] = None,
        add: Annotated[
            list[Path] | None, typer.Option(help="Add what hal verify --json found on a machine; may be repeated.", show_default=False)
        ] = None,
        out: Annotated[Path | None, typer.Option(help="With --add: write the wheel's hal_coverage.json.", show_default=False)] = None,
        as_json: JSON = False,
    ) -> None:
        """Show architecture, torch and Python, and which kernels ran, failed, were interpreted, compiled, bound or never tried there."""
        from hal_core.machine import Machine
        from hal_core.matrix import coverage_of, matrix_of, narrowed, vendor_row
        from hal_core.registry import default_registry

        target = check_output(out) if out is not None else None
        if target is not None and not add:
            raise ValueDecodeError("hal matrix --out", "without --add", "give the results to add; --json prints the rows")
        registry = default_registry()
        row = vendor_row(vendor, registry.rows())
        coverage = _added(coverage_of(row, Machine.detect()), row, add or ())
        rows = narrowed(matrix_of(row, coverage, registry.kernels()), architecture or (), torch or (), python or ())
        if target is not None:
            with whole_file(target) as partial:
                partial.write_text(coverage.dumps() + "\n", encoding="utf-8")
        _show(rows, as_json)


def _added(coverage: Coverage, row: BackendRow, paths: Sequence[Path]) -> Coverage:
    from hal_core.matrix import with_results
    from hal_core.reading import read_small_text

    for path in paths:
        text = read_small_text(path, _MOST_BYTES, f"results {path}")
        try:
            results = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueDecodeError(f"results {path}", "not JSON", "give what hal verify --json printed") from error
        coverage = with_results(coverage, row, results)
    return coverage


def _show(rows: Sequence[MatrixRow], as_json: bool) -> None:
    from hal_core.jsonable import to_json

    if as_json:
        print_json({"include": to_json(tuple(rows))})
        return
    table = Table(title=f"What {rows[0].vendor} can run" if rows else "No rows", title_justify="left", show_lines=True)
    for header in ("architecture", "torch x Python", "ran", "failed", "interpreted", "compiled", "bound", "untried"):
        table.add_column(header, overflow="fold")
    for (name, *cells), pairs in _merged(rows).items():
        table.add_row(name, Text(pairs), *(Text(", ".join(cell)) for cell in cells))
    console().print(table)


def _merged(rows: Sequence[MatrixRow]) -> dict[tuple[str, ...], str]:
    """Rows that say the same of one architecture, with all their pairs of releases."""
    pairs: dict[tuple[object, ...], dict[str, list[str]]] = {}
    for r in rows:
        key = (r.architecture, r.ran, r.failed, r.interpreted, r.compiled, r.bound, r.untried)
        pairs.setdefault(key, {}).setdefault(r.torch, []).append(r.python)
    return {key: "\n".join(f"{torch} x {', '.join(pythons)}" for torch, pythons in found.items()) for key, found in pairs.items()}  # type: ignore[misc]
