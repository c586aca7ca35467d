"""Golden checkpoints served by vLLM: logits of the golden prompt.

As a program, one of several ranks that serve the same goldens one after another, each in one process of its own that imports vLLM once:
``vllm_goldens.py JOB.json ANSWERS.pt RANK``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from golden import goldens
from vllm_engine import engine

#: Head sizes of vLLM's own attention on a CPU; others are served by our pages alone.
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def served_folder(name: str) -> Path:
    """The checkpoint without its golden file, which vLLM would load as one of its own."""
    target = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=goldens.unpack_root()))
    for path in goldens.folder(name).iterdir():
        if path.name != "golden.safetensors":
            (target / path.name).symlink_to(path)
    return target


def head_size(name: str) -> int:
    config = goldens.config(name)
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def golden_options(name: str, **options) -> dict:
    """Options under which a golden is served exactly, by whatever attention has its head size."""
    hal = {"numerics": "exact"} | ({} if head_size(name) in HEAD_SIZES else {"kv_cache": "fp32"})
    return {"quantization": "hal", "hal": hal, "max_model_len": 128} | options


def prompt_logits(llm, ids: list[int]) -> torch.Tensor:
    """float32 ``[tokens, vocabulary]``, a row for each position of the prompt."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, logprobs=-1, detokenize=False, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": ids}], wanted, use_tqdm=False)
    rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    return torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])


def golden(name: str) -> tuple[list[int], torch.Tensor]:
    """The prompt, and transformers' float32 logits on the dequantized weights."""
    from safetensors.torch import load_file

    stored = load_file(goldens.folder(name) / "golden.safetensors")
    return stored["input_ids"].flatten().tolist(), stored["logits"].flatten(0, -2).float()


def serve(name: str, options: dict) -> torch.Tensor:
    """Logits of the golden prompt."""
    with engine(served_folder(name), **golden_options(name, **options)) as llm:
        return prompt_logits(llm, golden(name)[0])


def serve_on_ranks(folder: Path, jobs: list[tuple[str, dict]], ranks: int = 2) -> list[torch.Tensor]:
    """Logits of each job, served by so many processes of one core each."""
    job, found = folder / "job.json", folder / "answers.pt"
    job.write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    setting = {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, sorted(os.sched_getaffinity(0))[:ranks])), "PYTHONPATH": str(Path(__file__).parent),
    }  # fmt: skip
    if "PYTHONPATH" in os.environ:
        setting["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(job), str(found), str(rank)],
            env=os.environ | setting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=(folder / f"rank{rank}.log").open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait() for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0] * ranks, "".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(ranks))
    return torch.load(found)


def main() -> None:
    job, found, rank = sys.argv[1:]
    ranks = int(os.environ["WORLD_SIZE"])
    options = {"tensor_parallel_size": ranks, "distributed_executor_backend": "external_launcher"}
    answers = [serve(name, options | own) for name, own in json.loads(Path(job).read_text())]
    if rank == "0":
        torch.save(answers, found)


if __name__ == "__main__":
    main()
