"""Decode speed of the CPU backend against torch's own int4 op, interleaved in one process.

    python benchmarks/cpu_decode.py [--json] [--rounds N] [--threads N] [--rows 1 4 64]

Linear: N=K=4096, int4 in groups of 128, bf16 activations, rotating through more weight copies than any cache holds.
Experts: 128 of hidden 2048 and intermediate 768, 8 per token, fresh random routing per call, against a Python loop over
the chosen experts with the same torch op (gate and up in one product, SiLU, down).

The machine may be shared: figures are taken over the calls during which the kernel preempted no thread of this process
("quiet"), if there are ten of them, and their share is printed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

import torch
from torch import Tensor
from torch.nn.functional import silu

from hal_backend_cpu import _native

GROUP = 128
TORCH_MM = torch.ops.aten._weight_int4pack_mm_for_cpu
TORCH_PACK = torch.ops.aten._convert_weight_to_int4pack_for_cpu


class Quantized:
    """One random int4 matrix with zero points, in the layouts of both contestants."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
        scales = (torch.rand(n, k // GROUP) * 0.01 + 0.001).to(torch.bfloat16)
        zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8)
        self.values = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        self.scales, self.zeros = scales, zeros
        self.torch_codes = TORCH_PACK(codes, 1)
        offsets = (8 - zeros.float()) * scales.float()
        self.torch_scales = torch.stack([scales, offsets.to(torch.bfloat16)], -1).transpose(0, 1).contiguous()

    def torch_mm(self, x: Tensor) -> Tensor:
        return TORCH_MM(x, self.torch_codes, GROUP, self.torch_scales)


def packed(matrices: list[Quantized]) -> tuple[Tensor, Tensor, Tensor]:
    """The packed tensors of a list of experts."""
    first = matrices[0]
    values = torch.stack([m.values for m in matrices])
    scales, zeros = torch.stack([m.scales for m in matrices]), torch.stack([m.zeros for m in matrices])
    assert all(m.n == first.n for m in matrices)
    return _native.pack(values, first.k, 4), _native.pack_groups(scales), _native.pack_groups(zeros)


def preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def duel(ours, theirs, rounds: int) -> dict[str, object]:
    """Alternates the two calls, which take the round number; milliseconds and their ratio."""
    times: tuple[list[tuple[bool, float]], list[tuple[bool, float]]] = ([], [])
    for i in range(rounds + 5):
        order = ((0, ours), (1, theirs)) if i % 2 else ((1, theirs), (0, ours))
        for which, call in order:
            before, start = preemptions(), time.perf_counter()
            call(i)
            elapsed = (time.perf_counter() - start) * 1e3
            if i >= 5:
                times[which].append((preemptions() == before, elapsed))

    def spread(samples: list[tuple[bool, float]]) -> dict[str, float]:
        quiet = [elapsed for undisturbed, elapsed in samples if undisturbed]
        values = quiet if len(quiet) >= 10 else [elapsed for _, elapsed in samples]
        q = statistics.quantiles(values, n=20)
        return {
            "min_ms": min(values), "median_ms": statistics.median(values), "p5_ms": q[0], "p95_ms": q[-1],
            "quiet_calls": len(quiet), "calls": len(samples),
        }  # fmt: skip

    mine, other = spread(times[0]), spread(times[1])
    return {
        "ours": mine,
        "torch": other,
        "speedup_median": other["median_ms"] / mine["median_ms"],
        "speedup_min": other["min_ms"] / mine["min_ms"],
    }


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def linear(rows: int, rounds: int, isa: str) -> dict[str, object]:
    n = k = 4096
    base = Quantized(n, k)
    codes, scales, zeros = (t[0] for t in packed([base]))
    copies = 24
    mine = [(codes.clone(), scales.clone(), zeros.clone()) for _ in range(copies)]
    other = [(base.torch_codes.clone(), base.torch_scales.clone()) for _ in range(copies)]
    x = torch.randn(rows, k).to(torch.bfloat16)
    op = _native.ops.linear

    def ours(i: int) -> Tensor:
        c, s, z = mine[i % copies]
        return op(x, c, s, z, None, None, None, n, k, GROUP, 4, isa)

    def theirs(i: int) -> Tensor:
        w, s = other[i % copies]
        return TORCH_MM(x, w, GROUP, s)

    error = relative(ours(0), theirs(0))
    result = duel(ours, theirs, rounds)
    size = codes.numel() * 4 + scales.numel() * 2 + zeros.numel()
    gbs = size / result["ours"]["median_ms"] / 1e6
    return {"what": "linear 4096x4096", "rows": rows, **result, "ours_gb_per_s": gbs, "difference": error}


def experts(rows: int, rounds: int, isa: str) -> dict[str, object]:
    count, hidden, inner, chosen = 128, 2048, 768, 8
    gate_up = [Quantized(2 * inner, hidden) for _ in range(count)]
    down = [Quantized(hidden, inner) for _ in range(count)]
    gc, gs, gz = packed(gate_up)
    # Tiles of gate lie before those of up, since 768 is a whole number of tiles.
    half = inner // 16
    gate = tuple(t[:, :half].contiguous() for t in (gc, gs, gz))
    up = tuple(t[:, half:].contiguous() for t in (gc, gs, gz))
    dn = packed(down)
    x = torch.randn(rows, hidden).to(torch.bfloat16)
    routes = []
    for _ in range(64):
        ids = torch.stack([torch.randperm(count)[:chosen] for _ in range(rows)]).to(torch.int32)
        routes.append((ids, torch.softmax(torch.randn(rows, chosen), -1)))

    def ours(i: int) -> Tensor:
        ids, weights = routes[i % 64]
        return _native.ops.moe(
            x, ids, weights, *gate, None, None, None, *up, None, None, None, *dn, None, None, None, None, count, inner,
            GROUP, GROUP, GROUP, 4, 4, 4, "silu", None, None, 1.0, False, True, isa,
        )  # fmt: skip

    def theirs(i: int) -> Tensor:
        # Another round's routing: neither contestant finds the other's experts in the cache, nor its own.
        ids, weights = routes[(i + 32) % 64]
        out = torch.zeros(rows, hidden)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            rows_in = x if rows == 1 else x[token]
            g, u = gate_up[e].torch_mm(rows_in).chunk(2, -1)
            y = down[e].torch_mm(silu(g) * u)
            out.index_add_(0, token, y.float() * weights[token, slot, None])
        return out.to(torch.bfloat16)

    error = relative(ours(32), theirs(0))
    result = duel(ours, theirs, rounds)
    sets = [ids.unique().numel() for ids, _ in routes]
    size = sum(t.numel() * t.element_size() for t in (*gate, *up, *dn)) / count * statistics.mean(sets)
    gbs = size / result["ours"]["median_ms"] / 1e6
    return {"what": "experts 128x2048x768 top 8", "rows": rows, **result, "ours_gb_per_s": gbs, "difference": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--only", choices=("linear", "experts"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    isa = _native.preferred_isa() if options.isa == "auto" else options.isa
    results = []
    for rows in options.rows:
        rounds = max(10, options.rounds // max(1, rows // 8))
        for name, run in (("linear", linear), ("experts", experts)):
            if options.only in {None, name}:
                results.append(run(rows, rounds, isa))
    if options.json:
        print(json.dumps({"isa": isa, "threads": options.threads, "torch": torch.__version__, "results": results}, indent=1))
        return
    print(f"isa {isa}, {options.threads} threads, torch {torch.__version__}; ms as median (min, 5th to 95th percentile)")
    for r in results:
        mine, other = (
            f"{t['median_ms']:.3f} ({t['min_ms']:.3f}, {t['p5_ms']:.3f}-{t['p95_ms']:.3f}; {t['quiet_calls']}/{t['calls']} quiet)"
            for t in (r["ours"], r["torch"])
        )
        print(
            f"{r['what']}, {r['rows']} rows: ours {mine}, {r['ours_gb_per_s']:.1f} GB/s; torch {other}; "
            f"{r['speedup_median']:.2f} times as fast (by minima {r['speedup_min']:.2f}); difference {r['difference']:.1e}"
        )


if __name__ == "__main__":
    main()
