"""Peak memory of loading a real-sized checkpoint, measured in a process of its own by the benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("hal_backend_cpu", reason="the hal-backend-cpu wheel is not installed")


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("arguments", [("--layers", "16"), ("--moe", "--layers", "5"), ("--layers", "16", "--policy", "require:reference")])
def test_loading_holds_the_packed_model_and_one_module(repository: Path, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, str(repository / "benchmarks" / "load_memory.py"), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    print(result)
    assert result["checkpoint_bytes"] >= 1.5e9
    assert result["peak"] <= result["limit"]
