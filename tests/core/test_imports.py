"""``import hal_core`` is light: no optional library, no vendor wheel, no device; and its names are what they should be."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hal_core as hal

#: Whatever is heavy, optional or a plugin. torch is allowed and not needed either.
ABSENT = ("torch", "triton", "transformers", "gguf", "typer", "rich", "numpy", "safetensors", "hal_backend_cpu", "hal_backend_cuda")


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("code", ["import hal_core", "import hal_core; hal_core.Machine.detect()", "import hal_core.api"])
def test_import_brings_nothing_heavy(code):
    loaded = run(f"{code}; import sys; print(*[name for name in {ABSENT!r} if name in sys.modules])")
    assert loaded.split() == []


def test_import_starts_no_thread_and_prints_nothing():
    assert run("import threading, hal_core; print(threading.active_count())").split() == ["1"]


def test_probing_creates_no_device_context():
    code = "import hal_core, sys; hal_core.probe(); import torch; print(torch.cuda.is_initialized())"
    assert run(code).split() == ["False"]


def test_probing_imports_no_optional_library():
    optional = ("triton", "transformers", "gguf", "typer", "rich")
    assert run(f"import hal_core, sys; hal_core.probe(); print(*[n for n in {optional} if n in sys.modules])").split() == []


def test_functions_are_not_shadowed_by_their_modules():
    code = """
import importlib, hal_core
for name in ("policy", "select", "explain", "probe", "registry", "reference", "ops", "integrations"):
    importlib.import_module("hal_core." + name)
from hal_core.policy import Policy
hal_core.probe()
print(all(callable(getattr(hal_core, name)) for name in ("policy", "select", "explain", "probe", "load", "prepare")))
"""
    assert run(code).split() == ["True"]


def test_every_public_name_is_there():
    assert sorted(hal.__all__) == list(hal.__all__)
    for name in hal.__all__:
        assert getattr(hal, name) is not None
    assert hal.QuantLinear.__module__ == "hal_core.ops"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hal.nothing  # noqa: B018
    assert isinstance(hal.__version__, str)
