"""The ``hal`` command as a user meets it: output, JSON, exit codes, one line for every error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from golden import goldens
from safetensors.torch import load_file

from hal_core.cli.main import app_main

MOE = "ar_sym_int4_g32_moe"


@pytest.fixture
def hal(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            app_main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


def test_probe_as_table_and_json(hal) -> None:
    code, out, _ = hal("probe")
    assert code == 0
    assert "reference" in out
    assert "Devices" in out
    code, out, _ = hal("probe", "--json")
    assert code == 0
    assert {row["name"] for row in json.loads(out)["backends"]} >= {"reference"}


def test_explain_one_op_lists_every_candidate_with_every_refusal(hal) -> None:
    arguments = ("explain", "--op", "moe", "--lora", "--scheme", "int4:g36", "--numerics", "exact")
    code, out, _ = hal(*arguments, "--json")
    assert code == 0
    data = json.loads(out)
    assert data["selection"] is None
    by_name = {c["kernel"]: {r["code"] for r in c["refusals"]} for c in data["candidates"]}
    assert by_name["reference.moe"] == {"epilogue.lora"}
    assert all(r["fix"] and r["asked"] and r["found"] for c in data["candidates"] for r in c["refusals"])
    code, out, _ = hal(*arguments)
    assert "epilogue.lora" in out
    assert "nothing serves it" in out


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--op", "linear", "--heads", 3), "--heads with --op linear: says nothing of it; it is for kv"),
        (("--op", "embedding", "--lora"), "--lora with --op embedding"),
        (("--op", "kv", "--numerics", "int8"), "--numerics with --op kv"),
        (("CKPT", "--n", 64), "--n with checkpoint"),
        (("--diff", "a", "b", "--policy", "auto"), "--policy with diff"),
    ],
)
def test_explain_refuses_options_that_would_change_nothing(hal, arguments, shown) -> None:
    code, _, err = hal("explain", *arguments)
    assert code == 2
    assert shown in err


def test_explain_requires_a_cache_as_run_makes_it(hal) -> None:
    arguments = ("explain", "--op", "kv", "--kv-cache", "fp8", "--policy", "require:reference", "--json")
    assert json.loads(hal(*arguments)[1])["selection"]["intervals"][0]["kernel"] == "reference.kv"
    assert json.loads(hal(*arguments, "--kv-scales", "default")[1])["selection"] is None


def test_explain_checkpoint_reads_headers_and_groups_layers(hal) -> None:
    code, out, _ = hal("explain", goldens.folder(MOE), "--policy", "require:reference", "--json")
    assert code == 0
    groups = json.loads(out)["groups"]
    assert {tuple(g["layers"]) for g in groups} >= {("model.layers.*.mlp.experts",)}
    assert sum(g["count"] for g in groups) == 10
    assert {i["kernel"] for g in groups for i in g["explanation"]["selection"]["intervals"]} == {"reference.moe", "reference.linear"}
    code, out, _ = hal("explain", goldens.folder(MOE))
    assert "model.layers.*.mlp.experts" in out


def test_dequantize_writes_published_names(hal, tmp_path) -> None:
    target = tmp_path / "out.safetensors"
    code, out, _ = hal("dequantize", goldens.folder(MOE), "--out", target, "--json")
    assert code == 0
    assert json.loads(out)["bytes"] == target.stat().st_size
    written, golden = load_file(target), load_file(goldens.folder(MOE) / "golden.safetensors")
    assert torch.equal(written["model.layers.1.mlp.experts.5.up_proj.weight"], golden["model.layers.1.mlp.experts.5.up_proj.weight"])


def test_logits_equal_the_golden(hal, tmp_path) -> None:
    golden = load_file(goldens.folder(MOE) / "golden.safetensors")
    ids = ",".join(map(str, golden["input_ids"][0].tolist()))
    target = tmp_path / "logits.safetensors"
    code, _, err = hal("logits", goldens.folder(MOE), "--ids", ids, "--out", target, "--policy", "require:reference")
    assert code == 0, err
    logits = load_file(target)["logits"]
    assert logits.dtype == torch.float32
    assert logits.shape == golden["logits"].shape
    assert float((logits - golden["logits"]).norm() / golden["logits"].norm()) < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["logits.safetensors"]


def out_of(tmp_path):
    return ("--out", tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("explain",), "neither"),
        (("explain", "{moe}", "--op", "moe"), "not both"),
        (("explain", "--op", "conv"), "conv"),
        (("explain", "--op", "linear", "--n", "0"), "LinearSpec.n"),
        (("explain", "--op", "linear", "--n", "many"), "integer"),
        (("explain", "--op", "linear", "--scheme", "int9:g32"), "int9"),
        (("explain", "--op", "linear", "--scheme", "int4:gx"), "gx"),
        (("explain", "--op", "linear", "--policy", "want:cpu"), "want"),
        (("explain", "--op", "moe", "--numerics", "int5"), "int5"),
        (("explain", "--op", "moe", "--alpha", "2"), "alpha"),
        (("explain", "--op", "linear", "--nonsense"), "nonsense"),
        (("explain", "/no/such/folder"), "/no/such/folder"),
        (("logits", "{moe}", "--ids", "1,x", "{out}"), "1,x"),
        (("logits", "{moe}", "--ids", ",", "{out}"), "empty"),
        (("logits", "{moe}", "--ids", "1,256", "{out}"), "256 at position 1"),
        (("logits", "{moe}", "--ids", "-1", "{out}"), "-1"),
        (("logits", "{moe}", "--ids", "1", "--out", "/no/such/folder/x"), "folder does not exist"),
        (("logits", "{moe}", "--ids", "1", "--out", "/"), "is a folder"),
        (("logits", "{moe}", "--ids", "1", "{out}", "--policy", "require:cuda"), "cuda"),
        (("run", "{moe}", "--prompt", "hello"), "tokenizer"),
        (("run", "{moe}",), "--prompt"),
        (("run", "{moe}", "--prompt", "x", "--dtype", "int7"), "."),
        (("dequantize", "{moe}"), "--out"),
        (("nothing",), "nothing"),
    ],
)  # fmt: skip
def test_every_user_error_is_one_line_and_exit_code_2(hal, tmp_path, arguments, words: str) -> None:
    filled: list[object] = []
    for argument in arguments:
        filled += out_of(tmp_path) if argument == "{out}" else [goldens.folder(MOE) if argument == "{moe}" else argument]
    code, _, err = hal(*filled)
    assert code == 2
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert words in lines[0]
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["logits", "dequantize", "facts"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_no_command_writes_onto_a_file_of_a_checkpoint(hal, tmp_path, command: str, name: str) -> None:
    folder = goldens.copy(MOE, tmp_path / "c")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    link = tmp_path / "link"
    link.symlink_to(folder / name)
    for target in (folder / name, link):
        arguments = {"logits": ("logits", folder, "--ids", "1"), "dequantize": ("dequantize", folder), "facts": ("facts",)}[command]
        code, _, err = hal(*arguments, "--out", target)
        assert code == 2
        assert len(err.strip().splitlines()) == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert link.is_symlink()


@pytest.mark.parametrize("command", ["logits", "dequantize", "facts"])
def test_an_output_that_is_a_pipe_or_device_is_refused_and_left_alone(hal, tmp_path, command: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    arguments = {
        "logits": ("logits", goldens.folder(MOE), "--ids", "1"),
        "dequantize": ("dequantize", goldens.folder(MOE)),
        "facts": ("facts",),
    }
    code, _, err = hal(*arguments[command], "--out", pipe)
    assert code == 2
    assert "device or a pipe" in err
    assert pipe.is_fifo()


HOSTILE = {
    "num_labels": 10**9, "return_dict": False, "attn_implementation": "flash_attention_2", "_attn_implementation": "somebody/kernels",
    "hidden_size": "128", "num_hidden_layers": 2.0, "rms_norm_eps": "a", "vocab_size": 0, "head_dim": 31, "tie_word_embeddings": "x",
    "layer_types": ["nope"], "hidden_act": ["silu"], "pad_token_id": 10**6, "initializer_range": -1,
}  # fmt: skip


@pytest.mark.parametrize("field", HOSTILE)
def test_a_hostile_config_field_is_ignored_or_one_line(hal, tmp_path, field: str) -> None:
    folder = goldens.copy(MOE, tmp_path / "c")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: HOSTILE[field]}))
    code, _, err = hal("logits", folder, "--ids", "1,2", "--out", tmp_path / "x.safetensors")
    assert code in (0, 2)
    assert len(err.strip().splitlines()) == (code == 2), err
    assert "internal" not in err


@pytest.mark.parametrize("text", ["[]", "null", "1e999", "{", '{"temperature": "hot", "max_new_tokens": "x"}'])
def test_damaged_generation_settings_are_one_line(hal, tmp_path, text: str) -> None:
    folder = goldens.copy(MOE, tmp_path / "c")
    (folder / "generation_config.json").write_text(text)
    code, _, err = hal("logits", folder, "--ids", "1,2", "--out", tmp_path / "x.safetensors")
    assert code == 2
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(("variable", "value"), [("HAL_DEBUG", "maybe"), ("HAL_CPU_ISA", " avx2"), ("HAL_POLICY", "want:cpu")])
def test_a_bad_setting_is_one_line(hal, monkeypatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    code, _, err = hal("explain", "--op", "linear")
    assert code == 2
    assert len(err.strip().splitlines()) == 1


def test_a_preference_that_is_not_met_is_a_warning_line(hal, tmp_path) -> None:
    code, _, err = hal("logits", goldens.folder(MOE), "--ids", "1", "--out", tmp_path / "x", "--policy", "prefer:cuda")
    assert code == 0
    assert all(line.startswith("warning: ") for line in err.splitlines())


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_leaves_nothing_and_says_so(tmp_path, number: signal.Signals, expected: int) -> None:
    code = (
        "import os, signal, threading, hal_core.dequantize as d; from hal_core.cli.main import app_main;"
        f"d._write_all = lambda *a: (os.kill(os.getpid(), {int(number)}), __import__('time').sleep(30));"
        f"app_main(['dequantize', {str(goldens.folder(MOE))!r}, '--out', {str(tmp_path / 'x')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == expected, done.stderr
    assert done.stderr.strip() in ("error: interrupted", "error: terminated")
    assert list(tmp_path.iterdir()) == []


def test_the_command_alone_is_help(hal) -> None:
    code, out, err = hal()
    assert (code, err) == (0, "")
    assert "Usage" in out


def test_debug_shows_the_traceback(hal) -> None:
    code, _, err = hal("explain", "--op", "conv", "--debug")
    assert code == 2
    assert "Traceback" in err


@pytest.mark.parametrize("command", ["probe", "explain", "dequantize", "logits", "run"])
def test_help_has_examples(hal, command: str) -> None:
    code, out, _ = hal(command, "--help")
    assert code == 0
    assert "Examples" in out
    assert f"hal {command}" in out
    assert "--json" in out


@pytest.mark.parametrize("command", [("run", "x", "--prompt", "Hi"), ("perplexity", "x", "--text", "x"), ("bench", "linear", "--m", "1")])
def test_more_threads_than_a_machine_can_bear_are_refused(hal, command) -> None:
    code, _, err = hal(*command, "--threads", 100_000)
    assert code == 2
    assert f"{os.cpu_count()} processors" in err


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_that_no_generator_takes_are_refused(hal, seed) -> None:
    code, _, err = hal("run", "x", "--prompt", "Hi", "--seed", seed)
    assert code == 2
    assert "--seed" in err
