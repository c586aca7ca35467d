"""Humming's products on an NVIDIA GPU: numerics against the float32 reference, and what this backend adds to their own calls.

    python benchmarks/cuda_providers.py [--parts numerics,experts,groups,dense,..] [--json FILE]

``graph`` and experts' times are CUDA graphs over weights in rotation; ``call`` is wall time of calls one after another. "Bare" is
the provider's own launch with all it needs at hand: for experts the two indexed products alone. Parts: the functions of ``PARTS``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import math
import statistics
import time
import traceback
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
from hal_backend_cuda.kernels import KERNELS as OWN_KERNELS
from hal_backend_cuda.providers.humming import runtime
from hal_backend_cuda.providers.kernels import KERNELS
from hal_backend_cuda.providers.steps import Route

from hal_core.canonical import QuantizedTensor
from hal_core.dtypes import torch_dtype
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.ops import Grouped, Routed
from hal_core.reference.linear import ReferenceLinear
from hal_core.reference.moe import ReferenceMoE
from hal_core.schemes import ActivationScheme, Granularity, WeightScheme
from hal_core.spec import Activation, LinearSpec, MoESpec
from hal_core.testing.data import random_input, random_weight, to_device

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
OWN_LINEAR = next(kernel for kernel in OWN_KERNELS if kernel.name == "linear_triton")
DEVICE = torch.device("cuda", 0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
LINEAR_ROWS = (1, 4, 16, 64, 128, 512, 1024, 4096)
RECIPES = [
    ("w4a16", "int4:g128"), ("w4a16", "int4:g32:zero"), ("w4a16", "int4:channel"), ("w8a16", "int8:g128"), ("w4a8_int8", "int4:g128"),
    ("w4a8_fp8", "int4:g128"), ("w8a8", "int8:channel"), ("fp8_block", "fp8_e4m3:b128x128"), ("fp8_channel", "fp8_e4m3:channel"),
    ("fp8_a16", "fp8_e4m3:b128x128"), ("mxfp4", "mxfp4:g32"), ("nvfp4", "nvfp4:g16"),
]  # fmt: skip
RESULTS: list[dict] = []
WHOLE_COMPILE = runtime.HummingMatrix.compile
WHOLE_TABLE = runtime.Problem.table


def record(part, **found):
    RESULTS.append({"part": part, **found})
    print(part, " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in found.items()), flush=True)


def serve_only(*counts):
    """Compile only the tiles that serve these numbers of rows: a table has dozens."""

    def compile_some(self, rows):
        kept = [row for row in rows if any(row[0] < count <= row[1] for count in counts)]
        ends = [0, *(row[1] for row in kept[:-1]), 1 << 30]
        WHOLE_COMPILE(self, [(ends[i], ends[i + 1], row[2]) for i, row in enumerate(kept)])

    runtime.HummingMatrix.compile, runtime.Problem.table = compile_some, WHOLE_TABLE


def few_tiles():
    """Two tiles a product, one for few rows and one for many, so that all recipes compile in a minute."""

    def table(self, configuration, device):
        tile = {m: runtime.library().heuristics(configuration, shape_m=m, gemm_type=self.gemm, device=device) for m in (8, 600)}
        return [(0, 16, tile[8]), (16, 1 << 30, tile[600])]

    runtime.HummingMatrix.compile, runtime.Problem.table = WHOLE_COMPILE, table


def graphed(calls, repeats=20):
    """Microseconds of one call: a graph of all of them, replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        stream.synchronize()
        times = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            for _ in range(repeats):
                graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / repeats / len(calls))
    return statistics.median(times)


def walled(call, count=300):
    """Microseconds of one call outside graphs, calls one after another."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6 / count)
    return statistics.median(times)


def error(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def activation_scheme(kernel):
    quant = kernel.numerics.activations
    return ActivationScheme(quant[0].dtype, Granularity.parse(quant[0].granularity)) if quant else None


def numerics_linear(name, text):
    kernel, rng, scheme = BY_NAME[f"linear_humming_{name}"], torch.Generator().manual_seed(len(name + text)), WeightScheme.parse(text)
    dtype = kernel.dtypes[0]
    spec = LinearSpec(384, 1152, scheme, numerics=kernel.numerics, dtype=dtype, bias=True)
    weight = to_device(random_weight(scheme, (384, 1152), rng, dtype), DEVICE)
    weights = LinearWeights(weight, torch.randn(384, generator=rng).to(DEVICE))
    op, exact = kernel.prepare(spec, weights), ReferenceLinear().prepare(spec, weights)
    same = ReferenceLinear().prepare(replace(spec, activations=activation_scheme(kernel)), weights)
    for m in (1, 33, 300):
        x = random_input((m, 1152), rng, dtype, outliers=True).to(DEVICE)
        out = torch.full((m, 384), math.nan, dtype=torch_dtype(dtype), device=DEVICE)
        op.apply(x, out=out)
        found, to_exact = error(out, same.apply(x.float())), error(out, exact.apply(x.float()))
        record("numerics", op="linear", kernel=kernel.name, scheme=text, m=m, error=found, to_exact=to_exact, bound=kernel.error_bound)
    other = LinearWeights(to_device(random_weight(scheme, (384, 1152), rng, dtype), DEVICE), torch.zeros(384, device=DEVICE))
    op.update(other)
    pairs = zip(op.buffers(), kernel.prepare(spec, other).buffers(), strict=True)
    record("update", kernel=kernel.name, scheme=text, equal=all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs))


def small_experts(kernel, scheme, dtype, rng, mapped):
    activation = Activation("swiglu_oai", 1.702, 7.0) if "mxfp4" in kernel.name else Activation()
    spec = MoESpec(
        16, 3, 384, 256, scheme, scheme, scheme, activation=activation, numerics=kernel.numerics, dtype=dtype, bias=True,
        expert_map=mapped, local_experts=9 if mapped else None, routed_scaling=1.5,
    )  # fmt: skip
    gate, up, down = (random_weight(scheme, (spec.local, *shape), rng, dtype) for shape in ((256, 384), (256, 384), (384, 256)))
    if up.global_scale is not None:
        up = replace(up, global_scale=gate.global_scale)
    biases = [torch.randn(spec.local, n, generator=rng).to(DEVICE) * 0.3 for n in (256, 256, 384)]
    return spec, MoEWeights(*(to_device(t, DEVICE) for t in (up, down, gate)), *biases)


def numerics_experts(name, text):
    kernel, rng, scheme = BY_NAME[f"moe_humming_{name}"], torch.Generator().manual_seed(len(name + text)), WeightScheme.parse(text)
    dtype, mapped = kernel.dtypes[0], name == "w4a16"
    spec, weights = small_experts(kernel, scheme, dtype, rng, mapped)
    op = kernel.prepare(spec, weights)
    same = ReferenceMoE().prepare(replace(spec, activations=activation_scheme(kernel)), weights)
    places = torch.full((16,), -1, dtype=torch.int32, device=DEVICE)
    places[::2], places[15] = torch.arange(8, dtype=torch.int32, device=DEVICE), 8
    ways = {"expert_map": places if mapped else None}
    for tokens in (1, 2, 11, 200, 700):
        x = random_input((tokens, 384), rng, dtype, outliers=True).to(DEVICE)
        ids = torch.stack([torch.randperm(16, generator=rng)[:3] for _ in range(tokens)]).int()
        ids[torch.rand(ids.shape, generator=rng) < 0.1] = -1
        routing = Routed(ids.to(DEVICE), torch.rand(tokens, 3, generator=rng).to(DEVICE))
        for reduce in (True, False):
            out = torch.full((tokens, 384) if reduce else (tokens, 3, 384), math.nan, dtype=torch_dtype(dtype), device=DEVICE)
            op.apply(x, routing, out=out, reduce=reduce, **ways)
            wanted = same.apply(x.float(), routing, reduce=reduce, **ways)
            found = error(out, wanted) if float(wanted.norm()) else float(out.float().norm())
            record("numerics", op="moe", kernel=kernel.name, scheme=text, m=tokens, reduce=reduce, error=found, bound=kernel.error_bound)


def numerics():
    few_tiles()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [(job, case, pool.submit(job, *case)) for job in (numerics_linear, numerics_experts) for case in RECIPES]
        for job, case, done in jobs:
            if problem := done.exception():
                record("failed", of=job.__name__, case=case, problem=f"{type(problem).__name__}: {problem}"[:300])


def copy_rate():
    """GB/s of a copy, read and written bytes together."""
    source = torch.empty(1 << 28, dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / graphed([lambda: target.copy_(source)], 5) / 1e3


def routings(tokens, count, experts=128, top_k=8):
    rng, out = torch.Generator().manual_seed(tokens), []
    for _ in range(count):
        ids = torch.rand(tokens, experts, generator=rng).topk(top_k, dim=1).indices.int().to(DEVICE)
        out.append(Routed(ids, torch.rand(tokens, top_k, generator=rng).to(DEVICE)))
    return out


def big_weight(scheme, shape, rng):
    """Random codes and scales near 0.01, made on the device."""
    n, k = shape[-2:]
    codes = torch.randint(0, 256, (*shape[:-2], n, k * scheme.bits // 8), dtype=torch.uint8, device=DEVICE, generator=rng)
    scales = (torch.rand(*shape[:-2], n, k // scheme.granularity.group, device=DEVICE, generator=rng) * 0.01 + 0.005).bfloat16()
    return QuantizedTensor(scheme, shape, codes, scales)


class Sorted:
    """One experts op with all that its two products need for one routing: what "bare" launches."""

    def __init__(self, op, routing, x):
        self.op, count = op, routing.topk_ids.numel()
        self.route = Route(routing.topk_ids, routing.topk_weights, op.spec.num_experts, op.spec.local)
        self.places = (op.blocks.block(count), op.blocks.capacity(count, op.spec.local))
        self.order = op.steps.sort(self.route, *self.places)
        self.wide, self.slots = (torch.zeros(count, n, dtype=torch.bfloat16, device=DEVICE) for n in (op.wide, op.spec.hidden))
        self.codes, self.scales = runtime.quantize_rows(op.recipe, x)
        self.thin, self.thin_scales = runtime.quantize_rows(op.recipe, op.steps.activate(self.wide, op.spec.activation, True))
        self.out = torch.empty_like(x)

    def both(self):
        self.op.first.launch(self.codes, self.scales, self.wide, self.order, top_k=self.op.spec.top_k)
        self.op.second.launch(self.thin, self.thin_scales, self.slots, self.order)

    def steps(self):
        steps, spec = self.op.steps, self.op.spec
        calls = {
            "sort": lambda: steps.sort(self.route, *self.places), "activate": lambda: steps.activate(self.wide, spec.activation, True),
            "reduce": lambda: steps.reduce(self.slots, self.route, 1.0, self.out),
        }  # fmt: skip
        return {f"{name}_us": graphed([call] * 4) for name, call in calls.items()}


def experts_of(tokens, ops, rate):
    """The whole op beside its bare products; the target is theirs and 9 us, or 8 us and the bytes of what lies between."""
    x = (torch.randn(tokens, 2048, device=DEVICE) * 0.3).bfloat16()
    out, routes = torch.empty_like(x), routings(tokens, 4)
    pairs = [(ops[i % 2], route) for i, route in enumerate(routes)]
    whole = graphed([functools.partial(op.apply, x, route, out=out) for op, route in pairs])
    ready = [Sorted(op, route, x) for op, route in pairs]
    bare = graphed([each.both for each in ready])
    moved = 2 * tokens * (8 * (1536 + 768 + 2048) + 2048)
    allowed = bare + (9 if tokens <= 64 else 8 + moved / (0.75 * rate * 1e3))
    call = walled(functools.partial(ops[0].apply, x, routes[0], out=out), 100)
    record("experts", recipe=ops[0].recipe.name, m=tokens, whole_us=whole, bare_us=bare, added_us=whole - bare, allowed_us=allowed,
           met=whole <= allowed, call_us=call, **ready[0].steps())  # fmt: skip


def experts(name="w4a16"):
    serve_only(*(8 * t for t in TOKENS))
    rate, kernel, scheme = copy_rate(), BY_NAME[f"moe_humming_{name}"], WeightScheme.parse("int4:g128")
    record("copy", gb_s=rate)
    spec = MoESpec(128, 8, 2048, 768, scheme, scheme, scheme, numerics=kernel.numerics)
    rng, ops = torch.Generator(device=DEVICE).manual_seed(0), []
    begin = time.perf_counter()
    for _ in range(2):
        up, gate, down = (big_weight(scheme, (128, *shape), rng) for shape in ((768, 2048), (768, 2048), (2048, 768)))
        ops.append(kernel.prepare(spec, MoEWeights(up, down, gate)))
    record("prepare", kernel=kernel.name, seconds=time.perf_counter() - begin)
    for tokens in TOKENS:
        experts_of(tokens, ops, rate)


def groups():
    """Rows that the caller has sorted by expert: the whole op, and its two bare products."""
    serve_only(*(8 * t for t in TOKENS))
    kernel, scheme, rng = BY_NAME["moe_humming_w4a16"], WeightScheme.parse("int4:g128"), torch.Generator(device=DEVICE).manual_seed(0)
    spec, ops = MoESpec(128, 8, 2048, 768, scheme, scheme, scheme, routing="grouped", numerics=kernel.numerics), []
    for _ in range(2):
        up, gate, down = (big_weight(scheme, (128, *shape), rng) for shape in ((768, 2048), (768, 2048), (2048, 768)))
        ops.append(kernel.prepare(spec, MoEWeights(up, down, gate)))
    for tokens in TOKENS:
        x = (torch.randn(8 * tokens, 2048, device=DEVICE) * 0.3).bfloat16()
        counts = [torch.bincount(way.topk_ids.flatten().long(), minlength=128).int() for way in routings(tokens, 4)]
        wide, out = (torch.zeros(8 * tokens, n, dtype=torch.bfloat16, device=DEVICE) for n in (1536, 2048))
        whole = [functools.partial(ops[i % 2].apply, x, Grouped(each), out=out) for i, each in enumerate(counts)]
        bounds = [ops[0].steps.bounds(each, out) for each in counts]
        bare = [functools.partial(grouped_products, ops[i % 2], x, each, wide, out) for i, each in enumerate(bounds)]
        record("groups", m=tokens, rows=8 * tokens, whole_us=graphed(whole), bare_us=graphed(bare), call_us=walled(whole[0], 100))


def grouped_products(op, x, bounds, wide, out):
    op.first.launch(x, None, wide, bounds)
    op.second.launch(wide.view(-1, 768)[: len(x)], None, out, bounds)


def dense_of(n, k, count):
    """Humming's linear and its bare launches beside this backend's own Triton kernel, over the same weights in rotation."""
    serve_only(*LINEAR_ROWS)
    scheme, rng = WeightScheme.parse("int4:g128"), torch.Generator(device=DEVICE).manual_seed(0)
    weights = [LinearWeights(big_weight(scheme, (n, k), rng)) for _ in range(count)]
    ops, own = ([kernel.prepare(LinearSpec(n, k, scheme), w) for w in weights] for kernel in (BY_NAME["linear_humming_w4a16"], OWN_LINEAR))
    for m in LINEAR_ROWS:
        x = torch.randn(m, k, device=DEVICE, generator=rng).bfloat16()
        out = torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
        whole, triton = ([functools.partial(op.apply, x, out=out) for op in found] for found in (ops, own))
        bare = [functools.partial(op.matrix.launch, x, None, out) for op in ops]
        found = {"graph_us": graphed(whole), "bare_graph_us": graphed(bare), "triton_graph_us": graphed(triton)}
        found |= {"triton_ratio": found["triton_graph_us"] / found["bare_graph_us"]}
        record("dense", n=n, k=k, m=m, **found, call_us=walled(whole[0]), bare_call_us=walled(bare[0]))


def dense():
    dense_of(4096, 4096, 32)
    dense_of(12288, 4096, 12)


PARTS = {
    "numerics": numerics, "experts": experts, "experts_int8": functools.partial(experts, "w4a8_int8"), "groups": groups, "dense": dense,
}  # fmt: skip


def run(about, parts, default):
    """What a benchmark's command line asks for: some of its ``parts``, their results as JSON."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--parts", default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    wanted = ("torch", "triton", "humming-kernels", "flashinfer-python")
    installed = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    versions = {name: installed.get(name, "none") for name in wanted}
    record("machine", device=torch.cuda.get_device_name(0), date=time.strftime("%Y-%m-%d"), **versions)
    for part in options.parts.split(","):
        begin = time.perf_counter()
        try:
            parts[part]()
        except Exception as problem:  # noqa: BLE001 - one part that fails must not hide the others
            traceback.print_exc()
            record("failed", of=part, problem=f"{type(problem).__name__}: {problem}"[:300])
        record("took", of=part, seconds=time.perf_counter() - begin)
        if options.json:
            options.json.write_text(json.dumps(RESULTS, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(__doc__, PARTS, "numerics,experts,groups,dense")
