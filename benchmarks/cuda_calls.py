"""What a call costs the processor: each op's ``apply`` beside the provider's own calls with all they need at hand, outside CUDA graphs.

    python benchmarks/cuda_calls.py [--json FILE] [--parts humming_linear,experts,..] [--profile]

``issue``: until a call returns, the GPU working on. ``call``: calls one after another, the GPU's time included where it is longer.
``own``: the provider's calls alone; of this project's Triton kernels the same launches by Triton's own launcher. ``plain``: ours without
recorded calls.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import pstats
import statistics
import time
from pathlib import Path
from unittest import mock

import torch
from cuda_attention import Cache
from cuda_providers import BY_NAME, DEVICE, Sorted, big_weight, routings, runtime, serve_only
from hal_backend_cuda.kernels import KERNELS

from hal_core.canonical import QuantizedTensor
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.schemes import WeightScheme
from hal_core.spec import LinearSpec, MoESpec
from hal_core.triton import launch
from hal_core.triton.repeat import Repeats

OWN = {kernel.name: kernel for kernel in KERNELS}
ROWS = (1, 4, 16, 64, 256)
RESULTS: list[dict] = []


def timed(call, count: int = 60, rounds: int = 9) -> tuple[float, float]:
    """Median microseconds of a call until it returns, and with the wait for all of them shared out."""
    for _ in range(20):
        call()
    issue, whole = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        issue.append((time.perf_counter() - begin) * 1e6 / count)
        torch.cuda.synchronize()
        whole.append((time.perf_counter() - begin) * 1e6 / count)
    return statistics.median(issue), statistics.median(whole)


def plain(call) -> tuple[float, float]:
    """As :func:`timed`, without recorded calls."""
    with mock.patch.object(Repeats, "__call__", lambda self, key, tensors, call: call()):
        return timed(call)


def compared(name: str, rows: int, apply, own, profile: bool) -> None:
    """One line: ours, theirs and the difference."""
    (issue, call), (own_issue, own_call), (plain_issue, plain_call) = timed(apply), timed(own), plain(apply)
    found = {"issue_us": issue, "own_issue_us": own_issue, "call_us": call, "own_call_us": own_call, "over_us": call - own_call}
    found |= {"plain_issue_us": plain_issue, "plain_call_us": plain_call}
    RESULTS.append({"op": name, "rows": rows, **{key: round(value, 2) for key, value in found.items()}})
    print(name, rows, " ".join(f"{key}={value:.1f}" for key, value in found.items()), flush=True)
    if profile and rows == ROWS[0]:
        profiled(apply)


def profiled(call) -> None:
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(300):
        call()
    watch.disable()
    torch.cuda.synchronize()
    pstats.Stats(watch).sort_stats("tottime").print_stats(22)


def humming_linear(profile: bool) -> None:
    serve_only(*ROWS)
    rng, scheme = torch.Generator(device=DEVICE).manual_seed(0), WeightScheme.parse("int4:g128")
    for recipe in ("w4a16", "w4a8_int8"):
        kernel = BY_NAME[f"linear_humming_{recipe}"]
        spec = LinearSpec(4096, 4096, scheme, numerics=kernel.numerics)
        op = kernel.prepare(spec, LinearWeights(big_weight(scheme, (4096, 4096), rng)))
        for m in ROWS:
            x, out = torch.randn(m, 4096, device=DEVICE).bfloat16(), torch.empty(m, 4096, dtype=torch.bfloat16, device=DEVICE)
            codes, scales = runtime.quantize_rows(op.recipe, x)
            own = functools.partial(op.matrix.launch, codes, scales, out)
            compared(kernel.name, m, functools.partial(op.apply, x, out=out), own, profile)


def experts_weights(rng) -> MoEWeights:
    scheme = WeightScheme.parse("int4:g128")
    up, gate, down = (big_weight(scheme, (128, *shape), rng) for shape in ((768, 2048), (768, 2048), (2048, 768)))
    return MoEWeights(up, down, gate)


def humming_experts(profile: bool) -> None:
    serve_only(*(8 * rows for rows in ROWS))
    rng, scheme = torch.Generator(device=DEVICE).manual_seed(0), WeightScheme.parse("int4:g128")
    for recipe in ("w4a16", "w4a8_int8"):
        kernel = BY_NAME[f"moe_humming_{recipe}"]
        op = kernel.prepare(MoESpec(128, 8, 2048, 768, scheme, scheme, scheme, numerics=kernel.numerics), experts_weights(rng))
        for m in ROWS:
            x, way = (torch.randn(m, 2048, device=DEVICE) * 0.3).bfloat16(), routings(m, 1)[0]
            out = torch.empty_like(x)
            compared(kernel.name, m, functools.partial(op.apply, x, way, out=out), Sorted(op, way, x).both, profile)


def launches_of(call) -> list:
    """The launches of one call, each by Triton's own launcher."""
    found, kept = [], launch.run

    def note(kernel, grid, values, warps, stages):
        found.append(functools.partial(kernel[grid], **values, num_warps=warps, num_stages=stages))
        kept(kernel, grid, values, warps, stages)

    launch.run = note
    try:
        call()
    finally:
        launch.run = kept
    return found


def all_of(calls) -> None:
    for call in calls:
        call()


def triton(profile: bool) -> None:
    rng, scheme = torch.Generator(device=DEVICE).manual_seed(0), WeightScheme.parse("int4:g128")
    linear = OWN["linear_triton"].prepare(LinearSpec(4096, 4096, scheme), LinearWeights(big_weight(scheme, (4096, 4096), rng)))
    experts = OWN["moe_triton"].prepare(MoESpec(128, 8, 2048, 768, scheme, scheme, scheme), experts_weights(rng))
    for m in ROWS:
        x, out = torch.randn(m, 4096, device=DEVICE).bfloat16(), torch.empty(m, 4096, dtype=torch.bfloat16, device=DEVICE)
        apply = functools.partial(linear.apply, x, out=out)
        compared(
            "linear_triton", m, apply, functools.partial(all_of, launches_of(lambda op=linear, x=x, out=out: op.launch(x, out))), profile
        )
        x, way = (torch.randn(m, 2048, device=DEVICE) * 0.3).bfloat16(), routings(m, 1)[0]
        out = torch.empty_like(x)
        own = launches_of(lambda op=experts, x=x, out=out, way=way: op.launch(x, way.topk_ids, way.topk_weights, None, out))
        compared("moe_triton", m, functools.partial(experts.apply, x, way, out=out), functools.partial(all_of, own), profile)


def fp8_weight(shape, rng) -> QuantizedTensor:
    values = torch.randn(shape, device=DEVICE, generator=rng).to(torch.float8_e4m3fn)
    return QuantizedTensor(WeightScheme.parse("fp8_e4m3:channel"), shape, values, torch.rand(*shape[:-1], 1, device=DEVICE) * 0.01 + 0.01)


def scaled_mm(profile: bool) -> None:
    kernel, rng = OWN["linear_scaled_mm"], torch.Generator(device=DEVICE).manual_seed(0)
    weight = fp8_weight((4096, 4096), rng)
    op = kernel.prepare(LinearSpec(4096, 4096, weight.scheme, numerics=kernel.numerics), LinearWeights(weight))
    for m in ROWS:
        x, out = torch.randn(m, 4096, device=DEVICE).bfloat16(), None
        codes, scales = launch.quantize_fp8(x, None)
        own = functools.partial(
            torch._scaled_mm, codes, op.view.weight.t(), scale_a=scales, scale_b=op.view.scales[None, :], out_dtype=torch.bfloat16
        )
        compared(kernel.name, m, functools.partial(op.apply, x, out=out), own, profile)


def grouped_mm(profile: bool) -> None:
    kernel, scheme = OWN["moe_grouped_mm"], WeightScheme.parse("bf16")
    shapes = ((768, 2048), (768, 2048), (2048, 768))
    up, gate, down = (QuantizedTensor(scheme, (128, *s), (torch.randn(128, *s, device=DEVICE) / 45).bfloat16()) for s in shapes)
    op = kernel.prepare(MoESpec(128, 8, 2048, 768, scheme, scheme, scheme, numerics=kernel.numerics), MoEWeights(up, down, gate))
    for m in ROWS:
        x, way = (torch.randn(m, 2048, device=DEVICE) * 0.3).bfloat16(), routings(m, 1)[0]
        out = torch.empty_like(x)
        ends = torch.bincount(way.topk_ids.flatten().long(), minlength=128).cumsum(0).int()
        rows, inner = (torch.randn(8 * m, k, device=DEVICE).bfloat16() for k in (2048, 768))
        pairs = [(r, w.values.transpose(-1, -2)) for r, w in ((rows, up), (rows, gate), (inner, down))]
        own = functools.partial(all_of, [functools.partial(torch._grouped_mm, r, w, offs=ends) for r, w in pairs])
        compared(kernel.name, m, functools.partial(op.apply, x, way, out=out), own, profile)


def attention(profile: bool) -> None:
    for kind in ("bf16", "fp8"):
        for batch, context in ((64, 4096), (1, 32768), (1, 128)):
            c = Cache(kind, batch, context)
            own = functools.partial(c.plan(graph=False).run, c.q, c.op.cache(c.pages), k_scale=1.0, v_scale=1.0, out=c.out)
            compared(f"attend_only {kind} {context}", batch, c.attend_only, own, False)
            own = functools.partial(own, return_lse=True)
            compared(f"attend {kind} {context}", batch, c.attend, own, profile and context == 128)


PARTS = {f.__name__: f for f in (humming_linear, humming_experts, triton, scaled_mm, grouped_mm, attention)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    for part in options.parts.split(","):
        PARTS[part](options.profile)
        if options.json:
            machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
            options.json.write_text(json.dumps({**machine, "results": RESULTS}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
