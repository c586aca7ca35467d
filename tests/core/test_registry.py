"""Installed backends: judged before import, and a bad one is a row that hides nobody."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from core.fakes import LINEAR, MACHINE, PLUGIN, entry_points, install, manifest

from hal_core.jsonable import dumps, loads
from hal_core.machine import Machine
from hal_core.policy import Policy
from hal_core.registry import BackendRow, Registry, default_registry
from hal_core.select import select_from


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed wheels, at the front of sys.path."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "fake_imported", [], raising=False)
    return tmp_path


def registry(site, machine=MACHINE, **options):
    return Registry(entry_points(site), machine, **{"reference": False, **options})


def table(reg):
    return {row.name: row for row in reg.rows()}


def only(row, code):
    (refusal,) = row.refusals
    assert refusal.code == code
    return str(refusal)


def test_a_healthy_backend(site):
    install(site, "good", kernels="[kernel('fast'), kernel('experts', 'moe')]")
    reg = registry(site)
    row = table(reg)["good"]
    assert (row.status, row.refusals, row.distribution, row.version) == ("ready", (), "hal-backend-good", "1.0")
    assert row.kernels == ("good.experts", "good.fast")
    assert row.manifest.ops == ("linear", "moe")
    assert [(k.name, k.backend, k.kernel.op) for k in reg.kernels()] == [("good.experts", "good", "moe"), ("good.fast", "good", "linear")]
    assert reg.kernel("good.fast").name == "fast"
    with pytest.raises(KeyError):
        reg.kernel("good.slow")


RAISING = {
    "error": ("raise ImportError('undefined symbol: _ZN3c10')", "ImportError: undefined symbol: _ZN3c10"),
    "exits": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "syntax": ("def (:", "SyntaxError"),
    "odd": ("class Odd(BaseException): pass\nraise Odd('x' * 5000)", "Odd: xxx"),
    "lines": ("raise RuntimeError('first\\nsecond')", "RuntimeError: first"),
    "missing": ("backends = 1", "AttributeError"),
}


@pytest.mark.parametrize("name", RAISING)
def test_whatever_an_import_raises_is_a_row(site, name):
    code, shown = RAISING[name]
    install(site, name, code=code)
    install(site, "good")
    reg = registry(site)
    message = only(table(reg)[name], "backend.import")
    assert table(reg)[name].status == "failed"
    assert shown in message
    assert f"backend {name!r} (hal-backend-{name} 1.0)" in message
    assert f"pip install --force-reinstall --no-deps hal-backend-{name}" in message
    assert len(message) < 700
    assert "\n" not in message
    assert [k.name for k in reg.kernels()] == ["good.fast"]


def test_the_users_interrupt_is_not_swallowed(site):
    install(site, "slow", code="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        registry(site).rows()


BODY = PLUGIN.format(manifest="@", devices=("cpu",), kernels="[kernel('fast')]")
OTHER = "import dataclasses\nBackend.manifest = dataclasses.replace(Backend.manifest, contract=9)\n"
NONSENSE = {
    "not_an_object": ("backend = 3", "has no method devices()"),
    "a_class": (BODY.replace("backend = Backend()", "backend = Backend"), "names the class Backend"),
    "kernels_raise": (BODY.replace("[kernel('fast')]", "1 / 0"), "registering raised ZeroDivisionError"),
    "kernels_exit": (BODY.replace("[kernel('fast')]", "sys.exit(1)"), "registering raised SystemExit"),
    "kernels_none": (BODY.replace("[kernel('fast')]", "None"), "registering raised TypeError"),
    "kernel_string": (BODY.replace("[kernel('fast')]", "['fast']"), "is of type str, not a LinearKernel"),
    "kernel_bare": (BODY.replace("kernel('fast')", "kernel('fast', without=('isa',))"), "kernel fast: isa is not answered"),
    "kernel_twice": (BODY.replace("[kernel('fast')]", "[kernel('fast'), kernel('fast')]"), "registered 2 times"),
    "devices_raise": (BODY.replace("return tuple(d for", "raise OSError('no driver'); (d for"), "registering raised OSError: no driver"),
    "other_manifest": (BODY.replace("backend = ", f"{OTHER}backend = "), "differs from the wheel's hal_backend.json in contract"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_registered_nonsense_is_a_row(site, name):
    code, shown = NONSENSE[name]
    install(site, name, code=code.replace("'@'", repr(json.dumps(manifest(name)))))
    install(site, "good")
    reg = registry(site)
    row = table(reg)[name]
    assert row.status == "failed"
    assert row.kernels == ()
    message = " | ".join(map(str, row.refusals))
    assert {refusal.code for refusal in row.refusals} == {"backend.invalid"}
    assert shown in message
    assert f"backend {name!r} (hal-backend-{name} 1.0)" in message
    assert [k.name for k in reg.kernels()] == ["good.fast"]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ("", "backend.manifest"),
        ("{}", "backend.manifest"),
        ("not json", "backend.manifest"),
        (manifest("other"), "backend.manifest"),
        (manifest("bad", contract=99), "backend.contract"),
        (manifest("bad", torch="==2.8.*"), "backend.torch"),
        (manifest("bad", platforms=["win_amd64"]), "backend.platform"),
    ],
)
def test_what_its_manifest_refuses_is_never_imported(site, data, code):
    install(site, "bad", data=data, code="import sys; sys.fake_imported.append('bad'); raise SystemExit")
    install(site, "good")
    reg = registry(site)
    row = table(reg)["bad"]
    assert row.status == "refused"
    only(row, code)
    assert sys.fake_imported == ["hal_backend_good"]
    assert [k.name for k in reg.kernels()] == ["good.fast"]
    assert [candidate.kernel for candidate in select_from(LINEAR, MACHINE, Policy(), reg.kernels(), reg.rows()).candidates] == [
        "good.fast",
        "bad",
    ]


def test_of_two_wheels_with_one_name_the_second_is_refused_naming_both(site):
    for distribution in ("hal-backend-twin", "zzz-twin"):
        install(site, "twin", distribution=distribution)
    for given in (entry_points(site), entry_points(site)[::-1]):
        reg = Registry(given, MACHINE, reference=False)
        first, second = reg.rows()
        assert (first.distribution, first.status) == ("hal-backend-twin", "ready")
        assert (second.distribution, second.status) == ("zzz-twin", "refused")
        message = only(second, "backend.invalid")
        assert "zzz-twin and hal-backend-twin both register it; hal-backend-twin is used" in message
        assert [k.name for k in reg.kernels()] == ["twin.fast"]


def test_a_broken_wheel_does_not_keep_its_name_from_a_healthy_one(site):
    install(site, "twin", distribution="aaa-twin", code="raise ImportError('broken')")
    install(site, "twin", distribution="hal-backend-twin")
    broken, healthy = registry(site).rows()
    assert (broken.distribution, broken.status) == ("aaa-twin", "failed")
    assert (healthy.distribution, healthy.status) == ("hal-backend-twin", "ready")


def test_nobody_else_is_the_reference(site):
    install(site, "reference")
    row = table(registry(site))["reference"]
    assert row.status == "refused"
    assert "hal-core" in only(row, "backend.invalid")


def test_a_backend_without_its_device_keeps_its_kernels(site):
    install(site, "gpu", devices=("cuda",), kernels="[kernel('fast', devices=('cuda',))]")
    reg = registry(site)
    row = table(reg)["gpu"]
    assert (row.status, row.kernels, row.loaded) == ("no_device", ("gpu.fast",), True)
    assert "devices: cpu" in only(row, "backend.device")
    elsewhere = replace(MACHINE, devices=(replace(MACHINE.devices[0], kind="cuda"),))
    assert select_from(LINEAR, elsewhere, Policy(), reg.kernels(), reg.rows()).kernel == "gpu.fast"


def test_the_reference_is_there_without_any_wheel():
    reg = Registry((), MACHINE)
    (row,) = reg.rows()
    assert (row.name, row.distribution, row.status) == ("reference", "hal-core", "ready")
    assert {k.kernel.op for k in reg.kernels()} >= {"linear", "moe", "embedding"}


def test_a_broken_reference_hides_no_wheel(site, monkeypatch):
    from hal_core import registry as module

    install(site, "good")
    monkeypatch.setattr(module, "_REFERENCE_OBJECT", ("hal_core.reference.backend", "nothing"))
    reg = registry(site, reference=True)
    assert [row.status for row in reg.rows()] == ["ready", "failed"]
    assert [k.name for k in reg.kernels()] == ["good.fast"]


def test_nothing_is_read_before_it_is_asked_and_once_only(site):
    install(site, "good")
    reg = registry(site)
    assert sys.fake_imported == []
    threads = [threading.Thread(target=reg.kernels) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.fake_imported == ["hal_backend_good"]
    assert reg.rows() is reg.rows()


def test_refresh_finds_what_was_installed_since(site):
    reg = Registry(None, MACHINE)
    before = {row.name for row in reg.rows()}
    install(site, "later")
    assert {row.name for row in reg.rows()} == before
    reg.refresh()
    assert {row.name for row in reg.rows()} - before == {"later"}


@pytest.mark.parametrize("fault", ["entry_points", "metadata", "no_name"])
def test_broken_metadata_of_a_stranger_hides_nobody(site, fault):
    install(site, "good")
    info = site / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    if fault == "entry_points":
        (info / "entry_points.txt").write_bytes(b"[hal_core.backends\n\xff\xfe = = \n")
    elif fault == "metadata":
        (info / "METADATA").write_bytes(b"\xff\xfe\x00")
    else:
        (info / "METADATA").write_text("")
    rows = table(Registry(None, MACHINE))
    assert rows["good"].status == "ready"
    assert rows["reference"].status == "ready"


def test_a_wheel_that_a_nearer_folder_shadows_is_not_a_second_one(site, tmp_path, monkeypatch):
    install(site, "good")
    other = tmp_path / "other"
    install(other, "good")
    monkeypatch.syspath_prepend(other)
    assert [row.status for row in Registry(None, MACHINE).rows() if row.name == "good"] == ["ready"]


def test_debug_shows_the_traceback(site, monkeypatch, capsys):
    install(site, "error", code="raise ImportError('undefined symbol')")
    registry(site).rows()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("HAL_DEBUG", "1")
    registry(site).rows()
    assert "Traceback" in capsys.readouterr().err


def test_rows_round_trip(site):
    install(site, "good")
    install(site, "bad", data="")
    for row in registry(site).rows():
        assert loads(BackendRow, dumps(row)) == row


def test_the_registry_of_the_process_detects_its_machine():
    assert default_registry() is default_registry()
    assert "reference" in {row.name for row in default_registry().rows()}
    assert Machine.detect().devices[0].kind == "cpu"


def test_the_order_of_plugins_does_not_matter(site):
    install(site, "good", kernels="[kernel('fast', priority=5), kernel('slow', priority=5), kernel('experts', 'moe')]")
    install(site, "twin", distribution="hal-backend-twin")
    install(site, "twin", distribution="zzz-twin")
    install(site, "broken", code="raise ImportError('undefined symbol')")
    install(site, "old", data=manifest("old", torch="==2.8.*"))
    found, rng, seen = list(entry_points(site)), random.Random(5), set()
    for _ in range(30):
        rng.shuffle(found)
        reg = Registry(found, MACHINE)
        selection = select_from(LINEAR, MACHINE, Policy(), reg.kernels(), reg.rows())
        seen.add((reg.rows(), tuple(k.name for k in reg.kernels()), selection.dumps()))
    assert len(seen) == 1


def test_hash_seeds_and_processes_do_not_matter(tmp_path):
    code = """
import sys
sys.path[:0] = sys.argv[1:]
from core.fakes import LINEAR, MACHINE, MOE, reference, registered
from hal_core.explain import explain_from
from hal_core.policy import Policy
kernels = [registered(f"b{i % 3}.k{i}", priority=i % 2, layout=f"l{i % 2}") for i in range(9)] + [registered("b0.moe", "moe"), reference()]
for spec in (LINEAR, MOE):
    for policy in ("auto", "prefer:b1", "require:nothing"):
        print(explain_from(spec, MACHINE, Policy.parse(policy), kernels).dumps())
"""
    paths = [path for path in sys.path if path]
    printed = {
        subprocess.run(
            [sys.executable, "-c", code, *paths], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True, timeout=120
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(printed) == 1
    assert b"b1.k" in printed.pop()
