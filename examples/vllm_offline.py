"""A quantized Qwen3-MoE inside vLLM, on one rank and on two: how far its logits are from the truth, which kernels ran, tokens a second.

    python examples/vllm_offline.py [CHECKPOINT] [--ranks 1 2] [--numerics exact] [--kv-cache SCHEME] [--policy POLICY]

The truth is transformers in float32 on the dequantized weights. Without a checkpoint the small one of `make demo` is served; any folder
that hal-core reads and vLLM has a model class for will do. Needs `pip install 'hal-core[vllm]' hal-backend-cpu`, see docs/vllm.md. A rank
takes one processor core here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

DEMO = "ar_sym_int4_g32_moe"
#: Head sizes of vLLM's own attention on a CPU. For others hal-core's pages serve, which fp32 ones do exactly.
VLLM_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
PROMPT, NEW = 24, 32


def unpack_demo(folder: Path) -> Path:
    """The demo's checkpoint, without its golden logits: vLLM loads every safetensors file that it finds."""
    with tarfile.open(Path(__file__).parents[1] / "tests" / "golden" / f"{DEMO}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (folder / DEMO / "golden.safetensors").unlink()
    return folder / DEMO


def true_logits(checkpoint: Path, folder: Path, ids: list[int]) -> torch.Tensor:
    """float32 ``[tokens, vocabulary]`` of transformers on the weights as plain numbers."""
    from transformers import AutoModelForCausalLM

    from hal_core.dequantize import dequantize_checkpoint

    plain = folder / "plain"
    plain.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    dequantize_checkpoint(checkpoint, plain / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def serve(checkpoint: Path, ids: list[int], ranks: int, hal: dict[str, str]) -> tuple[torch.Tensor, list[list[dict[str, Any]]], float]:
    """Logits of the prompt, what each rank says of its layers, and tokens a second of a greedy answer."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks > len(cores):
        sys.exit(f"{ranks} ranks need {ranks} cores, {len(cores)} may be used: give --ranks {len(cores)}")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores[:ranks]))
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(checkpoint), quantization="hal", additional_config={"hal": hal}, tensor_parallel_size=ranks, dtype="float32", max_model_len=128,
        worker_extension_cls="hal_core.integrations.vllm.worker.WorkerExtension", skip_tokenizer_init=True, enforce_eager=True, seed=0,
        max_logprobs=-1, logprobs_mode="raw_logits",
    )  # fmt: skip
    prompt = [{"prompt_token_ids": ids}]
    scored = SamplingParams(max_tokens=1, prompt_logprobs=-1, logprobs=-1, detokenize=False)
    (output,) = llm.generate(prompt, scored, use_tqdm=False)
    rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    logits = torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])
    greedy = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False)
    llm.generate(prompt, greedy, use_tqdm=False)
    begin = time.perf_counter()
    llm.generate(prompt, greedy, use_tqdm=False)
    speed = NEW / (time.perf_counter() - begin)
    explained = llm.collective_rpc("hal_explain")
    llm.llm_engine.engine_core.shutdown()
    return logits, explained, speed


def report(ranks: int, logits: torch.Tensor, wanted: torch.Tensor, explained: list[list[dict[str, Any]]], speed: float) -> None:
    error = float((logits - wanted).norm() / wanted.norm())
    agree = int((logits.argmax(-1) == wanted.argmax(-1)).sum())
    print(f"\n{ranks} rank{'s' * (ranks > 1)}: relative error {error:.1e}, argmax equal at {agree} of {len(wanted)}, {speed:.0f} tokens/s")
    for rank, layers in enumerate(explained):
        chosen = Counter(pair for layer in layers for pair in zip(layer["specs"], layer["kernels"], strict=True))
        print(f"  rank {rank}:")
        for (spec, kernel), count in chosen.items():
            print(f"    {count} x {spec} -> {kernel}")


def main() -> None:
    """Serve with each number of ranks and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--numerics", default="exact")
    parser.add_argument("--kv-cache")
    parser.add_argument("--policy")
    arguments = parser.parse_args()
    for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = arguments.checkpoint or unpack_demo(Path(folder))
        config = json.loads((checkpoint / "config.json").read_text())
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        cache = arguments.kv_cache or (None if head in VLLM_HEADS else "fp32")
        hal = {"numerics": arguments.numerics, "kv_cache": cache, "policy": arguments.policy}
        ids = torch.randint(0, config["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
        wanted = true_logits(checkpoint, Path(folder), ids)
        for ranks in arguments.ranks:
            logits, explained, speed = serve(checkpoint, ids, ranks, {name: value for name, value in hal.items() if value is not None})
            report(ranks, logits, wanted, explained, speed)


if __name__ == "__main__":
    main()
