"""Backends tried in a process of their own: whatever ends it is a row, and is remembered for the same wheel."""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from core.fakes import MACHINE, PLUGIN, entry_points, install, manifest
from core.strategies import refusals, words
from hypothesis import given
from hypothesis import strategies as st

from hal_core import isolated, verdicts
from hal_core.errors import HalError, HalWarning
from hal_core.isolated import probe_isolated
from hal_core.jsonable import dumps, loads
from hal_core.machine import Machine, Version
from hal_core.probe import Probe, probe_from
from hal_core.refusal import Refusal
from hal_core.registry import Registry
from hal_core.verdicts import Trial, Verdict, recall, remember, verdict_file, wheel_key

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and process groups are Linux's")


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


def record(site, name):
    """What an installer writes, and what makes a wheel's files known."""
    info = site / f"hal_backend_{name}-1.0.dist-info"
    (info / "RECORD").write_text(f"hal_backend_{name}.py,,\n{info.name}/METADATA,,\n")


def probe(site, *, limit_s=60.0, fresh=False, machine=None):
    return probe_isolated(machine or Machine.detect(), entry_points(site), limit_s, fresh=fresh)


def one(site, name, code, **options):
    install(site, name, code=code)
    (row,) = probe(site, **options).rows
    (reason,) = row.refusals
    return row, reason


DEATHS = {
    "illegal": ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "was ended by SIGILL (an illegal instruction)"),
    "fault": ("import ctypes; ctypes.string_at(0)", "was ended by SIGSEGV (a memory fault)"),
    "abort": ("import os, sys; print('terminate called', file=sys.stderr, flush=True); os.abort()", "SIGABRT (an abort)"),
    "exit": ("import os; os._exit(3)", "ended with exit code 3"),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL while"),
}


@pytest.mark.parametrize("name", DEATHS)
def test_whatever_ends_the_process_is_a_row(site, name):
    code, shown = DEATHS[name]
    row, reason = one(site, name, code)
    assert (row.status, row.loaded, reason.code) == ("crashed", False, "backend.crash")
    assert shown in reason.found
    assert f"while importing hal_backend_{name}:backend" in reason.found
    assert f"hal-backend-{name}" in reason.fix
    if name == "abort":
        assert "its last words: terminate called" in reason.found


def test_a_hang_ends_at_the_limit_with_all_that_it_started(site, tmp_path):
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(300)
"""
    row, reason = one(site, "hangs", code, limit_s=4.0)
    assert row.status == "crashed"
    assert "did not end within 4 s while importing" in reason.found
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    for _ in range(100):  # a kill is delivered a moment later
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("what the child started is still there")


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "raise ImportError('undefined symbol: _ZN3c10')"])
def test_what_python_can_catch_is_a_failed_row(site, code):
    row, reason = one(site, "raises", code)
    assert (row.status, reason.code) == ("failed", "backend.import")


BODY = PLUGIN.format(manifest=json.dumps(manifest("toy")), devices=("cpu",), kernels="[Toy()]")
#: A kernel that computes through the reference; FAULT is its mistake.
TOY = """
import os, time
from core.fakes import kernel
from hal_core.reference.linear import ReferenceLinear
def prepare(self, spec, weights):
    op = ReferenceLinear().prepare(spec, weights)
    class Wrong:
        def apply(self, x):
            FAULT
            return op.apply(x)
    return Wrong()
def Toy():
    return kernel("toy", prepare=prepare, isa=())
"""


@pytest.mark.parametrize(
    ("fault", "status", "outcome", "shown"),
    [
        ("pass", "ready", "passed", "linear 128x256 int4:g32 bf16"),
        ("return op.apply(x) * 1.1", "failed", "failed", "relative error 0.0997, its bound is 0.001"),
        ("return op.apply(x) * float('nan')", "failed", "failed", "relative error nan"),
        ("raise RuntimeError('no kernel image')", "failed", "failed", "RuntimeError: no kernel image"),
        ("os._exit(9)", "crashed", None, "ended with exit code 9 while running toy.toy"),
    ],
)
def test_a_kernel_is_tried_on_a_tiny_problem(site, fault, status, outcome, shown):
    install(site, "toy", code=TOY.replace("FAULT", fault) + BODY)
    found = probe(site)
    (row,) = found.rows
    assert (row.status, row.kernels) == (status, ("toy.toy",))
    assert [trial.outcome for trial in found.trials] == ([outcome] if outcome else [])
    assert shown in " ".join([*map(str, found.trials), *map(str, row.refusals)])
    codes = {"ready": set(), "failed": {"backend.smoke"}, "crashed": {"backend.crash"}}
    assert {reason.code for reason in row.refusals} == codes[status]


def test_what_its_manifest_refuses_is_not_started(site, monkeypatch):
    install(site, "old", data=manifest("old", torch="==2.8.*"))
    monkeypatch.setattr(isolated, "_tried", lambda *_: pytest.fail("started"))
    (row,) = probe(site).rows
    assert (row.status, row.refusals[0].code) == ("refused", "backend.torch")


def test_printing_plugins_and_the_working_folder_do_no_harm(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('wrong json')")
    _, reason = one(site, "noisy", "print('x' * 100000); import sys; sys.stderr.write('\\x1b[2J' * 5000); import os; os._exit(1)")
    assert "exit code 1 while importing" in reason.found
    assert "\x1b" not in str(reason)
    assert len(str(reason)) < 800


def test_a_result_is_remembered_until_the_wheel_changes(site, monkeypatch):
    install(site, "illegal", code=DEATHS["illegal"][0])
    record(site, "illegal")
    first = probe(site)
    assert first.remembered == ()
    monkeypatch.setattr(isolated, "_run", lambda *_: pytest.fail("tried again"))
    again = probe(site)
    assert again.rows == first.rows
    assert "tried on" in again.remembered[0]
    monkeypatch.undo()


def test_a_wheel_that_was_killed_is_not_imported_afterwards(site, monkeypatch):
    install(site, "illegal", code=DEATHS["illegal"][0])
    record(site, "illegal")
    probe(site)
    (row,) = Registry(entry_points(site), Machine.detect(), reference=False).rows()
    assert (row.status, row.refusals[0].code) == ("crashed", "backend.crash")
    assert "SIGILL" in row.refusals[0].found
    # Tried again, it is the same; a new build is another wheel.
    assert probe(site, fresh=True).rows[0].status == "crashed"
    (site / "hal_backend_illegal.py").write_text("raise ImportError('a new build')")
    assert Registry(entry_points(site), Machine.detect(), reference=False).rows()[0].status == "failed"


@pytest.mark.parametrize("change", ["driver", "torch", "isa", "file", "record"])
def test_the_key_holds_all_that_a_crash_may_depend_on(site, change):
    install(site, "wheel")
    record(site, "wheel")
    (entry_point,) = entry_points(site)
    machine = replace(MACHINE, versions=(*MACHINE.versions, Version("nvidia_driver", "580.1")))
    before = wheel_key(entry_point.dist, machine)
    assert wheel_key(entry_point.dist, machine) == before
    if change == "driver":
        machine = replace(machine, versions=(*MACHINE.versions, Version("nvidia_driver", "590.2")))
    elif change == "torch":
        machine = replace(machine, versions=(Version("torch", "2.14.0"), Version("nvidia_driver", "580.1")))
    elif change == "isa":
        machine = replace(machine, isa=("avx2",))
    elif change == "file":
        (site / "hal_backend_wheel.py").write_text("changed")
    else:
        (site / "hal_backend_wheel-1.0.dist-info" / "RECORD").write_text("hal_backend_wheel.py,sha256=x,1\n")
        (entry_point,) = entry_points(site)
    assert wheel_key(entry_point.dist, machine) != before


def test_a_wheel_without_known_files_is_not_remembered(site):
    install(site, "bare", code=DEATHS["exit"][0])
    assert wheel_key(entry_points(site)[0].dist, MACHINE) is None
    assert probe(site).rows[0].status == "crashed"
    assert not verdict_file().exists()
    assert wheel_key(None, MACHINE) is None


VERDICT = Verdict(
    "k",
    "toy",
    "crashed",
    "2026-01-02",
    (Refusal("backend.crash", "a", "b", "c"),),
    ("toy.toy",),
    (Trial("toy.toy", "passed", "", 0.5),),
    "SIGILL",
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": "1", "verdicts": []}',
        '{"version": 1}',
        "[" * 100_000,
        '{"version": 1, "verdicts": [{"key": 1}]}',
        "\x00",
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning_and_replaced(site, text):
    verdict_file().parent.mkdir()
    verdict_file().write_text(text)
    with pytest.warns(HalWarning, match="is ignored"):
        assert recall("k") is None
    with pytest.warns(HalWarning):
        remember(VERDICT)
    assert recall("k") == VERDICT


@pytest.mark.parametrize("data", [b"\xff\xfe", b" " * (9 << 20)])
def test_a_file_that_is_no_text_or_too_large_is_ignored(site, data):
    verdict_file().parent.mkdir()
    verdict_file().write_bytes(data)
    with pytest.warns(HalWarning, match="is ignored"):
        assert recall("k") is None


def test_a_file_of_another_version_is_not_read_and_a_folder_in_its_place_is_survived(site):
    verdict_file().parent.mkdir()
    verdict_file().write_text('{"version": 2, "verdicts": []}')
    assert recall("k") is None
    verdict_file().unlink()
    verdict_file().mkdir()
    with pytest.warns(HalWarning):
        remember(VERDICT)


def test_a_place_that_cannot_be_written_is_a_warning(site, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(HalWarning, match="not remembered"):
        remember(VERDICT)


def test_writers_at_once_lose_nothing_and_leave_nothing(site):
    threads = [threading.Thread(target=remember, args=(replace(VERDICT, key=str(i)),)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(recall(str(i)) is not None for i in range(12))
    assert sorted(path.name for path in verdict_file().parent.iterdir()) == ["isolated.json", "isolated.lock"]
    for i in range(300):
        monkey = replace(VERDICT, key=f"n{i}")
        if i % 100 == 0:
            remember(monkey)
    assert len(verdicts._read()) <= 200


trials = st.builds(Trial, words, st.sampled_from(("passed", "failed", "skipped")), words, st.none() | st.floats(0, 10))


@given(st.builds(
    Verdict, words, words, words, words, st.lists(refusals, max_size=2).map(tuple), st.lists(words, max_size=2).map(tuple),
    st.lists(trials, max_size=2).map(tuple), words,
))  # fmt: skip
def test_verdicts_round_trip(verdict):
    assert loads(Verdict, dumps(verdict)) == verdict


@given(st.lists(trials, max_size=3).map(tuple))
def test_probes_with_trials_round_trip(found):
    probe = replace(probe_from(MACHINE, ()), trials=found)
    assert Probe.from_json(probe.dumps()) == probe
    assert all(f"tried: {trial}" in str(probe) for trial in found)


def test_a_time_limit_must_be_one(site):
    with pytest.raises(HalError, match="not above zero"):
        probe(site, limit_s=0)
    with pytest.raises(HalError, match="not above zero"):
        probe(site, limit_s=float("nan"))


def test_reading_nothing_warns_of_nothing(site):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recall("k") is None
        assert verdicts.crashed_before(None, MACHINE) is None
    assert isinstance(entry_points(site), tuple)
    assert metadata.EntryPoint("a", "b", "c").dist is None
