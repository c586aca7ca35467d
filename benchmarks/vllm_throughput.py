"""Tokens a second inside vLLM: hal-core's kernels against vLLM's own int4 path, two engines taking turns.

    python benchmarks/vllm_throughput.py [--model FOLDER] [--layers 4] [--batches 1 16] [--prompt 256] [--new 32] [--rounds 5]
        [--contestants own hal hal+kv] [--eager] [--wait] [--json FILE]

Runs in an environment that has vllm (docs/vllm.md). Unless a checkpoint is given, one is written to a temporary folder: a Qwen3-MoE of
random weights, 128 experts of hidden 2048 and intermediate 768, 8 a token, int4 in groups of 128 as GPTQ stores them.

Every contestant is an engine in a process of its own, with the same cores, bf16 activations and no prefix cache; one works while the
others wait, in another order each round. ``own`` is what vLLM does with the checkpoint: int4 weights, int8 activations. Without AMX it
refuses to, though its kernels run: there its check is lifted, and the output says so. ``hal`` is quantization="hal" with int8 numerics,
``hal+kv`` the same over int8 pages. Prefill: prompt tokens by the time to the first token of the last request. Decode: the tokens after
that. Times are the engine's own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch
from load_memory import GROUP, MOE, config, plain, shapes
from safetensors.torch import save_file

SEED = 20261129
HAL = {"quantization": "hal", "additional_config": {"hal": {"numerics": "int8"}}}
CONTESTANTS = {
    "own": {},
    "hal": HAL,
    "hal+kv": HAL | {"additional_config": {"hal": {"numerics": "int8", "kv_cache": "int8:token"}}},
}
TARGETS = {"decode": 1.0, "prefill": 1.5}
EXTENSION = "hal_core.integrations.vllm.worker.WorkerExtension"


def write_checkpoint(folder: Path, layers: int) -> Path:
    """A layer a file; scales and the rest of the size that keeps activations near 1, so that the router spreads its tokens."""
    fields = config(layers, moe=True)
    fields["quantization_config"] = {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "checkpoint_format": "gptq",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    draw, files = torch.Generator().manual_seed(SEED), {}
    for number, tensors in enumerate(_tensors(layers, draw)):
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def _tensors(layers: int, draw: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
    rest = plain(layers, moe=True)
    for layer in range(layers):
        at, found = f"model.layers.{layer}.", {}
        for name, (n, k) in shapes(layers, moe=True).items():
            if name.startswith(at):
                # codes of a uniform law have a deviation of 4.6
                scales = (0.5 + torch.rand(k // GROUP, n, generator=draw)) / (4.6 * k**0.5)
                found |= {
                    f"{name}.qweight": torch.randint(-(2**31), 2**31, (k // 8, n), dtype=torch.int32, generator=draw),
                    f"{name}.qzeros": torch.full((k // GROUP, n // 8), 0x77777777, dtype=torch.int32),
                    f"{name}.scales": scales.half(),
                }
        yield found | {name: _plain(name, shape, draw) for name, shape in rest.items() if name.startswith(at)}
    yield {name: _plain(name, shape, draw) for name, shape in rest.items() if ".layers." not in name}


def _plain(name: str, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=draw)
    scale = 1.0 if "embed" in name else shape[-1] ** -0.5
    return (1 + 0.1 * values if len(shape) == 1 else scale * values).bfloat16()


def serve(name: str, model: str, options: dict[str, int]) -> None:
    """A contestant's process: one batch for each line of JSON on standard input, answered with the times of the engine."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints
    from vllm import LLM

    chosen, ours = CONTESTANTS[name], CONTESTANTS[name].get("quantization") == "hal"
    note = "" if ours else let_in()
    llm = LLM(
        model, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=options["eager"], enable_prefix_caching=False,
        disable_log_stats=False,
        max_model_len=options["length"], max_num_seqs=options["batch"], max_num_batched_tokens=options["tokens"], seed=0,
        **({"worker_extension_cls": EXTENSION} if ours else {}), **chosen,
    )  # fmt: skip
    kernels = sorted({k for layers in llm.collective_rpc("hal_explain") for one in layers for k in one["kernels"]}) if ours else []
    answers.write(json.dumps({"kernels": kernels or [note]}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(batch(llm, **json.loads(line))) + "\n")
    llm.llm_engine.engine_core.shutdown()


def let_in() -> str:
    """Lift vLLM's demand for AMX from its int4 kernels, which have an AVX-512 path; returns what to call the result."""
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt4

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # nobody else asks for the tiles' permission
        return "vLLM itself"
    prepare = CPUWNA16LinearKernel.process_weights_after_loading

    def with_int8_activations(kernel: CPUWNA16LinearKernel, layer: torch.nn.Module) -> None:
        with unittest.mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=True):
            prepare(kernel, layer)

    CPUWNA16LinearKernel.process_weights_after_loading = with_int8_activations
    CPUExpertsInt4._supports_current_device = staticmethod(lambda: True)
    return "vLLM itself, its demand for AMX lifted"


def batch(llm: object, size: int, prompt: int, new: int, seed: int) -> dict[str, float]:
    """Tokens a second of ``size`` random prompts, all of them given at once."""
    from vllm import SamplingParams

    ids = torch.randint(0, MOE["vocab"], (size, prompt), generator=torch.Generator().manual_seed(seed)).tolist()
    wanted = SamplingParams(max_tokens=new, temperature=0, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": each} for each in ids], wanted, use_tqdm=False)
    times = [output.metrics for output in outputs]
    begin, first, last = min(t.scheduled_ts for t in times), max(t.first_token_ts for t in times), max(t.last_token_ts for t in times)
    # requests of a prompt that came in several steps decode while the last one waits
    early = sum(t.first_token_ts < first for t in times)
    return {"prefill": size * prompt / (first - begin), "decode": size * (new - 1) / (last - first), "early": early}


class Contestant:
    """An engine in a process of its own."""

    def __init__(self, name: str, model: Path, options: dict[str, int]) -> None:
        command = [sys.executable, __file__, "--serve", name, "--model", str(model), "--options", json.dumps(options)]
        setting = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1",
        }  # fmt: skip
        self.name, self.process = name, subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ) | setting
        )  # fmt: skip
        self.kernels = self._answer()["kernels"]

    def run(self, size: int, prompt: int, new: int, seed: int) -> dict[str, float]:
        self._pipe(self.process.stdin).write(json.dumps({"size": size, "prompt": prompt, "new": new, "seed": seed}) + "\n")
        self._pipe(self.process.stdin).flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self._pipe(self.process.stdout).readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self.process.wait()}; its messages are above")
        return json.loads(line)

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None  # asked for above
        return pipe

    def end(self) -> None:
        self._pipe(self.process.stdin).close()
        self.process.wait()


def contest(contestants: list[Contestant], arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Tokens a second by batch, contestant and phase; the first round warms up and does not count."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for size in arguments.batches:
        rows = found[str(size)] = {c.name: {"prefill": [], "decode": []} for c in contestants}
        for turn in range(arguments.rounds + 1):
            for contestant in contestants[turn % len(contestants) :] + contestants[: turn % len(contestants)]:
                times = contestant.run(size, arguments.prompt, arguments.new, SEED + turn)
                if turn:
                    for phase, values in rows[contestant.name].items():
                        values.append(times[phase])
        show(size, rows)
    return found


def show(size: int, rows: dict[str, dict[str, list[float]]]) -> None:
    own = {phase: statistics.median(values) for phase, values in rows.get("own", {}).items()}
    for name, phases in rows.items():
        parts = []
        for phase, values in phases.items():
            middle = statistics.median(values)
            ratio = f", {middle / own[phase]:.2f} x own" if own and name != "own" else ""
            parts.append(f"{phase} {middle:8.1f} tokens/s ({min(values):.1f} to {max(values):.1f}{ratio})")
        print(f"batch {size:3d}  {name:8s} {'   '.join(parts)}", flush=True)
        missed = [
            phase for phase, least in TARGETS.items() if own and name == "hal" and statistics.median(phases[phase]) < least * own[phase]
        ]
        for phase in missed:
            print(f"           {name} misses {TARGETS[phase]} x own in {phase}", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint that all contestants can serve")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=["own", "hal"])
    parser.add_argument("--eager", action="store_true", help="without vLLM's compilation")
    parser.add_argument("--wait", action="store_true", help="wait for a line on standard input once all engines are ready")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Write, start, measure, print."""
    arguments = parsed()
    if importlib.util.find_spec("vllm") is None:
        print("vllm is not installed here, see docs/vllm.md")
        return
    if arguments.serve:
        serve(arguments.serve, str(arguments.model), arguments.options)
        return
    widest = max(arguments.batches)
    options = {"length": arguments.prompt + arguments.new, "batch": widest, "tokens": widest * arguments.prompt, "eager": arguments.eager}
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or write_checkpoint(Path(folder) / "model", arguments.layers)
        begin = time.time()
        contestants = [Contestant(name, model, options) for name in arguments.contestants]
        for contestant in contestants:
            print(f"{contestant.name}: {', '.join(contestant.kernels)}")
        print(f"ready in {time.time() - begin:.0f} s", flush=True)
        if arguments.wait:
            sys.stdin.readline()
        found = contest(contestants, arguments)
        for contestant in contestants:
            contestant.end()
    if arguments.json:
        shown = {name: value for name, value in vars(arguments).items() if name in {"layers", "prompt", "new", "rounds", "eager"}}
        kernels = {contestant.name: contestant.kernels for contestant in contestants}
        arguments.json.write_text(json.dumps({"options": shown, "kernels": kernels, "tokens_per_second": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
