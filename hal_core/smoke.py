"""One tiny problem for a kernel, made from what it declares, against the reference. Run in a process of its own by ``isolated``."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hal_core.canonical import QuantizedTensor, pack_nibbles
from hal_core.dtypes import torch_dtype
from hal_core.kernel import EmbeddingKernel, Kernel, KVKernel, LinearKernel, LinearWeights, MoEKernel, MoEWeights
from hal_core.kv.trial import kv_trial, trial_specs
from hal_core.ops import Routed
from hal_core.reference.linear import ReferenceEmbedding, ReferenceLinear
from hal_core.reference.moe import ReferenceMoE
from hal_core.schemes import Granularity, GranularityKind, WeightScheme, ZeroKind
from hal_core.spec import Activation, EmbeddingSpec, KVCacheSpec, LinearSpec, MoESpec
from hal_core.verdicts import Trial

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from hal_core.machine import Machine

__all__ = ["random_weight", "try_kernel"]

#: Beyond this many times its declared bound a kernel is broken; how near it keeps to the bound is for the conformance kit.
_SLACK = 2.0
_TORCH_DEVICES = {"cpu": "cpu", "any": "cpu", "cuda": "cuda", "rocm": "cuda", "xpu": "xpu"}
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def try_kernel(name: str, kernel: Kernel[Any], machine: Machine) -> Trial:
    """``passed``, ``failed`` (it raised, or its numbers are wrong), or ``skipped`` with the reason."""
    spec, why = _accepted(kernel, machine)
    if spec is None:
        return Trial(name, "skipped", why)
    device = _TORCH_DEVICES[kernel.devices[0]]
    try:
        found, wanted = _run(kernel, spec, device)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return Trial(name, "failed", f"{spec}: {type(error).__name__}: {error}".splitlines()[0][:300])
    distance = float((found.float().cpu() - wanted.float()).norm() / wanted.float().norm())
    if not math.isfinite(distance) or distance > _SLACK * kernel.error_bound:
        shown = distance if math.isfinite(distance) else None
        return Trial(name, "failed", f"{spec}: relative error {distance:.3g}, its bound is {kernel.error_bound:g}", shown)
    return Trial(name, "passed", str(spec), distance)


def _accepted(kernel: Kernel[Any], machine: Machine) -> tuple[Any, str]:
    """The first spec that the kernel takes, or None and the first reasons that it gave."""
    why = "no tiny problem is known for this kind of kernel"
    for spec in itertools.islice(_specs(kernel), 200):
        reasons = kernel.refusals(spec, machine)
        if not reasons:
            return spec, ""
        why = "; ".join(f"[{reason.code}] {reason.found}" for reason in reasons[:3])
    return None, why


def _schemes(kernel: Kernel[Any]) -> Iterator[WeightScheme]:
    group = math.lcm(32, kernel.schemes.group_multiple)
    shapes = {
        GranularityKind.GROUP: Granularity.groups(group), GranularityKind.CHANNEL: Granularity.channel(),
        GranularityKind.TENSOR: Granularity.tensor(), GranularityKind.BLOCK: Granularity.blocks(128, 128),
    }  # fmt: skip
    for dtype in kernel.schemes.dtypes:
        if dtype in ("bf16", "fp16", "fp32"):
            yield WeightScheme(dtype)
        elif dtype.startswith("int") or dtype in _FP8:
            zeros = kernel.schemes.zeros if dtype.startswith("int") else (ZeroKind.NONE,)
            for kind, zero in itertools.product(shapes, zeros):
                if kind in kernel.schemes.granularities:
                    yield WeightScheme(dtype, shapes[kind], zero)


def _specs(kernel: Kernel[Any]) -> Iterator[Any]:
    does = replace(kernel.numerics, deterministic=False, batch_invariant=False)
    if isinstance(kernel, KVKernel):
        yield from trial_specs(kernel, does)
        return
    sizes = {limit.dim: limit for limit in kernel.limits}

    def size(dim: str, wanted: int) -> int:
        limit = sizes.get(dim)
        step = 1 if limit is None else limit.multiple
        return -(-max(wanted, 1 if limit is None else limit.least) // step) * step

    for scheme, dtype in itertools.product(_schemes(kernel), kernel.dtypes):
        if isinstance(kernel, LinearKernel):
            yield LinearSpec(size("n", 128), size("k", 256), scheme, None, does, dtype)
        elif isinstance(kernel, EmbeddingKernel):
            yield EmbeddingSpec(size("rows", 128), size("dim", 256), scheme, does, dtype)
        elif isinstance(kernel, MoEKernel) and "routed" in kernel.routing:
            kind = kernel.epilogue.activations[0]
            act = Activation(kind, 1.702 if kind == "swiglu_oai" else None)
            gate = scheme if kernel.epilogue.gated and kind != "relu2" else None
            hidden, inner = size("hidden", 256), size("intermediate", 256)
            yield MoESpec(size("num_experts", 4), 2, hidden, inner, scheme, scheme, gate, act, None, does, dtype)


def _grid(scheme: WeightScheme, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight."""
    *lead, n, k = shape
    g = scheme.granularity
    if g.block is not None:
        return (*lead, -(-n // g.block[0]), -(-k // g.block[1]))
    if g.kind is GranularityKind.TENSOR:
        return (*lead, 1, 1)
    return (*lead, n, 1 if g.group is None else -(-k // g.group))


def random_weight(scheme: WeightScheme, *shape: int) -> QuantizedTensor:
    """Random canonical weights; scales keep outputs near one."""
    if not scheme.quantized:
        return QuantizedTensor(scheme, shape, (torch.randn(shape) / math.sqrt(shape[-1])).to(torch_dtype(scheme.dtype)))
    grid = _grid(scheme, shape)
    scales = (torch.rand(grid) + 0.5) / (math.sqrt(shape[-1]) * 2 ** (scheme.bits - 2))
    if scheme.dtype in _FP8:
        return QuantizedTensor(scheme, shape, torch.randn(shape).to(_FP8[scheme.dtype]), scales=scales * 16)
    codes = torch.randint(0, 1 << scheme.bits, shape, dtype=torch.int16)
    middle = 1 << (scheme.bits - 1)
    if scheme.bits == 4:
        values = pack_nibbles(codes)
    else:
        values = (codes - middle).to(torch.int8) if scheme.zero is ZeroKind.NONE else codes.to(torch.uint8)
    zeros = torch.randint(0, 1 << scheme.bits, grid, dtype=torch.uint8) if scheme.zero is ZeroKind.INTEGER else None
    mins = -scales * middle if scheme.zero is ZeroKind.MINIMUM else None
    return QuantizedTensor(scheme, shape, values, scales=scales, zeros=zeros, mins=mins)


def _run(kernel: Kernel[Any], spec: Any, device: str) -> tuple[Tensor, Tensor]:
    """The kernel's output and the reference's, the latter computed on the CPU in the same dtypes."""
    torch.manual_seed(0)
    if isinstance(kernel, KVKernel) and isinstance(spec, KVCacheSpec):
        return kv_trial(kernel, spec, device)
    least, most = kernel.m_range
    rows = min(max(least, 3), most or 3)
    if isinstance(spec, MoESpec):
        shapes = {
            "gate": (spec.intermediate, spec.hidden),
            "up": (spec.intermediate, spec.hidden),
            "down": (spec.hidden, spec.intermediate),
        }
        matrices = {
            role: random_weight(getattr(spec, role), spec.num_experts, *shape) for role, shape in shapes.items() if getattr(spec, role)
        }
        x = torch.randn(rows, spec.hidden).to(torch_dtype(spec.dtype))
        ids = torch.stack([torch.randperm(spec.num_experts)[: spec.top_k] for _ in range(rows)]).to(torch.int32)
        weights = torch.softmax(torch.randn(rows, spec.top_k), dim=-1)
        wanted = ReferenceMoE().prepare(spec, MoEWeights(**matrices)).apply(x, Routed(ids, weights))
        op: Any = kernel.prepare(spec, MoEWeights(**{role: _to(w, device) for role, w in matrices.items()}))
        return op.apply(x.to(device), Routed(ids.to(device), weights.to(device))), wanted
    if isinstance(spec, EmbeddingSpec):
        table, ids = random_weight(spec.weights, spec.rows, spec.dim), torch.randint(0, spec.rows, (rows,))
        op = kernel.prepare(spec, LinearWeights(_to(table, device)))
        return op.lookup(ids.to(device)), ReferenceEmbedding().prepare(spec, LinearWeights(table)).lookup(ids)
    weight, x = random_weight(spec.weights, spec.n, spec.k), torch.randn(rows, spec.k).to(torch_dtype(spec.dtype))
    op = kernel.prepare(spec, LinearWeights(_to(weight, device)))
    return op.apply(x.to(device)), ReferenceLinear().prepare(spec, LinearWeights(weight)).apply(x)


def _to(weight: QuantizedTensor, device: str) -> QuantizedTensor:
    return QuantizedTensor(weight.scheme, weight.shape, **{name: tensor.to(device) for name, tensor in weight.tensors().items()})
