"""``--kv-cache`` of ``hal run``, ``hal perplexity`` and ``hal logits``."""

from __future__ import annotations

import json

import pytest
import torch
from golden import goldens
from safetensors.torch import load_file

from hal_core.cli.main import app_main

pytest.importorskip("transformers", reason="transformers is not installed")

MODEL = "gptq_v2_asym_int4_g32"
IDS = ",".join(map(str, range(5, 75)))


@pytest.fixture
def hal(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            app_main([*map(str, arguments), "--policy", "require:reference"])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A quantized model with a tokenizer of single characters, and a text for it."""
    import shutil

    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("kv") / "model"
    shutil.copytree(goldens.folder(MODEL), place)
    vocab = {chr(32 + i): i for i in range(95)} | {"[UNK]": 95}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="~").save_pretrained(place)
    text = place.parent / "text.txt"
    generator = torch.Generator().manual_seed(0)
    text.write_text("".join(chr(32 + int(i)) for i in torch.randint(0, 90, (300,), generator=generator)))
    return place, text


def test_logits_go_through_the_cache(hal, tmp_path):
    found = {}
    for scheme in (None, "fp32", "int8", "turboquant:4"):
        target = tmp_path / f"{scheme}.safetensors".replace(":", "_")
        options = () if scheme is None else ("--kv-cache", scheme)
        code, out, err = hal("logits", goldens.folder(MODEL), "--ids", IDS, "--out", target, *options)
        assert code == 0, err
        found[scheme] = load_file(target)["logits"]
        assert ("KV cache" in out) == (scheme is not None)
    assert f"KV cache turboquant:4: reference.kv x{2}; " in out
    exact = found[None]
    errors = {scheme: float((logits - exact).norm() / exact.norm()) for scheme, logits in found.items()}
    assert errors["fp32"] < 1e-5 < errors["int8"] < errors["turboquant:4"]


def test_a_run_says_what_served_its_cache(hal, checkpoint):
    place, _ = checkpoint
    code, out, err = hal("run", place, "--prompt", "Why is the sky blue", "--max-new-tokens", 6, "--kv-cache", "k4v3", "--no-chat")
    assert code == 0, err
    assert "KV cache k=turboquant:4,v=turboquant:3: reference.kv x2; " in out
    code, out, _ = hal("run", place, "--prompt", "Why is", "--max-new-tokens", 6, "--kv-cache", "fp8", "--no-chat", "--json")
    report = json.loads(out)["kv_cache"]
    assert report["scheme"] == "fp8"
    assert report["kernels"] == {"reference.kv": 2}
    assert report["scales"] == {"computed": 2}
    assert 6 <= report["tokens"] <= 12
    code, out, _ = hal("run", place, "--prompt", "Why is", "--max-new-tokens", 2, "--no-chat", "--json")
    assert json.loads(out)["kv_cache"] is None


def test_perplexity_through_the_cache_is_paired_with_the_unquantized_one(hal, checkpoint):
    place, text = checkpoint
    options = ("--text", text, "--window", 64, "--against", "unquantized-cache", "--json")
    scheme = "k=bf16,v=turboquant:2"
    code, out, err = hal("perplexity", place, *options, "--kv-cache", scheme)
    assert code == 0, err
    coarse = json.loads(out)
    assert coarse["kv_cache"]["scheme"] == scheme
    assert "kv_cache" not in coarse["against"]
    assert coarse["difference"]["largest_token_nll"] > 1e-3
    stepped = json.loads(hal("perplexity", place, *options, "--kv-cache", scheme, "--kv-step", 5)[1])
    assert stepped["nll"] == pytest.approx(coarse["nll"], abs=1e-4)
    fine = json.loads(hal("perplexity", place, *options, "--kv-cache", "fp32")[1])
    assert abs(fine["difference"]["nll"]) < 1e-6
    code, out, _ = hal("perplexity", place, *options[:-1], "--kv-cache", "int8", "--max-tokens", 130)
    assert "KV cache int8: reference.kv x2" in out
    assert "difference" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kv-cache", "int5"), "not understood"),
        (("--kv-step", "3"), "give --kv-cache too"),
        (("--against", "unquantized-cache"), "give --kv-cache too"),
    ],
)
def test_what_makes_no_sense_is_one_line_before_anything_is_loaded(hal, checkpoint, options, words):
    place, text = checkpoint
    code, _, err = hal("perplexity", place, "--text", text, *options)
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_policy_may_name_the_caches_kernel(capsys, tmp_path):
    policy = "require:linear=reference.*,embedding=reference.*,kv=reference.kv"
    arguments = ["logits", goldens.folder(MODEL), "--ids", "5,6,7", "--out", tmp_path / "l.safetensors", "--kv-cache", "int8", "--json"]
    with pytest.raises(SystemExit) as stop:
        app_main([*map(str, arguments), "--policy", policy])
    assert not stop.value.code
    assert json.loads(capsys.readouterr().out)["kv_cache"]["kernels"] == {"reference.kv": 2}


def test_explain_says_which_kernel_would_serve_a_cache(hal):
    options = ("--op", "kv", "--heads", 14, "--kv-heads", 2, "--head-dim", 64, "--window", 128, "--kv-cache", "k=int8,v=turboquant:4")
    code, out, err = hal("explain", *options)
    assert code == 0, err
    assert "kv 14/2 heads x64 page 32 k=int8 v=turboquant:4 window 128 bf16" in out
    assert "reference.kv" in out
    code, out, _ = hal("explain", *options, "--json")
    assert json.loads(out)["selection"]["intervals"][0]["kernel"] == "reference.kv"
    code, _, err = hal("explain", "--op", "kv", "--kv-heads", 7)
    assert code == 2
    assert "not a multiple of num_kv_heads 7" in err
