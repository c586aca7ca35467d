"""Specs just outside a kernel's declaration, each with the code of the refusal that it must meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from hal_core.errors import ValueDecodeError
from hal_core.kernel import EmbeddingKernel, Kernel, KVKernel, LinearEpilogue, LinearKernel, MoEEpilogue, MoEKernel
from hal_core.schemes import DTYPES, FLOAT_DTYPES, Granularity, GranularityKind, WeightScheme, ZeroKind
from hal_core.spec import ACTIVATIONS, FLOATS, ROUTING_FORMS, Activation, MoESpec
from hal_core.testing.kv_space import kv_outside

__all__ = ["outside_specs"]

_Outside = tuple[str, str, Any]


def outside_specs(kernel: Kernel[Any], base: Any) -> Iterator[_Outside]:
    """(label, code or code@machine, spec) for each step out of what the kernel declares; ``base`` is a spec that it accepts."""
    if isinstance(kernel, KVKernel):
        own: Iterator[_Made] = kv_outside(kernel, base)
    else:
        own = chain(_schemes(kernel, base), _dtypes(kernel, base), _epilogue(kernel, base))
    for label, code, make in (*own, *_numerics(kernel, base)):
        try:
            yield label, code, make()
        except ValueDecodeError:
            continue  # no such spec can be asked
    for limit in kernel.limits:
        yield from _limit(limit, base)
    if "any" not in kernel.devices:
        yield "no_device", "device.missing@no_device", base
    if kernel.isa:
        yield "no_isa", "device.isa@no_isa", base


_Made = tuple[str, str, Callable[[], Any]]


def _with_scheme(base: Any, scheme: Callable[[], WeightScheme]) -> Callable[[], Any]:
    if isinstance(base, MoESpec):
        return lambda: replace(base, down=scheme())
    return lambda: replace(base, weights=scheme())


def _schemes(kernel: Kernel[Any], base: Any) -> Iterator[_Made]:
    s, own = kernel.schemes, base.down if isinstance(base, MoESpec) else base.weights
    for dtype in DTYPES:
        if dtype not in s.dtypes:
            # every dtype can be one scale a row
            yield f"dtype={dtype}", "scheme.dtype", _with_scheme(base, lambda d=dtype: WeightScheme(d))  # type: ignore[misc]
    quantized = own if own.quantized else next((WeightScheme(d) for d in s.dtypes if WeightScheme(d).quantized), None)
    if quantized is None:
        return
    grains = {
        GranularityKind.TENSOR: Granularity.tensor(), GranularityKind.CHANNEL: Granularity.channel(),
        GranularityKind.GROUP: Granularity.groups(32 * s.group_multiple), GranularityKind.BLOCK: Granularity.blocks(128, 128),
    }  # fmt: skip
    for kind, grain in grains.items():
        if kind not in s.granularities:
            plain = WeightScheme(quantized.dtype, grain)
            yield f"scales={grain}", "scheme.granularity", _with_scheme(base, lambda p=plain: p)  # type: ignore[misc]
    if s.group_multiple > 1 and GranularityKind.GROUP in s.granularities:
        odd = Granularity.groups(s.group_multiple + 1)
        yield f"group={odd}", "scheme.group", _with_scheme(base, lambda: WeightScheme(quantized.dtype, odd))
    for zero in ZeroKind:
        if zero not in s.zeros:
            yield f"zero={zero.value}", "scheme.zero", _with_scheme(base, lambda z=zero: replace(quantized, zero=z))  # type: ignore[misc]
    for dtype in (d for d in s.dtypes if d not in FLOAT_DTYPES and not d.startswith("int") and len(s.zeros) > 1):
        zeroed = WeightScheme(dtype, Granularity.channel(), s.zeros[-1])
        yield f"{dtype}-with-zero", "scheme.zero", _with_scheme(base, lambda z=zeroed: z)  # type: ignore[misc]
    if not s.act_order:
        group = Granularity.groups(32 * s.group_multiple)
        ordered = lambda: WeightScheme(quantized.dtype, group, act_order=True)  # noqa: E731
        yield "act_order", "scheme.act_order", _with_scheme(base, ordered)


def _numerics(kernel: Kernel[Any], base: Any) -> Iterator[_Made]:
    n = kernel.numerics
    asked = [
        (bool(n.activations), "activations", {"activations": ()}), (n.weights == "rescaled", "weights", {"weights": "as_stored"}),
        (n.accumulation != "fp32", "accumulation", {"accumulation": "fp32"}),
        (not n.deterministic, "deterministic", {"deterministic": True}),
        (not n.batch_invariant, "batch_invariant", {"batch_invariant": True}),
    ]  # fmt: skip
    for on, name, change in asked:
        if on:
            changed = replace(base.numerics, **change)  # type: ignore[arg-type]
            yield f"numerics.{name}", f"numerics.{name}", lambda c=changed: replace(base, numerics=c)  # type: ignore[misc]
    if n.operand not in {"own", "fp32"} and "fp32" in kernel.dtypes:
        strict = replace(base.numerics, operand="own")
        yield "numerics.operand", "numerics.operand", lambda: replace(base, numerics=strict, dtype="fp32")


def _dtypes(kernel: Kernel[Any], base: Any) -> Iterator[_Made]:
    for dtype in FLOATS:
        if dtype not in kernel.dtypes:
            yield f"activations={dtype}", "dtype.activation", lambda d=dtype: replace(base, dtype=d)  # type: ignore[misc]
        if dtype not in kernel.out_dtypes and hasattr(base, "out_dtype"):
            yield f"output={dtype}", "dtype.output", lambda d=dtype: replace(base, out_dtype=d)  # type: ignore[misc]


def _epilogue(kernel: Kernel[Any], base: Any) -> Iterator[_Made]:
    if isinstance(kernel, LinearKernel):
        for field in fields(LinearEpilogue):
            if not getattr(kernel.epilogue, field.name):
                name = field.name
                yield name, f"epilogue.{name}", lambda n=name: replace(base, **{n: True})  # type: ignore[misc]
    if isinstance(kernel, EmbeddingKernel) and not kernel.tied_head:
        yield "tied_head", "epilogue.tied_head", lambda: replace(base, tied_head=True)
    if isinstance(kernel, MoEKernel):
        yield from _experts(kernel, base)


def _experts(kernel: MoEKernel, base: MoESpec) -> Iterator[_Made]:
    for kind in ACTIVATIONS:
        if kind not in kernel.epilogue.activations:
            yield kind, "epilogue.activation", lambda k=kind: replace(base, activation=Activation(k))  # type: ignore[misc]
    for form in ROUTING_FORMS:
        if form not in kernel.routing:
            yield f"routing={form}", "routing.form", lambda f=form: replace(base, routing=f)  # type: ignore[misc]
    for field in fields(MoEEpilogue):
        if field.name in _ASKS and not getattr(kernel.epilogue, field.name):
            code = "epilogue.gated" if field.name == "ungated" else f"epilogue.{field.name}"
            yield field.name, code, lambda ask=_ASKS[field.name]: ask(base)  # type: ignore[misc]


def _other(scheme: WeightScheme) -> WeightScheme:
    return WeightScheme("int8" if scheme.dtype == "int4" else "int4")


_ASKS: dict[str, Callable[[MoESpec], MoESpec]] = {
    "alpha": lambda s: replace(s, activation=Activation("swiglu_oai", alpha=1.5), gate=s.gate or s.up),
    "limit": lambda s: replace(s, activation=replace(s.activation, limit=7.0)),
    "gated": lambda s: replace(s, gate=s.up),
    "ungated": lambda s: replace(s, gate=None, activation=Activation("silu")),
    "bias": lambda s: replace(s, bias=True),
    "mixed_schemes": lambda s: replace(s, down=_other(s.down)),
    "expert_map": lambda s: replace(s, expert_map=True),
    "expert_parallel": lambda s: replace(s, num_experts=s.num_experts + 2, local_experts=s.num_experts),
    "router_weight_on_input": lambda s: replace(s, router_weight_on_input=True),
    "routed_scaling": lambda s: replace(s, routed_scaling=2.0),
    "shared_experts": lambda s: replace(s, shared_experts=1),
    "lora": lambda s: replace(s, lora=True),
}


def _limit(limit: Any, base: Any) -> Iterator[_Outside]:
    size = getattr(base, limit.dim)
    tries = [(size + 1, "shape.multiple", limit.multiple > 1), (limit.least - 1, "shape.range", limit.least > 1)]
    if limit.most is not None:
        tries.append((limit.most + limit.multiple, "shape.range", True))
    for wrong, code, on in tries:
        if on and wrong >= 1:
            yield f"{limit.dim}={wrong}", code, replace(base, **{limit.dim: wrong})
