"""FlashInfer's CUTLASS experts of bf16 on sm_90, untuned and tuned: its own call, this backend's around it, and torch's product.

    python benchmarks/cuda_flashinfer_experts.py --cache TUNED.json [--json FILE] [--profile]

128 experts, hidden 2048, intermediate 768, 8 a token, one set of weights. A cache that is missing is made, which takes a minute.
FlashInfer's library must be there: tests/cuda/providers/experts_library.py builds it in part.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path

import torch
from cuda_calls import profiled
from cuda_providers import BY_NAME, DEVICE, OWN_KERNELS, TOKENS, graphed, routings, walled
from hal_backend_cuda.providers.tuner_cache import TunerCache

from hal_core.canonical import QuantizedTensor
from hal_core.kernel import MoEWeights
from hal_core.schemes import WeightScheme
from hal_core.spec import MoESpec

#: Of the untuned ones, which take milliseconds.
FEW = (1, 64, 1024)


def ops():
    """FlashInfer's and torch's, over the same weights."""
    scheme, shapes = WeightScheme.parse("bf16"), ((768, 2048), (2048, 768), (768, 2048))
    weights = MoEWeights(*(QuantizedTensor(scheme, (128, *s), (torch.randn(128, *s, device=DEVICE) / 45).bfloat16()) for s in shapes))
    grouped = next(kernel for kernel in OWN_KERNELS if kernel.name == "moe_grouped_mm")
    spec = MoESpec(128, 8, 2048, 768, scheme, scheme, scheme)
    return [kernel.prepare(spec, weights) for kernel in (BY_NAME["moe_flashinfer_cutlass_bf16"], grouped)]


def line(ours, grouped, tokens: int, tuned: bool) -> dict:
    x, way = (torch.randn(tokens, 2048, device=DEVICE) * 0.3).bfloat16(), routings(tokens, 1)[0]
    out, other = (torch.full_like(x, float("nan")) for _ in range(2))
    calls = {name: functools.partial(op.apply, x, way, out=y) for name, op, y in (("ours", ours, out), ("grouped", grouped, other))}
    calls["bare"] = functools.partial(ours.bound.target, **ours.arguments(x, way, out))
    calls["ours"]()
    calls["grouped"]()
    apart = float((out.double() - other.double()).norm() / other.double().norm())
    found = {f"{name}_graph_us": graphed([call]) for name, call in calls.items()}
    found |= {f"{name}_call_us": walled(call, 40) for name, call in calls.items()}
    return {"tokens": tokens, "tuned": tuned, "apart": apart, **{key: round(value, 1) for key, value in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    (ours, grouped), cache, results = ops(), TunerCache(options.cache), []

    def measure(rows, tuned):
        for tokens in rows:
            results.append(line(ours, grouped, tokens, tuned))
            print(results[-1], flush=True)

    measure(FEW, tuned=False)
    if not options.cache.exists():
        with cache.entered(tune=True):
            ours.apply(torch.randn(TOKENS[-1], 2048, device=DEVICE).bfloat16(), routings(TOKENS[-1], 1)[0])
    with cache.entered():
        measure(TOKENS, tuned=True)
        if options.profile:
            x, way = torch.randn(1, 2048, device=DEVICE).bfloat16(), routings(1, 1)[0]
            profiled(functools.partial(ours.apply, x, way, out=torch.empty_like(x)))
    if options.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        options.json.write_text(json.dumps({**machine, "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
