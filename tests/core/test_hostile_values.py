"""Files, texts and metadata of strangers: one clear error or a reasoned refusal, and what was good before stays good."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from core.fakes import LINEAR, MACHINE, entry_points, install, manifest, reference, registered
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hal_core as hal
from hal_core.cli.facts import write_facts
from hal_core.errors import HalError, OutputError, PolicyError, SettingError, ValueDecodeError
from hal_core.kv.op import KVParams
from hal_core.kv.scheme import KVScheme
from hal_core.machine import Machine
from hal_core.manifest import BackendManifest, read_manifest
from hal_core.policy import Policy, current_policy
from hal_core.reading import read_small_text, short
from hal_core.refusal import Refusal
from hal_core.registry import Registry
from hal_core.select import select_from
from hal_core.spec import KVCacheSpec
from hal_core.stored import load_facts

GOOD = json.loads(load_facts("h200").dumps())
HUGE = (10**30, -1, 1e308, 1 << 63, True, None, "1", [], {})


def told(ask, expected):
    """The answer and no message, or no answer and the message of an expected error."""
    try:
        return ask(), ""
    except expected as error:
        return None, str(error)


def refused(text, tmp_path, shown=None):
    path = tmp_path / "box.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueDecodeError, match=shown) as caught:
        load_facts(str(path))
    message = str(caught.value)
    assert len(message) < 900
    assert message.isprintable()
    return message


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"facts_version": 2}, "facts_version: 2, this hal-core reads 1; pip install --upgrade hal-core"),
        ({"facts_version": 0}, "write them again"),
        ({"facts_version": "1"}, "expected int"),
        ({"facts_version": 10**400}, "this hal-core reads 1"),
        ({"extra": 1}, "unknown field of Machine"),
        ({"x" * 100_000: 1}, "unknown field|\\.\\.\\."),
        ({"plat\x1b[2Jform": 1}, "."),
        ({"platform": "linux\x1b[2J"}, "not printable"),
        ({"platform": "x" * 10_000}, "too long"),
        ({"isa": ["avx2"] * 5000}, "more than 1024"),
        ({"isa": "avx2"}, "expected a list"),
        ({"devices": [{"kind": "gpu", "vendor": "v", "architecture": "a", "name": "n"}]}, "'gpu' is unknown"),
        ({"devices": [{"kind": "cuda", "vendor": "v", "architecture": "a", "name": "n\n\n"}]}, "not printable"),
        ({"devices": [{"kind": "cuda", "vendor": "v", "architecture": "a", "name": "n", "units": 10**9}]}, "units"),
        ({"marks": [{"fact": "isa", "mark": "guessed"}]}, "measured"),
        ({"processor": {"cores": -5}}, "cores"),
        ({"processor": {"caches": [{"level": 99, "kind": "data", "size_bytes": 1}]}}, "level"),
        ({"processor": {"numa": [{"node": 0, "cpus": 1, "memory_bytes": 1 << 60}]}}, "memory_bytes"),
        ({"processor": []}, "expected an object"),
    ],
)
def test_facts_that_are_wrong(tmp_path, change, shown):
    refused(json.dumps({**GOOD, **change}), tmp_path, shown)


@pytest.mark.parametrize("field", ["units", "memory_bytes"])
@pytest.mark.parametrize("value", [v for v in HUGE if v is not None])
def test_numbers_of_devices_out_of_all_proportion(tmp_path, field, value):
    data = json.loads(json.dumps(GOOD))
    data["devices"][1][field] = value
    refused(json.dumps(data), tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "null",
        "[]",
        '"h200"',
        "{",
        "[" * 100_000,
        '{"a":' * 100_000,
        "1" * 100_000,
        "NaN",
        '{"platform": Infinity}',
        "\x00",
        "{}" * 9,
    ],
)
def test_texts_that_are_no_facts(tmp_path, text):
    refused(text, tmp_path)


def test_truncated_facts(tmp_path):
    text = load_facts("h200").dumps()
    for length in range(0, len(text) - 1, 97):
        refused(text[:length], tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../facts/h200",
        "facts/h200",
        "h200.json",
        "H200",
        "h200/",
        "",
        ".",
        "..",
        "/etc/passwd\x00",
        "a" * 5000,
        "h200\n",
        "%2e%2e",
        "~/h200",
        "-",
    ],
)
def test_names_that_lead_nowhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueDecodeError) as caught:
        load_facts(name)
    assert len(str(caught.value)) < 500


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_pipes_folders_and_large_files_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * 2_000_000)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{}")
    for name, shown in (("pipe", "a device"), ("large", "larger than"), ("bytes", "not UTF-8"), ("", "a folder")):
        with pytest.raises(ValueDecodeError, match=shown):
            load_facts(str(tmp_path / name))
    with pytest.raises(ValueDecodeError, match="no such file"):
        read_small_text(tmp_path / "nothing", 10, "x")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "name", "kind", "units"]), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(GOOD)), json_values)
def test_any_field_may_hold_anything(tmp_path, field, value):
    path = tmp_path / "box.json"
    path.write_text(json.dumps({**GOOD, field: value}))
    machine, message = told(lambda: load_facts(str(path)), ValueDecodeError)
    assert len(message) < 900
    assert message.isprintable()
    if machine is not None:
        # What is accepted is usable: it round-trips, and a selection can be made for it.
        assert Machine.from_json(machine.dumps()) == machine
        assert told(lambda: select_from(LINEAR, machine, Policy(), (registered("cpu.fast"), reference())), HalError)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(manifest("cpu"))), json_values)
def test_any_field_of_a_manifest_may_hold_anything(field, value):
    try:
        found = BackendManifest.parse(json.dumps({**manifest("cpu"), field: value}))
    except ValueDecodeError:
        return
    for reason in found.refusals(MACHINE):
        assert str(reason).isprintable()


@pytest.mark.parametrize("data", ["x" * 3_000_000, '{"' + "k" * 100_000 + '": 1}', '{"name": "' + "\\u001b[2J" * 50 + '"}'])
def test_manifests_of_any_size_give_a_short_refusal(tmp_path, data):
    install(tmp_path, "cpu", data=data)
    (entry_point,) = entry_points(tmp_path)
    reason = read_manifest(entry_point)
    assert isinstance(reason, Refusal)
    assert len(str(reason)) < 700
    assert str(reason).isprintable()


@settings(max_examples=200)
@given(st.text(max_size=40) | st.from_regex(r"(auto|prefer|require):?[a-z.*=,\[\]!]{0,20}", fullmatch=True))
def test_any_text_is_a_policy_or_a_clear_error(text):
    policy, message = told(lambda: Policy.parse(text), PolicyError)
    assert len(message) < 400
    assert message.isprintable()
    if policy is not None:
        assert Policy.parse(str(policy)) == policy
        selection, message = told(lambda: select_from(LINEAR, MACHINE, policy, (registered("cpu.fast"), reference())), HalError)
        assert (selection is None) == bool(message)


@pytest.mark.parametrize("text", ["require:" + "a" * 10_000, "require:" + "a," * 3000, "x" * 100_000, "require:" + "*" * 4000 + "b"])
def test_policies_of_any_length(text):
    with pytest.raises((PolicyError, hal.NoKernelError)) as caught:
        select_from(LINEAR, MACHINE, Policy.parse(text), (registered("cpu.fast"), reference()))
    assert len(str(caught.value)) < 10_000


def test_a_bad_policy_leaves_the_one_in_force(monkeypatch):
    monkeypatch.delenv("HAL_POLICY", raising=False)
    with hal.policy("require:cpu"):
        with pytest.raises(PolicyError), hal.policy("want:cpu"):
            pass
        assert str(current_policy()) == "require:cpu"
    monkeypatch.setenv("HAL_POLICY", "require")
    with pytest.raises(SettingError, match="HAL_POLICY='require'"):
        current_policy()
    assert str(current_policy("auto")) == "auto"


def test_a_registry_keeps_what_it_has_when_a_wheel_breaks(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    install(tmp_path, "good")
    registry = Registry(None, MACHINE)
    before = registry.rows()
    install(tmp_path, "bad", data="{")
    assert registry.rows() is before
    registry.refresh()
    table = {row.name: row.status for row in registry.rows()}
    assert (table["good"], table["bad"]) == ("ready", "refused")


def test_facts_are_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "box.json"
    write_facts(target, MACHINE)
    assert load_facts(str(target)) == MACHINE

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutputError, match="No space"):
        write_facts(target, load_facts("h200"))
    monkeypatch.undo()
    assert load_facts(str(target)) == MACHINE
    assert [path.name for path in tmp_path.iterdir()] == ["box.json"]


def test_an_error_is_one_short_printable_line():
    assert short("a\nb\x1b[2Jc") == "a b?[2Jc"
    assert short("x" * 1000) == "x" * 297 + "..."
    assert short("x" * 300) == "x" * 300


KV = KVCacheSpec(4, 2, 64, 32, KVScheme.parse("int8"), KVScheme.parse("int8"), dtype="fp32")


@pytest.mark.parametrize(
    "ask",
    [
        lambda: hal.kv_cache(KV, capacity="x"), lambda: hal.kv_cache(KV, capacity=1.5), lambda: hal.kv_cache(KV, decode_cache="a"),
        lambda: hal.kv_cache(KV, device="nope"), lambda: hal.kv_cache(KV, params=3), lambda: hal.kv_cache(KV).to(3),
        lambda: hal.kv_cache(KV).block_table(None), lambda: KVParams(key_scale=1.0), lambda: KVScheme([]), lambda: KVScheme.pair(None),
        lambda: KVScheme("turboquant", bits="4"), lambda: hal.WeightScheme.parse(None), lambda: replace(KV, soft_cap="x"),
        lambda: hal.Activation(limit="x"), lambda: hal.open_checkpoint(None), lambda: hal.load([]), lambda: hal.load("x", progress=3),
    ],
)  # fmt: skip
def test_arguments_of_another_type_are_clear_errors(ask):
    with pytest.raises(HalError):
        ask()
