"""The CPU backend's levels against each other on experts and linears, from one row to prefill, interleaved in one process.

    python benchmarks/cpu_moe.py [--what moe|NxK] [--group 128] [--rows 1 4 16 64 256 1024] [--words amx:group avx512bf16 ...]
                                 [--threads 2] [--seconds 1] [--torch] [--json FILE]

Experts: 128 of hidden 2048 and intermediate 768, 8 a token, another random routing in each call; linear: as many copies as no
cache holds. int4, symmetric, bf16 scales. ``--torch`` adds torch's own int4 op: for experts a Python loop over the chosen ones.
The read probe and the arithmetic peaks run between the contestants of each size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from hal_backend_cpu import _native

EXPERTS, HIDDEN, INNER, CHOSEN, ROUTES = 128, 2048, 768, 8, 32
READ, BUFFER = 1 << 27, 1 << 30
TORCH_MM = torch.ops.aten._weight_int4pack_mm_for_cpu
TORCH_PACK = torch.ops.aten._convert_weight_to_int4pack_for_cpu
Packed = tuple[Tensor, Tensor]
Call = Callable[[int], object]


@dataclass(frozen=True)
class Case:
    """What one size measures: the contestants by name, bytes that they read and operations that they do."""

    rows: int
    calls: dict[str, Call]
    size: float
    operations: float


def packed(lead: tuple[int, ...], n: int, k: int, group: int) -> Packed:
    values = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8)
    scales = (torch.randn(*lead, n, k // group) * 0.01).to(torch.bfloat16)
    return _native.pack(values, k, 4), _native.pack_groups(scales)


def nbytes(parts: Packed) -> int:
    return sum(t.numel() * t.element_size() for t in parts)


def torch_weights(count: int, n: int, k: int, group: int) -> list[Packed]:
    scales = torch.rand(k // group, n, 2).to(torch.bfloat16) * 0.01
    return [(TORCH_PACK(torch.randint(0, 16, (n, k), dtype=torch.int32), 1), scales) for _ in range(count)]


def expert_cases(options: argparse.Namespace) -> Iterator[Case]:
    group = options.group
    gate, up, down = (packed((EXPERTS,), n, k, group) for n, k in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)))
    loop = [torch_weights(EXPERTS, *shape, group) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))] if options.torch else []
    none = (None, None, None, None)
    size = sum(map(nbytes, (gate, up, down))) / EXPERTS
    for rows in options.rows:
        x = torch.randn(rows, HIDDEN).to(torch.bfloat16)
        ids = [torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(rows)]).to(torch.int32) for _ in range(ROUTES)]
        weights = torch.softmax(torch.randn(rows, CHOSEN), -1)

        def native(word: str, shift: int, x: Tensor = x, ids: list[Tensor] = ids, weights: Tensor = weights) -> Call:
            fixed = (*gate, *none, *up, *none, *down, *none, None, EXPERTS, INNER, group, group, group, 4, 4, 4, "silu", None, None)

            def call(turn: int) -> Tensor:
                # each contestant finds other experts in the cache than it asks for
                return _native.ops.moe(x, ids[(turn + shift) % ROUTES], weights, *fixed, 1.0, False, True, word)

            return call

        def looped(i: int, x: Tensor = x, ids: list[Tensor] = ids, weights: Tensor = weights) -> Tensor:
            chosen, out = ids[(i + 5) % ROUTES], torch.zeros(x.shape[0], HIDDEN)
            for e in chosen.unique().tolist():
                token, slot = torch.where(chosen == e)
                g, u = TORCH_MM(x[token], loop[0][e][0], group, loop[0][e][1]).chunk(2, -1)
                y = TORCH_MM(silu(g) * u, loop[1][e][0], group, loop[1][e][1])
                out.index_add_(0, token, y.float() * weights[token, slot, None])
            return out

        calls = {word: native(word, 11 * i) for i, word in enumerate(options.words)}
        hit = statistics.mean(each.unique().numel() for each in ids)
        yield Case(rows, {**calls, **({"torch loop": looped} if loop else {})}, hit * size, 6.0 * rows * CHOSEN * HIDDEN * INNER)


def linear_cases(options: argparse.Namespace) -> Iterator[Case]:
    n, k = map(int, options.what.split("x"))
    group = options.group
    copies = [packed((), n, k, group) for _ in range(max(2, int(4e8 / (n * k / 2))))]
    others = torch_weights(len(copies), n, k, group) if options.torch else []
    turn = iter(range(1 << 62))
    for rows in options.rows:
        x = torch.randn(rows, k).to(torch.bfloat16)

        def native(word: str, x: Tensor = x) -> Call:
            return lambda _: _native.ops.linear(x, *copies[next(turn) % len(copies)], None, None, None, None, n, k, group, 4, word)

        def theirs(i: int, x: Tensor = x) -> Tensor:
            return TORCH_MM(x, others[i % len(others)][0], group, others[i % len(others)][1])

        calls = {word: native(word) for word in options.words}
        yield Case(rows, {**calls, **({"torch": theirs} if others else {})}, nbytes(copies[0]), 2.0 * rows * n * k)


class Ceilings:
    """Bytes and operations a second that the machine gives, measured in passing."""

    def __init__(self) -> None:
        self.buffer = torch.ones(BUFFER, dtype=torch.uint8)
        self.peaks = [pair.split(":") for pair in _native.ops.probe_peaks().split(",")]
        self.read: list[float] = []
        self.speed: dict[str, list[float]] = {name: [] for _, name in self.peaks}

    def measure(self, i: int) -> None:
        start = time.perf_counter()
        _native.ops.probe_read(self.buffer, i * READ % BUFFER, READ, (1, 4)[i % 2])
        self.read.append(READ / (time.perf_counter() - start))
        for name, found in self.speed.items():
            start = time.perf_counter()
            done = _native.ops.probe_peak(name, 20000)
            found.append(done / (time.perf_counter() - start))


def timed(case: Case, seconds: float, ceilings: Ceilings) -> dict[str, list[float]]:
    """Milliseconds of each call but the first, contestants in turn."""
    times: dict[str, list[float]] = {name: [] for name in case.calls}
    end, i = time.time() + seconds * len(case.calls), 0
    while time.time() < end or i < 4:
        for name, call in case.calls.items():
            start = time.perf_counter()
            call(i)
            times[name].append((time.perf_counter() - start) * 1e3)
        if i % 16 == 0:
            ceilings.measure(i // 16)
        i += 1
    return {name: values[1:] for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="moe")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--words", nargs="+", default=[*(f"{level}:group" for level in _native.int8_levels()), _native.preferred_isa()])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ceilings = Ceilings()
    for case in (expert_cases if options.what == "moe" else linear_cases)(options):
        for name, values in timed(case, options.seconds, ceilings).items():
            middle, least = statistics.median(values), min(values)
            row = {
                "what": options.what, "group": options.group, "threads": options.threads, "rows": case.rows, "contestant": name,
                "median_ms": middle, "min_ms": least, "calls": len(values), "gb_per_s": case.size / middle / 1e6,
                "best_gb_per_s": case.size / least / 1e6, "tera_ops_per_s": case.operations / middle / 1e9,
            }  # fmt: skip
            print(
                f"{options.what} g{options.group} {case.rows:5d} rows {name:18s} {middle:9.3f} ms (min {least:.3f}, {len(values)} calls) "
                f"{row['gb_per_s']:6.1f} GB/s {row['tera_ops_per_s']:7.3f} TOP/s",
                flush=True,
            )
            if options.json:
                with Path(options.json).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    read = sorted(ceilings.read)
    print(f"read probe: median {statistics.median(read) / 1e9:.1f}, 95th percentile {read[int(len(read) * 0.95)] / 1e9:.1f} GB/s")
    for name, found in ceilings.speed.items():
        print(f"{name}: median {statistics.median(found) / 1e12:.2f}, best {max(found) / 1e12:.2f} TOP/s")


if __name__ == "__main__":
    main()
