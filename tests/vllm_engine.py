"""Engines of vLLM, one after another, and what they answer: token ids and the logits that gave them.

As a program, for engines of several processes: ``vllm_engine.py JOB.json ANSWERS.pt``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 256
EXTENSION = "hal_core.integrations.vllm.worker.WorkerExtension"
#: Options for :func:`carried_model`, whose heads of 16 channels are served by our pages alone.
CARRIED = {"quantization": "hal", "hal": {"numerics": "exact", "kv_cache": "fp32"}, "max_model_len": 128}


@dataclass(frozen=True)
class Answer:
    """tokens: the new ones. logits: float32 ``[new tokens, vocabulary]``. cached: prompt tokens that came from the prefix cache."""

    tokens: list[int]
    logits: torch.Tensor
    cached: int


def write_model(folder: Path, head_dim: int = 64, layers: int = 2, **changes) -> Path:
    """A small Qwen3-MoE of random float32 weights, with channels of keys that stand out as those of trained models do."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    fields = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "num_experts": 8, "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 1024, "tie_word_embeddings": False,
        "norm_topk_prob": True,
    }  # fmt: skip
    torch.manual_seed(11)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields | changes)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3 if "lm_head" in name else 0.06)
            elif "q_norm" in name or "k_norm" in name:
                parameter.uniform_(0.5, 2)
                parameter[3] = 6
    model.save_pretrained(folder)
    return folder


def carried_model(folder: Path) -> Path:
    """A writable copy of the small Qwen3-MoE that the repository carries, without the golden file, which vLLM would take for weights."""
    from golden import goldens

    target = goldens.copy("ar_sym_int4_g32_moe", folder / "model")
    (target / "golden.safetensors").unlink()
    return target


@contextlib.contextmanager
def engine(model: Path, *, hal: dict | None = None, **options) -> Iterator:
    """An engine that is gone afterwards, its memory and its process group too."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    fields = {
        "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4, "dtype": "float32", "seed": 0,
        "max_logprobs": -1, "logprobs_mode": "raw_logits", "disable_log_stats": False,
    }  # fmt: skip
    fields |= {} if hal is None else {"additional_config": {"hal": hal}}
    llm = None
    try:
        llm = LLM(str(model), **fields | options)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def ask(llm, prompts: list[list[int]], count: int = 6) -> list[Answer]:
    """``count`` greedy tokens for each prompt, all in one batch."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=count, temperature=0, logprobs=-1, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    return [Answer(list(o.outputs[0].token_ids), _rows(o.outputs[0].logprobs), o.num_cached_tokens) for o in outputs]


def _rows(logprobs) -> torch.Tensor:
    rows = torch.full((len(logprobs), VOCABULARY), float("nan"))
    for row, found in zip(rows, logprobs, strict=True):
        for token, value in found.items():
            row[token] = value.logprob
    return rows


def counter(llm, name: str) -> int:
    """A counter of the engine's, e.g. ``vllm:num_preemptions``."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def program(folder: Path, model: Path, options: dict, setting: dict, prefix: tuple = ()) -> subprocess.CompletedProcess:
    """The end of a program that asks an engine of its own; its answers are ``answers.pt`` in the folder."""
    job = folder / "job.json"
    job.write_text(json.dumps({"model": str(model), "options": options}))
    command = [sys.executable, *prefix, __file__, str(job), str(folder / "answers.pt")]
    return subprocess.run(command, env=os.environ | setting, capture_output=True, text=True, check=False)


def workers(count: int) -> dict[str, str]:
    """Settings for an engine with so many processes, one core each; skips the test where there are not as many cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        pytest.skip(f"{count} ranks need {count} processor cores, {len(cores)} may be used")
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores[:count]))}


def elsewhere(folder: Path, model: Path, prompts: list[list[int]], **options) -> tuple[list[Answer], list]:
    """What :func:`ask` says of an engine with workers of its own, and what every one of them says of itself."""
    options |= {"worker_extension_cls": EXTENSION, "prompts": prompts}
    done = program(folder, model, options, workers(options["tensor_parallel_size"]))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    answers, explained = torch.load(folder / "answers.pt")
    return [Answer(*answer) for answer in answers], explained


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    prompts = job["options"].pop("prompts", [[1, 2, 3]])
    with engine(Path(job["model"]), **job["options"]) as llm:
        answers = ask(llm, prompts)
        explained = llm.collective_rpc("hal_explain") if "worker_extension_cls" in job["options"] else []
        torch.save(([(a.tokens, a.logits, a.cached) for a in answers], explained), sys.argv[2])


if __name__ == "__main__":
    main()
