"""Times of the Triton kernels on a CUDA GPU, in CUDA graphs over rotating weights, beside torch's and (if installed) Humming's.

python benchmarks/cuda_moe.py                      # the tables of docs/backend-cuda.md
python benchmarks/cuda_moe.py --sweep moe dense    # every tile of a grid, for hal_core/triton/configs.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from hal_core.triton import launch, ops
from hal_core.triton.configs import Tile, moe_tile
from hal_core.triton.launch import Epilogue, FloatMatrix, IntegerMatrix
from hal_core.triton.ops import Experts

E, H, INNER, K = 128, 2048, 768, 8
MOE_ROWS = (1, 4, 16, 64, 256, 1024, 4096)
DENSE_ROWS = (1, 4, 16, 64, 128, 512, 1024, 4096)
DENSE_SIZES = ((4096, 4096), (12288, 4096))
BF = torch.bfloat16
DEVICE = "cuda"


def graph_us(calls, count: int = 10, replays: int = 12) -> float:
    """Median microseconds of one of ``calls``, taken in turn inside a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(count):
            calls[index % len(calls)]()
    found = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop) * 1000 / count)
    return sorted(found)[replays // 2]


def integer_matrix(lead: tuple[int, ...], n: int, k: int, group: int = 128, bits: int = 4) -> IntegerMatrix:
    """Random codes: every bit pattern is a weight."""
    step = 512 // bits
    words = torch.randint(-(2**31), 2**31 - 1, (*lead, k // step, n, 16), dtype=torch.int32, device=DEVICE)
    scales = (torch.rand(*lead, k // group, n, device=DEVICE) * 0.01 + 0.005).to(BF)
    return IntegerMatrix(words, scales, None, None, None, None, n, k, group, bits)


def integer_experts(group: int = 128) -> Experts:
    up, gate, down = integer_matrix((E,), INNER, H, group), integer_matrix((E,), INNER, H, group), integer_matrix((E,), H, INNER, group)
    return Experts(up, down, gate, "silu", 0.0, None, E, E, 1.0, False, scratch=launch.sort_scratch(E, torch.device(DEVICE)))


def float_experts() -> Experts:
    shapes = ((INNER, H), (INNER, H), (H, INNER))
    up, gate, down = (FloatMatrix((torch.randn(E, *s, device=DEVICE) / 45).to(BF), None, None) for s in shapes)
    return Experts(up, down, gate, "silu", 0.0, None, E, E, 1.0, False, scratch=launch.sort_scratch(E, torch.device(DEVICE)))


def fp8_matrix(lead: tuple[int, ...], n: int, k: int, blocks: bool) -> FloatMatrix:
    """Random e4m3 weights with a scale for every block of 128x128, or for every output."""
    weight = torch.randn(*lead, n, k, device=DEVICE).to(torch.float8_e4m3fn)
    grid = (-(-n // 128), -(-k // 128)) if blocks else (n,)
    return FloatMatrix(weight, torch.rand(*lead, *grid, device=DEVICE) * 0.02 + 0.01, None, (128, 128) if blocks else None)


def fp8_experts(blocks: bool) -> Experts:
    up, gate, down = (fp8_matrix((E,), n, k, blocks) for n, k in ((INNER, H), (INNER, H), (H, INNER)))
    return Experts(up, down, gate, "silu", 0.0, None, E, E, 1.0, False, scratch=launch.sort_scratch(E, torch.device(DEVICE)))


def fp8_linears(n: int, k: int) -> dict[str, dict[int, float]]:
    """A linear by block scales and by row scales, and torch's scaled product with what quantizes its rows."""
    copies = max(2, 300 * 2**20 // (n * k))
    blocks, rows = ([fp8_matrix((), n, k, kind) for _ in range(copies)] for kind in (True, False))
    found: dict[str, dict[int, float]] = {"blocks": {}, "rows": {}, "scaled_mm": {}}
    for m in DENSE_ROWS:
        x = torch.randn(m, k, device=DEVICE).to(BF)
        out = torch.empty(m, n, dtype=BF, device=DEVICE)
        calls = {
            "blocks": [partial(ops.float_linear, x, w, out, 128) for w in blocks],
            "rows": [partial(ops.float_linear, x, w, out) for w in rows], "scaled_mm": [partial(scaled_mm, x, w) for w in rows],
        }  # fmt: skip
        for name, each in calls.items():
            found[name][m] = round(graph_us(each, max(10, copies)), 2)
    return found


def scaled_mm(x, weight: FloatMatrix):
    """torch's product, after this project's quantizer of rows."""
    codes, scales = launch.quantize_fp8(x, None)
    return torch._scaled_mm(codes, weight.weight.t(), scale_a=scales, scale_b=weight.scales[None, :], out_dtype=BF)


def inputs(rows: int):
    torch.manual_seed(rows)  # the same routing for everybody
    x = torch.randn(rows, H, device=DEVICE).to(BF)
    ids = torch.rand(rows, E, device=DEVICE).topk(K, dim=1).indices.to(torch.int32).contiguous()
    weights = torch.softmax(torch.randn(rows, K, device=DEVICE), dim=1)
    return x, ids, weights


def whole_us(sets: list[Experts], rows: int, tiles=None) -> float:
    x, ids, weights = inputs(rows)
    out = torch.empty_like(x)
    return graph_us([lambda e=e: ops.moe(x, ids, weights, None, e, out, tiles) for e in sets])


def parts_us(sets: list[Experts], rows: int, first: Tile, second: Tile) -> tuple[float, float]:
    """The two products alone."""
    x, ids, weights = inputs(rows)
    flag = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    slots = rows * K
    inner, outer = torch.randn(slots, INNER, device=DEVICE).to(BF), torch.empty(slots, H, dtype=BF, device=DEVICE)
    product = ops._product

    def route(bm):
        few = slots <= ops._DIRECT
        return launch.direct(ids, weights, None, E, E) if few else launch.sorted_by_expert(ids, weights, None, E, E, bm, flag)

    one, two = route(first.rows), route(second.rows)
    a = graph_us([lambda e=e: product(x, None, inner, e.up, e.gate, one, first, K, Epilogue("silu"), 128) for e in sets])
    b = graph_us([lambda e=e: product(inner, None, outer, e.down, None, two, second, 1, Epilogue(router="output"), 128) for e in sets])
    return a, b


#: (outputs, warps, stages, scales applied to weights)
FEW = ((64, 4, 3, False), (64, 4, 5, False), (128, 4, 3, False), (128, 4, 4, False), (64, 4, 3, True), (128, 4, 3, True), (128, 8, 3, True))
MANY = ((64, 4, 3, True), (64, 4, 4, True), (128, 8, 3, True), (128, 8, 4, True), (64, 8, 3, True), (128, 4, 3, True), (64, 4, 4, False))
PLAIN = ((64, 4, 3, False), (64, 4, 4, False), (128, 8, 3, False), (128, 8, 4, False), (64, 8, 4, False), (128, 4, 3, False))


#: (rows, rows beside them, outputs, warps, stages, scales applied to weights): tiles that are no power of two, for experts.
BESIDE = (
    (32, 16, 64, 4, 3, False), (32, 16, 64, 4, 4, False), (32, 16, 128, 4, 3, True), (64, 16, 64, 4, 3, False), (64, 16, 64, 4, 4, False),
    (64, 16, 64, 4, 3, True), (64, 16, 64, 4, 4, True), (64, 16, 128, 8, 3, False), (64, 16, 128, 8, 4, False), (64, 16, 128, 8, 3, True),
    (64, 16, 128, 4, 3, True), (64, 32, 64, 4, 3, True), (64, 32, 128, 8, 3, True), (64, 32, 128, 8, 3, False), (128, 32, 128, 8, 3, True),
    (128, 16, 128, 8, 3, True), (128, 16, 64, 4, 3, True), (128, 32, 64, 8, 3, True), (128, 64, 128, 8, 3, True),
)  # fmt: skip


def moe_grid(rows: int, floats: bool) -> list[Tile]:
    per = rows * K / min(E, rows * K)
    bms = (16,) if per <= 4 else (16, 32) if per <= 16 else (32, 64, 128) if per <= 64 else (64, 128, 256)
    shapes = PLAIN if floats else MANY if per > 16 else FEW
    bks = (64, 128) if floats else (64,)
    found = [Tile(bm, bn, w, s, 1, bk, scaled) for bm, (bn, w, s, scaled), bk in itertools.product(bms, shapes, bks)]
    beside = BESIDE if per > 16 and not floats else ()
    return found + [Tile(bm, bn, w, s, weights=scaled, extra=extra) for bm, extra, bn, w, s, scaled in beside]


def dense_grid(rows: int) -> list[Tile]:
    bms = (16,) if rows <= 16 else (32, 64) if rows <= 64 else (64, 128)
    shapes = FEW[:3] if rows <= 16 else (*MANY, (64, 4, 3, False))
    splits = (2, 4, 6, 8) if rows <= 16 else (1, 2, 4)
    return [Tile(bm, bn, w, s, split, 64, scaled) for bm, (bn, w, s, scaled), split in itertools.product(bms, shapes, splits)]


def sweep_moe(rows_list, floats: bool, mine: tuple[int, int], seconds: float) -> list[dict]:
    """Both products with every tile of the grid; ``mine`` (i, n): only every n-th, to compile in n processes."""
    sets = [float_experts() if floats else integer_experts() for _ in range(1 if mine[1] > 1 else 2)]
    found = []
    for index, (rows, tile) in enumerate((r, t) for r in rows_list for t in moe_grid(r, floats)):
        if index % mine[1] != mine[0] or time.time() > seconds:
            continue
        try:
            a, b = parts_us(sets, rows, tile, tile)
        except Exception as error:  # noqa: BLE001 - a tile that does not fit is a finding
            found.append({"rows": rows, "tile": asdict(tile), "error": f"{type(error).__name__}: {error}"[:200]})
            continue
        found.append({"rows": rows, "tile": asdict(tile), "up_us": round(a, 2), "down_us": round(b, 2)})
    return found


def linear_us(weights: list[IntegerMatrix], x, out, tile: Tile | None) -> float:
    """One linear, over all weights in turn; with the table's tile when none is given."""

    def call(weight):
        return ops.integer_linear(x, weight, out) if tile is None else ops._linear(x, None, weight, out, tile, 128)

    return graph_us([lambda w=w: call(w) for w in weights], max(10, len(weights)))


def sweep_dense(rows_list, mine: tuple[int, int], seconds: float) -> list[dict]:
    found, jobs = [], [(s, r, t) for s in DENSE_SIZES for r in DENSE_ROWS if r in rows_list for t in dense_grid(r)]
    made = {}
    for index, ((n, k), rows, tile) in enumerate(jobs):
        if index % mine[1] != mine[0] or time.time() > seconds:
            continue
        copies = 1 if mine[1] > 1 else max(2, 300 * 2**20 // (n * k // 2))
        weights = made.setdefault((n, k), [integer_matrix((), n, k) for _ in range(copies)])
        x = torch.randn(rows, k, device=DEVICE).to(BF)
        out = torch.empty(rows, n, dtype=BF, device=DEVICE)
        try:
            us = linear_us(weights, x, out, tile)
        except Exception as error:  # noqa: BLE001 - a tile that does not fit is a finding
            found.append({"n": n, "k": k, "rows": rows, "tile": asdict(tile), "error": f"{type(error).__name__}: {error}"[:200]})
            continue
        found.append({"n": n, "k": k, "rows": rows, "tile": asdict(tile), "us": round(us, 2)})
    return found


def best(found: list[dict], keys: tuple[str, ...], value: str, most: int = 4) -> None:
    groups: dict[tuple, list[dict]] = {}
    for row in found:
        if value in row:
            groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    for key, rows in groups.items():
        for row in sorted(rows, key=lambda r: r[value])[:most]:
            t = row["tile"]
            shown = f"bm{t['bm']}+{t['extra']} bn{t['bn']} w{t['warps']} s{t['stages']} split{t['split']}{' weights' * t['weights']}"
            print(f"{value} {key}: {row[value]:8.2f}  {shown}")


def around_us(rows: int) -> dict[str, float]:
    """What stands beside the products: sorting, and the sum over slots."""
    x, ids, weights = inputs(rows)
    flag, y = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.randn(rows * K, H, device=DEVICE).to(BF)
    route = launch.direct(ids, weights, None, E, E)
    scratch = launch.sort_scratch(E, ids.device)
    sort = graph_us([lambda: launch.sorted_by_expert(ids, weights, None, E, E, 32, flag, scratch)])
    return {"sort_us": round(sort, 2), "sum_us": round(graph_us([lambda: launch.sum_slots(y, x, route, 1.0)]), 2)}


def grouped_mm_us(rows: int) -> float:
    """torch's own two products with bfloat16 experts: rows sorted by expert as a random routing gives them, nothing around them."""
    _, ids, _ = inputs(rows)
    ends = torch.bincount(ids.flatten().long(), minlength=E).cumsum(0).to(torch.int32)
    x, inner = (torch.randn(rows * K, k, device=DEVICE).to(BF) for k in (H, INNER))
    sizes = ((2 * INNER, H), (H, INNER))
    sets = [[torch.randn(E, n, k, device=DEVICE).to(BF).transpose(1, 2) for n, k in sizes] for _ in range(2)]

    def both(pair):
        return torch._grouped_mm(x, pair[0], offs=ends), torch._grouped_mm(inner, pair[1], offs=ends)

    return graph_us([lambda w=w: both(w) for w in sets])


def switched_us(sets: list[Experts], rows: int, name: str, value: float) -> float:
    """The whole op with one of its thresholds elsewhere."""
    kept = getattr(ops, name)
    setattr(ops, name, value)
    try:
        return round(whole_us(sets, rows), 2)
    finally:
        setattr(ops, name, kept)


def humming_moe() -> dict[int, float] | str:
    """Humming's two products with its own configurations, as its documentation calls them; or why not."""
    try:
        from humming.layer import HummingLayer, HummingLayerMethod
    except ImportError as error:
        return f"not installed: {error}"
    config = {"dtype": "int4", "group_size": 128}
    sets = []
    for _ in range(2):
        sizes = ((2 * INNER, H), (H, INNER))
        layers = [HummingLayer(shape_n=n, shape_k=k, weight_config=config, num_experts=E, torch_dtype=BF).to(DEVICE) for n, k in sizes]
        for layer in layers:
            for parameter in layer.parameters():
                if parameter.dtype == torch.int32:
                    parameter.data.random_(-(2**31), 2**31 - 1)
                else:
                    parameter.data.fill_(0.01)
            layer.transform()
        sets.append(layers)
    out = {}
    for rows in MOE_ROWS:
        x, ids, _ = inputs(rows)
        calls = []
        for layers in sets:
            steps = []
            for layer, source, top in ((layers[0], x, K), (layers[1], torch.randn(rows * K, INNER, device=DEVICE).to(BF), 1)):
                table = HummingLayerMethod.get_default_tuning_configs(layer, gemm_type="indexed")
                chosen = next(c for low, high, c in table if low < rows * K <= high or (low <= rows * K <= high))
                bm = chosen["block_shape"][0]
                flag = torch.zeros(2, dtype=torch.int64, device=DEVICE)
                slots, experts, padded = humming_sort(ids, bm, flag)
                steps.append(
                    lambda layer=layer, source=source, top=top, s=slots, e=experts, p=padded: HummingLayerMethod.forward_layer(
                        layer, source, sorted_ids=s, expert_ids=e, num_tokens_padded=p, top_k=top, compute_config={"gemm_type": "indexed"}
                    )
                )
            calls.append(lambda steps=steps: [step() for step in steps])
        out[rows] = round(graph_us(calls), 2)
    return out


def humming_sort(ids, bm: int, flag):
    """Slots sorted by expert and padded to whole tiles, as its indexed products take them."""
    flat = ids.flatten().long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=E)
    tiles = (counts + bm - 1) // bm
    slots = torch.full((int(tiles.sum()) * bm,), flat.numel(), dtype=torch.int32, device=DEVICE)
    starts = (tiles.cumsum(0) - tiles) * bm
    rank = torch.arange(flat.numel(), device=DEVICE) - (counts.cumsum(0) - counts)[flat[order]]
    slots[starts[flat[order]] + rank] = order.int()
    experts = torch.repeat_interleave(torch.arange(E, device=DEVICE), tiles).int()
    return slots, experts, torch.tensor([slots.numel()], dtype=torch.int32, device=DEVICE)


def tables(wanted: list[str]) -> dict:
    out: dict = {}
    if "moe" in wanted:
        sets = [integer_experts() for _ in range(2)]
        rows = {}
        for m in MOE_ROWS:
            up, down = moe_tile(launch.arch_of(torch.device(DEVICE)), m * K / min(E, m * K))
            rows[m] = {"whole_us": round(whole_us(sets, m), 2), "products_us": round(sum(parts_us(sets, m, up, down)), 2), **around_us(m)}
            print("int4 g128 experts", m, rows[m], flush=True)
        out["moe_int4_g128"] = rows
        out["unsorted"] = {m: {few: switched_us(sets, m, "_DIRECT", few) for few in (0, 1 << 10)} for m in (1, 2, 4, 8, 16, 32, 64)}
        print("sorted (0) or each slot a tile of its own", out["unsorted"], flush=True)
    if "bf16" in wanted:
        sets = [float_experts() for _ in range(2)]
        out["moe_bf16"] = {m: round(whole_us(sets, m), 2) for m in MOE_ROWS}
        out["grouped_mm"] = {m: round(grouped_mm_us(m), 2) for m in MOE_ROWS}
        print("bf16 experts", out["moe_bf16"], "grouped_mm", out["grouped_mm"], flush=True)
    if "fp8" in wanted:
        for name in ("blocks", "rows"):
            sets = [fp8_experts(name == "blocks") for _ in range(2)]
            out[f"moe_fp8_{name}"] = {m: round(whole_us(sets, m), 2) for m in MOE_ROWS}
            print(f"fp8 experts by {name}", out[f"moe_fp8_{name}"], flush=True)
        out["linear_fp8_4096_4096"] = fp8_linears(4096, 4096)
        print("fp8 linear 4096 4096", out["linear_fp8_4096_4096"], flush=True)
    if "dense" in wanted:
        for n, k in DENSE_SIZES:
            weights = [integer_matrix((), n, k) for _ in range(max(2, 300 * 2**20 // (n * k // 2)))]
            row = {}
            for m in DENSE_ROWS:
                x = torch.randn(m, k, device=DEVICE).to(BF)
                y = torch.empty(m, n, dtype=BF, device=DEVICE)
                row[m] = round(linear_us(weights, x, y, None), 2)
            out[f"dense_{n}_{k}"] = row
            print("int4 g128 linear", n, k, row, flush=True)
    if "humming" in wanted:
        out["humming_moe"] = humming_moe()
        print("Humming experts", out["humming_moe"], flush=True)
    return out


def warm(part: str, rows: list[int], count: int) -> None:
    """Compiles in several processes; the measurement then finds everything in Triton's cache."""
    command = [sys.executable, __file__, "--sweep", part, "--rows", *map(str, rows), "--share"]
    jobs = [subprocess.Popen([*command, f"{i}/{count}"], stdout=subprocess.DEVNULL) for i in range(count)]
    for job in jobs:
        job.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["moe", "bf16", "fp8", "dense", "humming"])
    parser.add_argument("--sweep", nargs="*", default=[])
    parser.add_argument("--share", default="")
    parser.add_argument("--rows", type=int, nargs="*", default=list(MOE_ROWS))
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    mine = tuple(int(v) for v in arguments.share.split("/")) if arguments.share else (0, 1)
    until, result = time.time() + arguments.seconds, {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d")}
    result["versions"] = {"torch": torch.__version__, "triton": __import__("triton").__version__, "python": platform.python_version()}
    result["gpu"] = torch.cuda.get_device_name()
    for part in arguments.sweep:
        begin = time.time()
        if not arguments.share:
            warm(part, arguments.rows, min(12, os.cpu_count() or 1))
        print(f"compiled {part} in {time.time() - begin:.0f} s", flush=True)
        found = sweep_dense(arguments.rows, mine, until) if part == "dense" else sweep_moe(arguments.rows, part == "bf16", mine, until)
        result[f"sweep_{part}"] = found
        if part == "dense":
            best(found, ("n", "k", "rows"), "us")
        else:
            best(found, ("rows",), "up_us")
            best(found, ("rows",), "down_us")
        print(f"swept {part} in {time.time() - begin:.0f} s", flush=True)
    if not arguments.sweep:
        result.update(tables(arguments.parts))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
