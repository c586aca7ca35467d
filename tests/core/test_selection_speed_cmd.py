"""benchmarks/selection.py prints the five costs. Targets are judged by the benchmark, on a quiet machine; here only gross faults fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hal_backend_cpu", reason="the hot path is that of the CPU backend")

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "selection.py"
#: How much worse than its target a figure may be on a loaded machine.
SLACK = 10


def run(*arguments):
    paths = os.pathsep.join(path for path in sys.path if path and not path.endswith("tests"))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=250, check=False, env=environment)


def test_all_five_figures_are_printed_beside_their_targets():
    done = run("--json", "--rounds", "20")
    assert done.returncode in (0, 1), done.stderr
    figures = {figure["name"]: figure for figure in json.loads(done.stdout)}
    assert {name: figure["target"] for name, figure in figures.items()} == {
        "import": 150e-3, "probe": 50e-3, "select": 2e-3, "select cached": 5e-6, "hot path": 2e-6,
    }  # fmt: skip
    for name, figure in figures.items():
        assert figure["met"] == (figure["seconds"] < figure["target"])
        assert figure["seconds"] < SLACK * figure["target"], name
    assert done.returncode == (0 if all(figure["met"] for figure in figures.values()) else 1)
    kernels, reasons = figures["select"]["what"].split()[0], figures["select"]["what"].split()[-3]
    assert int(kernels) >= 60
    assert int(reasons) >= 300
