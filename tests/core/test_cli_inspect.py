"""``hal inspect`` and ``hal facts``."""

from __future__ import annotations

import json
import math

import checkpoints
import pytest
import torch
from golden import goldens

import hal_core
from hal_core.cli.inspect import describe_checkpoint
from hal_core.cli.main import app_main


@pytest.fixture
def hal(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            app_main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


def test_layers_collapse_and_every_parameter_is_counted_once(hal):
    folder = goldens.folder("ar_sym_int4_g32_moe")
    code, out, err = hal("inspect", folder, "--json")
    assert code == 0, err
    found = json.loads(out)
    rows = {row["layers"]: row for row in found["layers"]}
    experts = rows["model.layers.*.mlp.experts.*.up_proj"]
    assert (experts["count"], experts["shape"], experts["scheme"], experts["quantized"]) == (16, [96, 64], "int4:g32", True)
    head = rows["lm_head"]
    assert (head["count"], head["scheme"], head["quantized"], head["bits_per_weight"]) == (1, "bf16", False, 16.0)
    entries = hal_core.open_checkpoint(folder).entries.values()
    assert sum(row["count"] for row in found["layers"]) == len(entries)
    totals = found["totals"]
    assert totals["all"]["parameters"] == sum(math.prod(entry.shape) for entry in entries)
    for key in ("parameters", "bytes"):
        assert totals["all"][key] == totals["quantized"][key] + totals["unquantized"][key] == sum(row[key] for row in found["layers"])
    # 4 bits, an fp16 scale of 32 weights, and packed zero points: 4 + 16/32 + 4/32
    assert totals["quantized"]["bits_per_weight"] == pytest.approx(4.625)
    assert found["files"] == [{"name": "model.safetensors", "bytes": (folder / "model.safetensors").stat().st_size}]
    assert found["dtype"] == "bfloat16"
    assert found["model_type"] == "qwen3_moe"


def test_layers_that_differ_inside_one_pattern_stay_apart(hal):
    found = describe_checkpoint(hal_core.open_checkpoint(goldens.folder("ar_mixed_extra_config_moe")))
    schemes: dict[str, set[str]] = {}
    for row in found["layers"]:
        schemes.setdefault(row["layers"], set()).add(row["scheme"])
    assert any(len(kinds) > 1 for kinds in schemes.values()), "this checkpoint mixes schemes by layer"


@pytest.mark.parametrize("name", goldens.names())
def test_every_golden_that_opens_is_described(name):
    try:
        checkpoint = hal_core.open_checkpoint(goldens.folder(name))
    except hal_core.FormatError:
        pytest.skip("not served")
    found = json.loads(json.dumps(describe_checkpoint(checkpoint), allow_nan=False))
    stored = sum(file["bytes"] for file in found["files"])
    # what is counted lies in the files; what is left is the header and tensors that repeat what the scheme says
    assert 0.85 * stored < found["totals"]["all"]["bytes"] <= stored


def test_the_table_shows_schemes_and_totals(hal):
    code, out, err = hal("inspect", goldens.folder("gptq_v2_asym_int4_g32"))
    assert code == 0, err
    for words in ("gptq_v2, qwen3", "model.layers.*.mlp.down_proj", "int4:g32:zero", "none", "bits per weight", "files: 1"):
        assert words in out


def test_parts_of_the_checkpoint_that_are_not_used_are_said(hal, tmp_path):
    tensors, config, _ = checkpoints.make("ct")
    tensors |= {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
    folder = checkpoints.write(tmp_path, tensors, config)
    note = "KV-cache scales are present, which an fp8 cache uses: 2 tensors"
    assert f"note: {note}" in hal("inspect", folder)[1]
    assert json.loads(hal("inspect", folder, "--json")[1])["notes"] == [note]


def test_what_cannot_be_read_is_one_line(hal, tmp_path):
    code, _, err = hal("inspect", tmp_path / "nothing")
    assert code == 2
    assert "no such file or folder" in err
    assert len(err.splitlines()) == 1


def test_facts_read_back_as_the_same_machine(hal, tmp_path):
    code, out, _ = hal("facts")
    assert code == 0
    assert hal_core.Machine.from_json(out) == hal_core.Machine.detect()
    assert {mark["mark"] for mark in json.loads(out)["marks"]} <= {"measured", "reported", "datasheet"}
    target = tmp_path / "box.json"
    code, out, _ = hal("facts", "--out", target, "--json")
    assert code == 0
    assert json.loads(out)["bytes"] == target.stat().st_size
    assert hal_core.Machine.from_json(target.read_text()) == hal_core.Machine.detect()


def test_facts_of_another_machine_decide_there(hal, tmp_path):
    code, out, _ = hal("facts", "--out", tmp_path / "box.json")
    assert code == 0
    assert "wrote" in out
    data = json.loads((tmp_path / "box.json").read_text())
    data["isa"] = []
    machine = hal_core.Machine.from_data(data)
    int4 = hal_core.WeightScheme.parse("int4:g128")
    explanation = hal_core.explain(hal_core.LinearSpec(256, 256, int4), machine=machine)
    assert explanation.selection.backend == "reference"


def test_facts_refuse_a_folder_as_output(hal, tmp_path):
    code, _, err = hal("facts", "--out", tmp_path)
    assert code == 2
    assert "is a folder" in err


@pytest.mark.parametrize("command", ["inspect", "facts", "perplexity"])
def test_help_has_examples(hal, command):
    code, out, _ = hal(command, "--help")
    assert code == 0
    assert f"hal {command}" in out
    assert "Examples" in out
    assert "--json" in out
