"""Autotune caches on FlashInfer's own AutoTuner, with results made up: loading adds, saving merges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hal_core.errors import HalError

pytest.importorskip("flashinfer", reason="needs flashinfer-python")

from hal_backend_cuda.providers.tuner_cache import CALLS, TunerCache
from tuner_process import known, remember, tuner

from hal_core.calls import bind

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def empty():
    tuner().clear_cache()
    yield
    tuner().clear_cache()


def results(path):
    return sorted(key.split("'")[1] for key in json.loads(path.read_text()) if not key.startswith("_"))


def tuned(path, op, tactic):
    """A file that an earlier run left."""
    remember(op, tactic)
    TunerCache(path).save()
    tuner().clear_cache()


def test_the_calls_fit_the_installed_version():
    for name in ("load", "save", "tune"):
        assert bind(CALLS[name]).keywords


def test_load_a_tune_b_save_keeps_both(tmp_path):
    path = tmp_path / "model.json"
    tuned(path, "op_a", 3)
    with TunerCache(path).entered(tune=True):
        assert known("op_a") == 3
        remember("op_b", (5, 1))
    assert results(path) == ["op_a", "op_b"]
    tuner().clear_cache()
    TunerCache(path).load()
    assert (known("op_a"), known("op_b")) == (3, (5, 1))


def test_the_second_models_cache_leaves_the_first_models(tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    tuned(first, "op_a", 3)
    tuned(second, "op_b", 4)
    with TunerCache(first).entered(), TunerCache(second).entered():
        assert (known("op_a"), known("op_b")) == (3, 4)
    assert (known("op_a"), known("op_b")) == (3, 4)


def test_flashinfers_own_sequence_loses_the_first_models(tmp_path):
    """Why this module is there; where it passes no more, FlashInfer keeps both itself."""
    from flashinfer.autotuner import autotune

    first, second = tmp_path / "first.json", tmp_path / "second.json"
    tuned(first, "op_a", 3)
    tuned(second, "op_b", 4)
    with autotune(False, cache=str(first)):
        before = known("op_a")
        with autotune(False, cache=str(second)):
            after = known("op_a")
    if before is None:
        pytest.skip("this version reads no cache back where it cannot name the device")
    assert (before, after) == (3, None)


def test_a_new_result_replaces_the_files(tmp_path):
    path = tmp_path / "model.json"
    tuned(path, "op_a", 3)
    TunerCache(path).load()
    remember("op_a", 9)
    TunerCache(path).save()
    tuner().clear_cache()
    TunerCache(path).load()
    assert known("op_a") == 9
    assert results(path) == ["op_a"]


def test_saving_keeps_what_was_never_loaded(tmp_path):
    path = tmp_path / "model.json"
    tuned(path, "op_a", 3)
    remember("op_b", 4)
    assert TunerCache(path).save() == 2
    assert results(path) == ["op_a", "op_b"]


def test_what_was_tuned_is_saved_when_the_body_raises(tmp_path):
    path = tmp_path / "model.json"

    def body():
        with TunerCache(path).entered(tune=True):
            remember("op_b", 4)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        body()
    assert results(path) == ["op_b"]


def test_processes_that_save_at_once_lose_nothing(tmp_path):
    path, start = tmp_path / "model.json", time.time() + 5
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    operations = [[f"op_{process}_{number}" for number in range(6)] for process in range(3)]
    running = [
        subprocess.Popen(
            [sys.executable, str(HERE / "tuner_process.py"), str(path), str(start), *each], env=environment, stderr=subprocess.PIPE
        )
        for each in operations
    ]
    for process in running:
        _, told = process.communicate(timeout=120)
        assert process.returncode == 0, told.decode()
    assert results(path) == sorted(op for each in operations for op in each)


@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "not JSON"), ("[1]", "a JSON list"), ('{"key": 3}', "is not"), ('{"key": [1, 2]}', "is not"), ("\xff", "not JSON")],
)
def test_a_damaged_file_is_refused_and_kept(tmp_path, text, told):
    path = tmp_path / "model.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(HalError, match=told):
        TunerCache(path).load()
    remember("op_b", 4)
    with pytest.raises(HalError, match=told):
        TunerCache(path).save()
    assert path.read_bytes() == text.encode("latin-1")


def test_no_file_is_no_result(tmp_path):
    assert TunerCache(tmp_path / "deep" / "model.json").load() == 0
