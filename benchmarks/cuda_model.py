"""Whole models on an NVIDIA GPU through the ``hal`` command: probe, explain, run and bench, and logits beside golden ones.

    python benchmarks/cuda_model.py [--json FILE] [--parts golden,made,bench]

golden: the int4 Qwen3-MoE of tests/golden, of random weights. made: a synthetic Qwen3-MoE of two layers, int4 in groups of 128, as
benchmarks/load_memory.py makes it. Both get a tokenizer of bytes, since the weights know no words.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import torch
from load_memory import write_checkpoint
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import hal_core

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "ar_sym_int4_g32_moe.tar.xz"
PROMPT = "Why is the sky blue?"
HAL = [sys.executable, "-c", "from hal_core.cli.main import app_main; app_main()"]


def hal(*arguments: str) -> dict:
    """What ``hal .. --json`` prints; its message where it fails."""
    begin = time.perf_counter()
    done = subprocess.run([*HAL, *arguments, "--json"], capture_output=True, text=True, check=False)
    seconds = round(time.perf_counter() - begin, 1)
    shown = " ".join(a.rpartition("/")[2] if a.startswith("/") else a for a in arguments)
    print(f"$ hal {shown}  # {seconds} s, exit code {done.returncode}", flush=True)
    if done.returncode:
        print(done.stderr[-3000:], flush=True)
        return {"command": shown, "failed": done.stderr[-600:]}
    return {"command": shown, "seconds": seconds, **json.loads(done.stdout)}


def add_tokenizer(folder: Path) -> None:
    """Each byte a token, as its own number would be too much to ask of a model of 256 words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def golden_error(folder: Path, numerics: str) -> dict:
    """Relative L2 of bf16 logits against the float32 ones that the checkpoint's own tool computed."""
    golden = load_file(folder / "golden.safetensors")
    model = hal_core.load(folder, dtype="bf16", numerics=numerics)
    with torch.inference_mode():
        found = model(input_ids=golden["input_ids"].to(model.device)).logits.float().cpu()
    wanted = golden["logits"].float()
    error = float((found - wanted).norm() / wanted.norm())
    print(f"golden logits, {numerics}: relative error {error:.3g} on {model.device}, {model.hal.kernels()}", flush=True)
    return {"numerics": numerics, "error": error, "device": str(model.device), "kernels": model.hal.kernels()}


def shortened(found: dict) -> dict:
    """Without what is long and the same every time."""
    return {name: value for name, value in found.items() if name not in ("candidates", "token_ids", "notes", "text")}


def golden_model(room: Path, result: dict) -> None:
    """Logits beside the checkpoint's own, and the same text as the reference's."""
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(room, filter="data")
    folder = room / GOLDEN.name.partition(".")[0]
    add_tokenizer(folder)
    result["golden"] = [golden_error(folder, numerics) for numerics in ("checkpoint", "exact")]
    runs = [generated(folder, policy) for policy in ("auto", "require:reference")]
    result["golden_runs"] = [shortened(run) for run in runs]
    result["golden_text_as_reference"] = runs[0].get("text") is not None and runs[0].get("text") == runs[1].get("text")
    print("golden: the same text as the reference's:", result["golden_text_as_reference"], flush=True)


def generated(folder: Path, policy: str) -> dict:
    return hal("run", str(folder), "--prompt", PROMPT, "--max-new-tokens", "64", "--policy", policy)


def made_model(room: Path, result: dict) -> None:
    folder = room / "qwen3_moe_2_layers"
    folder.mkdir()
    write_checkpoint(folder, 2, moe=True)
    add_tokenizer(folder)
    result["explain"] = hal("explain", str(folder))
    result["made_runs"] = [shortened(generated(folder, policy)) for policy in ("auto", "require:cuda.*_triton,reference")]


def bench(_: Path, result: dict) -> None:
    common = ("--seconds", "1", "--rounds", "5", "--seed", "1")
    result["bench"] = [hal("bench", op, "--m", m, *common) for op, m in (("moe", "1,16,64,256"), ("linear", "1,16,128"))]


PARTS = {"golden": golden_model, "made": made_model, "bench": bench}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    result: dict = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "probe": hal("probe"),
    }
    with tempfile.TemporaryDirectory() as room:
        for part in options.parts.split(","):
            PARTS[part](Path(room), result)
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
