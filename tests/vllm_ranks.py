"""Logits of a prompt as vLLM computes them: in this process, or on several ranks.

As a program, one of the ranks, which serve the same models one after another and import vLLM once each: ``vllm_ranks.py JOBS.json
ANSWERS.pt``, with torchrun's variables.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from vllm_engine import engine


@dataclass(frozen=True)
class Job:
    """A model, a prompt, and options of the engine."""

    model: str
    ids: list[int]
    options: dict = field(default_factory=dict)


def prompt_logits(job: Job, **options) -> torch.Tensor:
    """float32 ``[tokens, vocabulary]``, a row for each position of the prompt."""
    with engine(Path(job.model), **{"quantization": "hal", "max_model_len": 128} | job.options | options) as llm:
        return logits_of(llm, job.ids)


def logits_of(llm, ids: list[int]) -> torch.Tensor:
    """The same of an engine that is there."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, logprobs=-1, detokenize=False, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": ids}], wanted, use_tqdm=False)
    rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    return torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])


def on_ranks(folder: Path, jobs: list[Job], ranks: int = 2) -> list[torch.Tensor]:
    """Logits of each job from so many processes of one core each; ``folder`` takes their files."""
    work, found = folder / "jobs.json", folder / "answers.pt"
    work.write_text(json.dumps([asdict(job) for job in jobs]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    setting = {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, sorted(os.sched_getaffinity(0))[:ranks])),
    }  # fmt: skip
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(work), str(found)], env=os.environ | setting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log.open("w"), stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    try:
        codes = [process.wait() for process in started]
    finally:
        for process in started:
            process.kill()
        for left in Path("/dev/shm").glob(f"{port}-*"):
            left.unlink()
    assert codes == [0] * ranks, "".join(log.read_text()[-3000:] for log in logs)
    return torch.load(found)


def _name_shared_memory() -> None:
    """vLLM calls the memory that its ranks share by the last part of its start method, which is the same for all of torchrun's runs."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    usual = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda own: f"{os.environ['MASTER_PORT']}-{usual(own).lstrip('/')}")


def main() -> None:
    _name_shared_memory()
    work, found = sys.argv[1:]
    options = {"tensor_parallel_size": int(os.environ["WORLD_SIZE"]), "distributed_executor_backend": "external_launcher"}
    answers = []
    for job in json.loads(Path(work).read_text()):
        answers.append(prompt_logits(Job(**job), **options))
        if os.environ["RANK"] == "0":  # after each: a run that is cut short leaves what it found
            torch.save(answers, found)


if __name__ == "__main__":
    main()
