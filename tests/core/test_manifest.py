"""The verdict on a wheel before anything of it is imported."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from core.fakes import MACHINE, entry_points, install, manifest

from hal_core.errors import ValueDecodeError
from hal_core.kernel import CONTRACT
from hal_core.machine import Version
from hal_core.manifest import BackendManifest, read_manifest
from hal_core.refusal import Refusal


def parsed(**changes):
    return BackendManifest.parse(json.dumps(manifest("cpu", **changes)))


def verdict(**changes):
    return {refusal.code: refusal for refusal in parsed(**changes).refusals(MACHINE)}


def test_a_fitting_wheel_has_no_refusal():
    assert verdict() == {}
    assert verdict(platforms=["win_amd64", "linux_x86_64"]) == {}


@pytest.mark.parametrize(
    ("contract", "fix"), [(CONTRACT - 1, "pip install hal-backend-cpu --upgrade"), (CONTRACT + 1, "pip install --upgrade hal-core")]
)
def test_both_contract_numbers_are_in_the_message(contract, fix):
    refusal = verdict(contract=contract)["backend.contract"]
    assert str(CONTRACT) in refusal.asked
    assert f"contract {contract}" in refusal.found
    assert refusal.fix == fix


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ("", True),
        (">=2.11", True),
        ("==2.13.*", True),
        ("==2.13.0", True),
        ("==2.8.*", False),
        (">=2.14", False),
        ("<2.13", False),
        ("~=2.11", True),
    ],
)
def test_torch_ranges_look_past_the_local_version(wanted, fits):
    found = verdict(torch=wanted)
    assert (found == {}) is fits
    if not fits:
        assert "torch 2.13.0+cpu" in found["backend.torch"].found
        assert f'pip install "torch{wanted}"' in found["backend.torch"].fix


@pytest.mark.parametrize("version", [None, "not-a-version", "2.14.0a0+git123"])
def test_odd_torch_versions(version):
    versions = () if version is None else (Version("torch", version),)
    codes = [r.code for r in parsed().refusals(replace(MACHINE, versions=versions))]
    assert codes == ([] if version == "2.14.0a0+git123" else ["backend.torch"])


def test_every_reason_is_given():
    assert set(verdict(contract=99, torch="==1.0", platforms=["win_amd64"])) == {"backend.contract", "backend.torch", "backend.platform"}
    assert set(verdict(platforms=[])) == {"backend.platform"}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"contract": "1"}, r"\$\.contract: expected int"),
        ({"contract": True}, r"\$\.contract: expected int"),
        ({"torch": "2.11 or later"}, "not a version range"),
        ({"ops": ["conv"]}, "manifest.ops: conv unknown"),
        ({"ops": "linear"}, r"\$\.ops: expected a list"),
        ({"name": "../cpu"}, "not a plain name"),
        ({"name": "cpu.x"}, "not a plain name"),
        ({"name": ""}, "not a plain name"),
        ({"tested": "never run\n\x1b[31m"}, "manifest.tested"),
        ({"tested": "a" * 121}, "manifest.tested"),
        ({"extra": 1}, "unknown field of BackendManifest"),
    ],
)
def test_manifests_that_are_wrong(changes, shown):
    with pytest.raises(ValueDecodeError, match=shown):
        parsed(**changes)


@pytest.mark.parametrize("field", ["name", "distribution", "contract", "torch", "ops", "install"])
def test_fields_without_an_answer(field):
    data = manifest("cpu")
    del data[field]
    with pytest.raises(ValueDecodeError, match=rf"\$\.{field}: missing"):
        BackendManifest.parse(json.dumps(data))


def test_round_trip():
    assert BackendManifest.parse(parsed(isa=["avx2"]).dumps()) == parsed(isa=["avx2"])


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ("", "no such file"),
        ("{", "Expecting property name"),
        ("[" * 5000, "RecursionError|recursion|Expecting"),
        (manifest("other"), "'other'"),
        (manifest("cpu", contract="one"), "expected int"),
    ],
)
def test_a_wheel_without_a_good_manifest_is_refused_by_name(tmp_path, data, shown):
    install(tmp_path, "cpu", data=data)
    (entry_point,) = entry_points(tmp_path)
    refusal = read_manifest(entry_point)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "backend.manifest"
    assert "hal-backend-cpu" in str(refusal)
    assert any(part in str(refusal) for part in shown.split("|"))


def test_a_manifest_that_is_not_text(tmp_path):
    install(tmp_path, "cpu")
    (tmp_path / "hal_backend_cpu-1.0.dist-info" / "hal_backend.json").write_bytes(b"\xff\xfe\x00{")
    (entry_point,) = entry_points(tmp_path)
    refusal = read_manifest(entry_point)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "backend.manifest"


def test_of_distribution(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "odd")
    install(tmp_path, "bare", data="")
    assert BackendManifest.of_distribution("hal-backend-odd").name == "odd"
    with pytest.raises(ValueDecodeError, match=r"no hal_backend\.json"):
        BackendManifest.of_distribution("hal-backend-bare")
    with pytest.raises(ValueDecodeError, match="not installed; pip install hal-backend-none"):
        BackendManifest.of_distribution("hal-backend-none")
