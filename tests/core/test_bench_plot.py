"""The roofline of `hal bench --plot`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hal_core.bench.plot import check_plot, write_plot
from hal_core.cli.main import app_main
from hal_core.errors import MissingDependencyError, OutputError

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
LITTLE = ("--shape", "64,96", "--scheme", "int4:g32", "--rounds", "1", "--rotate", "0", "--policy", "require:reference")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"hal-core\[plot\]"):
        check_plot(Path("roofline.png"))


@pytest.mark.parametrize("name", ["roofline", "roofline.txt", "roofline.png.gz"])
def test_only_pictures_are_drawn(name):
    with pytest.raises(OutputError, match="no picture"):
        check_plot(Path(name))


@needs_matplotlib
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_file_is_a_picture(tmp_path, suffix, capsys):
    target = tmp_path / f"roofline.{suffix}"
    with pytest.raises(SystemExit) as stop:
        app_main(["bench", "linear", *LITTLE, "--m", "1,8", "--plot", str(target)])
    assert not stop.value.code, capsys.readouterr().err
    head = target.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in target.read_bytes()[:2000]
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


@needs_matplotlib
def test_a_report_without_rows_or_limits_is_drawn_too(tmp_path):
    from hal_core.bench.lineup import Options, bench
    from hal_core.bench.run import Plan
    from hal_core.bench.shapes import matrix_shape
    from hal_core.numerics import Numerics
    from hal_core.schemes import WeightScheme

    spec = matrix_shape("64,96").spec(WeightScheme.parse("int4:g32"), Numerics(), "bf16")
    report = bench(Options("64,96", spec, Plan((1,), rounds=1), "require:reference", ceilings=False))
    write_plot(report, tmp_path / "bare.png")
    assert (tmp_path / "bare.png").stat().st_size > 1000


@needs_matplotlib
def test_every_point_and_limit_is_inside_the_picture():
    from hal_core.bench.lineup import Options, bench
    from hal_core.bench.plot import figure_of
    from hal_core.bench.run import Plan
    from hal_core.bench.shapes import matrix_shape
    from hal_core.numerics import Numerics
    from hal_core.schemes import WeightScheme

    spec = matrix_shape("64,96").spec(WeightScheme.parse("int4:g32"), Numerics(), "bf16")
    report = bench(Options("64,96", spec, Plan((1, 8, 64), rounds=1), "require:reference", rotate=0))
    (axes,) = figure_of(report).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    points = [(row.operations / row.bytes_read, row.operations / row.seconds.median) for row in report.rows]
    assert len(points) == 3
    assert all(left < x < right and 0 < bottom < y < top for x, y in points)
    assert max(c.per_second.median for c in report.ceilings if c.kind != "read") < 1.5 * top
