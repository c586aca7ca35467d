"""A roofline of a report: what the machine allows, and where each contestant lies under it. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal_core.errors import MissingDependencyError, OutputError

if TYPE_CHECKING:
    from hal_core.bench.report import Report, Row

__all__ = ["check_plot", "figure_of", "write_plot"]

_SUFFIXES = (".png", ".svg", ".pdf")
_MARKERS = "osD^vP*Xh<>p"


def check_plot(target: Path) -> None:
    """Refuse what could not be drawn, before anything is measured.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OutputError: the name's ending is of no known kind of picture.
    """
    if target.suffix.lower() not in _SUFFIXES:
        raise OutputError(f"--plot {target}", f"no picture of kind {target.suffix or 'none'}", f"end its name in {', '.join(_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("--plot", "matplotlib is not installed", "pip install 'hal-core[plot]'")


def write_plot(report: Report, target: Path) -> None:
    """Draw the report and write the picture."""
    figure_of(report).savefig(target, dpi=150)


def figure_of(report: Report) -> Any:
    """Operations for each byte of weights against operations per second, both logarithmic; a colour for each contestant."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    points = [(_intensity(row), row.operations / row.seconds.median) for row in report.rows]
    if points:
        low, high = min(x for x, _ in points) / 2, max(x for x, _ in points) * 2
        top = _roof(axes, report, low, high)
        axes.set_xlim(low, high)
        axes.set_ylim(min(y for _, y in points) / 2, 2 * max([top, *(y for _, y in points)]))
    for index, name in enumerate(dict.fromkeys(row.name for row in report.rows)):
        rows = [row for row in report.rows if row.name == name]
        x, y = [_intensity(row) for row in rows], [row.operations / row.seconds.median for row in rows]
        filled = rows[0].role == "kernel"
        marker, line = _MARKERS[index % len(_MARKERS)], "-" if filled else ":"
        axes.plot(x, y, label=name, fillstyle="full" if filled else "none", marker=marker, linestyle=line, markersize=7)
    for m in dict.fromkeys(row.m for row in report.rows):
        fastest = max((row for row in report.rows if row.m == m), key=lambda row: row.operations / row.seconds.median)
        at = (_intensity(fastest), fastest.operations / fastest.seconds.median)
        axes.annotate(f"M = {m}", at, textcoords="offset points", xytext=(0, 7), ha="center", fontsize=8)
    axes.set_xlabel("operations for each byte of packed weights")
    axes.set_ylabel("operations per second")
    axes.set_title(f"{report.spec}\n{report.device}, {report.threads} threads, {report.date}", fontsize=9)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=7, loc="best")
    return figure


def _intensity(row: Row) -> float:
    return row.operations / row.bytes_read


def _roof(axes: Any, report: Report, low: float, high: float) -> float:
    """The limits' means over all batch sizes: a slope for reading, a level for each kind of arithmetic. Returns the highest level."""
    best: dict[str, list[float]] = {}
    names: dict[str, str] = {}
    for m in dict.fromkeys(c.m for c in report.ceilings):
        for kind in dict.fromkeys(c.kind for c in report.ceilings):
            top = report.best(m, kind)
            if top is not None:
                best.setdefault(kind, []).append(top.per_second.median)
                names[kind] = top.name
    read = best.pop("read", None)
    levels = {kind: sum(found) / len(found) for kind, found in best.items()}
    for kind, level in levels.items():
        axes.axhline(level, color="0.35", linewidth=1, linestyle="--" if kind == "float" else "-")
        axes.annotate(f"{kind}: {names[kind]}, {level / 1e12:.2f} TOP/s", (high, level), ha="right", va="bottom", fontsize=7, color="0.35")
    if read is not None:
        slope = sum(read) / len(read)
        axes.plot([low, high], [low * slope, high * slope], color="0.35", linewidth=1)
        text = f"{names['read']}, {slope / 1e9:.1f} GB/s"
        axes.annotate(text, (low, low * slope), textcoords="offset points", xytext=(6, 2), va="top", fontsize=7, color="0.35")
    return max(levels.values(), default=0.0)
