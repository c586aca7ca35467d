"""The specs to try on a kernel: what it declares, combined so that every two values of any two axes meet."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, product
from typing import Any

from hal_core.errors import ValueDecodeError
from hal_core.kernel import EmbeddingKernel, Kernel, KVKernel, LinearKernel, MoEKernel
from hal_core.numerics import Numerics
from hal_core.schemes import FLOAT_DTYPES, Granularity, GranularityKind, WeightScheme, ZeroKind
from hal_core.spec import Activation, EmbeddingSpec, KVCacheSpec, LinearSpec, MoESpec
from hal_core.testing.data import GENERATED, GRANULARITIES
from hal_core.testing.kv_space import kv_label, kv_specs

__all__ = ["as_declared", "combined_rows", "declared_schemes", "fitted", "pairwise", "specs_of"]

#: (N, K): one, odd, below, at and above tiles of 16, 32 and 128, tails of K, groups that end early.
_LINEAR = ((1, 64), (15, 32), (16, 8), (17, 96), (31, 131), (33, 1), (128, 256), (129, 160))
#: (H, I) of experts.
_EXPERTS = ((64, 96), (40, 72), (33, 17), (128, 48))
#: (experts, top_k)
_COUNTS = ((6, 3), (1, 1), (5, 2))
_GPT_OSS = Activation("swiglu_oai", alpha=1.702, limit=7.0)
_SCALES = ("fp16", "bf16", "fp32")
#: So many schemes do not meet everything else in a quick run.
_MANY = 60


def as_declared(numerics: Numerics) -> Numerics:
    """The request that tolerates exactly what a kernel says that it does."""
    return replace(numerics, deterministic=False, batch_invariant=False)


def _asking(kernel: Kernel[Any], spec: Any) -> Any:
    """The spec that asks for what the kernel does with it, which may depend on shapes and schemes."""
    try:
        return replace(spec, numerics=as_declared(kernel.computes(spec)))
    except Exception:  # noqa: BLE001 - a kernel may raise or return anything; its ``declaration`` tells
        return spec


@lru_cache(maxsize=64)
def pairwise(sizes: tuple[int, ...], apart: tuple[tuple[int, int], ...] = ()) -> tuple[tuple[int, ...], ...]:
    """Few rows of indices in which every two values of any two axes meet; greedy, always the same.

    ``apart``: pairs of axes whose values need not all meet, because there are too many of both.
    """
    met = [pair for pair in combinations(range(len(sizes)), 2) if pair not in apart]
    # a dict keeps the order, and so the rows
    todo = {(a, i, b, j): None for a, b in met for i in range(sizes[a]) for j in range(sizes[b])}
    if len(sizes) < 2:
        return tuple((i,) for i in range(sizes[0])) if sizes else ((),)
    rows: list[tuple[int, ...]] = []
    while todo:
        a, i, b, j = next(iter(todo))
        row: dict[int, int] = {a: i, b: j}
        for axis in range(len(sizes)):
            if axis not in row:
                # start elsewhere each time, so that equal gains are spread
                order = [(value + len(rows)) % sizes[axis] for value in range(sizes[axis])]
                row[axis] = max(order, key=lambda value: sum(_pair(axis, value, *other) in todo for other in row.items()))
        for pair in combinations(sorted(row.items()), 2):
            todo.pop((*pair[0], *pair[1]), None)
        rows.append(tuple(row[axis] for axis in range(len(sizes))))
    return tuple(rows)


def _pair(a: int, i: int, b: int, j: int) -> tuple[int, int, int, int]:
    return (a, i, b, j) if a < b else (b, j, a, i)


def combined_rows(axes: Sequence[Sequence[Any]], full: bool, apart: tuple[tuple[int, int], ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Pairwise rows; ``full`` leaves no pair out and adds ten times as many random rows, always the same."""
    sizes = tuple(len(axis) for axis in axes)
    rows = list(pairwise(sizes, () if full else apart))
    if full:
        rng = random.Random(len(rows))  # noqa: S311 - a choice of tests, no secret
        rows += [tuple(rng.randrange(size) for size in sizes) for _ in range(10 * len(rows))]
    for row in dict.fromkeys(rows):
        yield tuple(axis[index] for axis, index in zip(axes, row, strict=True))


def declared_schemes(kernel: Kernel[Any]) -> tuple[WeightScheme, ...]:
    """Every scheme that the kernel declares and the kit can make weights of."""
    s, found = kernel.schemes, dict.fromkeys(_floats(kernel))
    grains = [grain for kind in s.granularities if kind.value in GRANULARITIES for grain in _grains(kind, s.group_multiple)]
    for dtype in (dtype for dtype in s.dtypes if dtype in GENERATED and dtype not in FLOAT_DTYPES):
        ordered = [g for g in grains if g.kind is GranularityKind.GROUP and (g.group or 0) >= 16][:1] if s.act_order else []
        for grain, zero, act_order in (*product(grains, s.zeros, (False,)), *product(ordered, s.zeros, (True,))):
            if dtype.startswith("int") or (zero is ZeroKind.NONE and not act_order):  # other codes have neither
                found.update(_scheme(dtype, grain, zero, act_order))
    return tuple(found)


def _scheme(dtype: str, grain: Granularity, zero: ZeroKind, act_order: bool) -> dict[WeightScheme, None]:
    try:
        return {WeightScheme(dtype, grain, zero, act_order): None}
    except ValueDecodeError:
        return {}  # e.g. superblocks of floats


def _floats(kernel: Kernel[Any]) -> list[WeightScheme]:
    return [WeightScheme(dtype) for dtype in kernel.schemes.dtypes if dtype in FLOAT_DTYPES]


def _grains(kind: GranularityKind, multiple: int) -> tuple[Granularity, ...]:
    if kind is GranularityKind.GROUP:
        sizes = [size for size in (multiple, 32, 128) if size % multiple == 0 and size >= 4]
        return tuple(Granularity.groups(size) for size in dict.fromkeys(sizes or [multiple]))
    if kind is GranularityKind.SUPERBLOCK:
        return (Granularity.superblocks(16, 64), Granularity.superblocks(32, 256)) if 16 % multiple == 0 else ()
    if kind is GranularityKind.BLOCK:
        return (Granularity.blocks(16, 32), Granularity.blocks(128, 128))
    return () if kind is GranularityKind.TOKEN else (Granularity(kind),)


def fitted(kernel: Kernel[Any], spec: Any) -> Any:
    """The spec with its dimensions at the next size that the kernel's limits allow."""
    for limit in kernel.limits:
        size = max(getattr(spec, limit.dim) or 0, limit.least)
        size = -(-size // limit.multiple) * limit.multiple
        if limit.most is not None and size > limit.most:
            size = limit.most // limit.multiple * limit.multiple
        spec = replace(spec, **{limit.dim: size})
    return spec


def specs_of(kernel: Kernel[Any], full: bool = False) -> Iterator[tuple[Any, str, str]]:
    """(spec, scales dtype, label) for everything that the kernel declares; labels are unique."""
    maker = next((make for kind, make in _MAKERS if isinstance(kernel, kind)), None)
    if maker is None:
        return
    seen = set()
    for make, scales in maker(kernel, full):
        try:
            spec = _asking(kernel, fitted(kernel, make()))
        except ValueDecodeError:
            continue  # a combination that no spec can hold, e.g. top_k above a limited number of experts
        label = f"{_label(spec)}{'' if scales == 'fp16' else f',scales={scales}'}"
        if label not in seen:
            seen.add(label)
            yield spec, scales, label


def _linear(kernel: LinearKernel, full: bool) -> Iterator[tuple[Any, str]]:
    biases = (False, True) if kernel.epilogue.bias else (False,)
    axes = (declared_schemes(kernel), _LINEAR, _floats_in_out(kernel), biases, _SCALES)
    for scheme, (n, k), (dtype, out), bias, scales in combined_rows(axes, full):
        yield lambda: LinearSpec(n, k, scheme, None, as_declared(kernel.numerics), dtype, out, bias), scales  # noqa: B023 - called at once


def _floats_in_out(kernel: Kernel[Any]) -> tuple[tuple[str, str | None], ...]:
    """Each dtype with itself as output, where declared, and each other output with the first."""
    same: list[tuple[str, str | None]] = [(dtype, None) for dtype in kernel.dtypes if dtype in kernel.out_dtypes]
    return (*same, *((kernel.dtypes[0], out) for out in kernel.out_dtypes if out != kernel.dtypes[0]))


def _embedding(kernel: EmbeddingKernel, full: bool) -> Iterator[tuple[Any, str]]:
    axes = (declared_schemes(kernel), _LINEAR, kernel.dtypes, (True, False) if kernel.tied_head else (False,), _SCALES)
    for scheme, (rows, dim), dtype, head, scales in combined_rows(axes, full):
        yield lambda: EmbeddingSpec(rows, dim, scheme, as_declared(kernel.numerics), dtype, head), scales  # noqa: B023 - called at once


def _experts(kernel: MoEKernel, full: bool) -> Iterator[tuple[Any, str]]:
    axes = (
        _expert_schemes(kernel), _activations(kernel), _EXPERTS, _floats_in_out(kernel), _features(kernel), _COUNTS, _SCALES[:2],
    )  # fmt: skip
    numerics = as_declared(kernel.numerics)
    # one scheme after another with the one activation after another; with many schemes, with one feature after another too
    apart = ((0, 1),) if len(axes[0]) < _MANY else tuple((0, axis) for axis in (1, 3, 4, 5, 6))
    for (gate, up, down), (activation, gated), (h, i), (dtype, out), feature, (e, top), scales in combined_rows(axes, full, apart):
        yield lambda: MoESpec(
            e, top, h, i, up, down, gate if gated else None, activation, None, numerics, dtype, out, **_feature_fields(feature, e)  # noqa: B023
        ), scales


def _expert_schemes(kernel: MoEKernel) -> tuple[tuple[WeightScheme, WeightScheme, WeightScheme], ...]:
    schemes = declared_schemes(kernel)
    out = [(scheme, scheme, scheme) for scheme in schemes]
    if kernel.epilogue.mixed_schemes and len(schemes) > 1:
        half = len(schemes) // 2
        out += [(schemes[0], schemes[0], schemes[-1]), (schemes[-1], schemes[half], schemes[0]), (schemes[half], schemes[0], schemes[0])]
    return tuple(out)


def _activations(kernel: MoEKernel) -> tuple[tuple[Activation, bool], ...]:
    """Each declared activation: gated and not, at its default and with what alters it."""
    e, out = kernel.epilogue, []
    for kind in e.activations:
        for gated in (True, False):
            if not (e.gated if gated else e.ungated) or (kind == "swiglu_oai" and not gated):
                continue
            out.append((Activation(kind), gated))
            if e.limit:
                out.append((Activation(kind, limit=0.6), gated))
            if e.alpha and kind == "swiglu_oai":
                out.append((Activation(kind, alpha=1.2, limit=7.0 if e.limit else None), gated))
                out += [(_GPT_OSS, gated)] * e.limit  # a kernel may hold these numbers alone
    return tuple(out)


def _features(kernel: MoEKernel) -> tuple[str, ...]:
    e = kernel.epilogue
    declared = {
        "bias": e.bias, "router_weight_on_input": e.router_weight_on_input, "routed_scaling": e.routed_scaling,
        "expert_map": e.expert_map, "expert_parallel": e.expert_map and e.expert_parallel,
        "bias+routed_scaling+expert_parallel": e.bias and e.routed_scaling and e.expert_map and e.expert_parallel,
        "grouped": "grouped" in kernel.routing, "batched": "batched" in kernel.routing,
    }  # fmt: skip
    return ("plain" if "routed" in kernel.routing else kernel.routing[0], *(name for name, on in declared.items() if on))


def _feature_fields(feature: str, experts: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in feature.split("+"):
        if name in {"bias", "router_weight_on_input", "expert_map"}:
            out[name] = True
        elif name == "routed_scaling":
            out[name] = 2.5
        elif name == "expert_parallel":
            out.update(expert_map=True, local_experts=max(1, experts // 2))
        elif name in {"grouped", "batched"}:
            out["routing"] = name
    return out


def _label(spec: Any) -> str:
    """A short text without blanks that tells specs of one kernel apart."""
    if isinstance(spec, KVCacheSpec):
        return kv_label(spec)
    out = f">{spec.out_dtype}" if getattr(spec, "out_dtype", None) else ""
    bias = ",bias" * getattr(spec, "bias", False)
    if isinstance(spec, LinearSpec):
        return f"{spec.weights},n{spec.n}k{spec.k},{spec.dtype}{out}{bias}"
    if isinstance(spec, EmbeddingSpec):
        return f"{spec.weights},n{spec.rows}k{spec.dim},{spec.dtype}{',tied' * spec.tied_head}"
    schemes = "/".join(dict.fromkeys(map(str, spec.schemes))) if len(set(spec.schemes)) == 1 else "/".join(map(str, spec.schemes))
    more = [name for name in ("expert_map", "router_weight_on_input") if getattr(spec, name)]
    more += [f"local{spec.local}"] * (spec.local != spec.num_experts) + [f"scaling{spec.routed_scaling:g}"] * (spec.routed_scaling != 1.0)
    more += [spec.routing] * (spec.routing != "routed") + ["ungated"] * (spec.gate is None)
    act = str(spec.activation).replace(" ", "")
    return ",".join([schemes, act, f"h{spec.hidden}i{spec.intermediate}e{spec.num_experts}k{spec.top_k}", spec.dtype + out + bias, *more])


def _caches(kernel: KVKernel, full: bool) -> Iterator[tuple[Any, str]]:
    for make in kv_specs(kernel, full):
        yield make, "fp16"


_MAKERS: tuple[tuple[type, Any], ...] = ((LinearKernel, _linear), (EmbeddingKernel, _embedding), (MoEKernel, _experts), (KVKernel, _caches))
