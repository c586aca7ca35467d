"""The report for a terminal: one table for each batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

    from hal_core.bench.report import Ceiling, Report, Row

__all__ = ["print_report"]

#: Of the calls; from here on medians say little.
_BUSY = 0.25
_UNIT = {"read": ("GB/s", 1e9)}


def print_report(report: Report, out: Console, *, verbose: bool) -> None:
    """Tables, ceilings, and a line for everybody who is missing; refused kernels only if ``verbose``."""
    out.print(Text(f"{report.spec}", style="bold"))
    out.print(Text(_setting(report)))
    for m in dict.fromkeys(row.m for row in report.rows):
        out.print(_table(report, m))
        limits = [c for c in report.ceilings if c.m == m]
        if limits:
            out.print(Text("limits in the same turns: " + ", ".join(map(_limit, limits))))
    share = _disturbed(report)
    if share is not None and share > _BUSY:
        out.print(
            Text(f"{share:.0%} of the calls lost their processor to other programs: run it again on a quieter machine", style="yellow")
        )
    for line in report.absent:
        if verbose or not line.refused:
            at = "" if line.m is None else f" at M = {line.m}"
            out.print(Text(f"{line.name}{at}: {line.reason}", style="yellow"))
    hidden = len({line.name for line in report.absent if line.refused})
    if hidden and not verbose:
        out.print(Text(f"{hidden} more kernels did not take part; --verbose says why"))


def _disturbed(report: Report) -> float | None:
    """Share of the calls during which the system took a processor away; None where that is not known."""
    known = [row.seconds for row in report.rows if row.seconds.undisturbed is not None]
    calls = sum(s.samples for s in known)
    return None if not calls else 1 - sum(s.undisturbed or 0 for s in known) / calls


def _setting(report: Report) -> str:
    cpu = next((device.name for device in report.machine.devices if device.kind == "cpu"), "?")
    inputs = "1 % of the inputs are outliers of 20 sigma" if report.outliers else "Gaussian inputs"
    software = ", ".join(f"{v.name} {v.version}" for v in report.versions)
    return (
        f"{report.device} ({cpu}), {report.threads} threads, {report.timer}; {report.rounds} rounds, {report.copies} copies of the weights "
        f"in turn; {inputs}, seed {report.seed}; {software}; {report.date}"
    )


def _limit(ceiling: Ceiling) -> str:
    unit, scale = _UNIT.get(ceiling.kind, ("TOP/s", 1e12))
    rate = ceiling.per_second
    return f"{ceiling.name} {rate.median / scale:.3g} {unit} ({rate.lower / scale:.3g} to {rate.upper / scale:.3g})"


def _table(report: Report, m: int) -> Table:
    table = Table(title=f"M = {m}", title_justify="left")
    rows = [row for row in report.rows if row.m == m]
    peers = any(row.role == "peer" for row in rows)
    headers = ["contestant", "computes", "ms", "least", "quartiles", "SNR", "cosine", "max error", "bits", "rate", "of limit"]
    headers += ["x first peer", "x best peer"] if peers else []
    for header in headers:
        table.add_column(header, overflow="fold", justify="left" if header in headers[:2] else "right")
    fastest = min(row.seconds.median for row in rows)
    for row in rows:
        style = "bold" if row.seconds.median == fastest else "cyan" if row.role == "peer" else ""
        table.add_row(*_cells(row, bound_by_memory(report, row), peers), style=style)
    return table


def bound_by_memory(report: Report, row: Row) -> bool:
    """Whether reading the weights takes longer than the products, by the limits of this run; small batches where it has none."""
    read, peak = report.best(row.m, "read"), report.best(row.m, row.kind)
    if read is None or peak is None:
        return row.m <= 16
    return row.bytes_read / read.per_second.median > row.operations / peak.per_second.median


def _cells(row: Row, memory: bool, peers: bool) -> list[str]:
    s = row.seconds
    rate = f"{row.gb_per_s:.1f} GB/s" if memory else f"{row.tera_per_s:.3f} TOP/s"
    share = row.of_read if memory else row.of_peak
    cells = [
        row.name, row.numerics.partition(",deterministic")[0], _ms(s.median), _ms(s.least), f"{_ms(s.lower)}-{_ms(s.upper)}",
        "-" if row.snr_db is None else f"{row.snr_db:.1f} dB", "-" if row.cosine is None else f"{row.cosine:.5f}",
        "-" if row.largest_error is None else f"{row.largest_error:.2g}", f"{row.bits_per_weight:.2f}", rate,
        "-" if share is None else f"{share:.0%} of {'reading' if memory else row.kind}",
    ]  # fmt: skip
    ratios = (row.times_first_peer, row.times_best_peer)
    return cells + ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios] if peers else cells


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"
