"""What a kernel may or may not serve, as a list: whether it declares it, and which specs make use of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from hal_core.kernel import Kernel, KVEpilogue, LinearEpilogue, MoEEpilogue
from hal_core.schemes import DTYPES, FLOAT_DTYPES, GranularityKind, ZeroKind
from hal_core.spec import ACTIVATIONS, FLOATS, ROUTING_FORMS
from hal_core.testing.data import GENERATED, GRANULARITIES
from hal_core.testing.kv_space import served_by

__all__ = ["Feature", "features_of"]


@dataclass(frozen=True)
class Feature:
    """``declares`` asks a kernel, ``uses`` a spec; ``tried`` is false where the kit has no input that would show it."""

    label: str
    declares: Callable[[Any], bool]
    uses: Callable[[Any], bool]
    tried: bool = True


def features_of(kernel: Kernel[Any]) -> tuple[Feature, ...]:
    """All features of the kernel's kind of op, in the order of the reports."""
    if kernel.op == "kv":
        return (*_cache_features(), *map(_taken, FLOATS), *_PROMISES)
    return (*_schemes(), *_dtypes(kernel), *_EPILOGUES.get(kernel.op, ()), *_NUMERICS)


def _weights(spec: Any) -> tuple[Any, ...]:
    return spec.schemes if hasattr(spec, "schemes") else (spec.weights,)


def _quantizes(kernel: Kernel[Any]) -> bool:
    return any(dtype not in FLOAT_DTYPES for dtype in kernel.schemes.dtypes)


def _has_integers(kernel: Kernel[Any]) -> bool:
    return any(dtype.startswith("int") for dtype in kernel.schemes.dtypes)


def _element(dtype: str) -> Feature:
    return Feature(
        f"weights {dtype}", lambda k: dtype in k.schemes.dtypes, lambda s: any(w.dtype == dtype for w in _weights(s)), dtype in GENERATED
    )


def _grain(kind: GranularityKind) -> Feature:
    return Feature(
        f"scales per {kind.value}",
        lambda k: kind in k.schemes.granularities and _quantizes(k),
        lambda s: any(w.quantized and w.granularity.kind is kind for w in _weights(s)),
        kind.value in GRANULARITIES,
    )


def _zero(zero: ZeroKind) -> Feature:
    return Feature(
        f"zero points: {zero.value}",
        lambda k: zero in k.schemes.zeros and (_has_integers(k) or zero is ZeroKind.NONE),
        lambda s: any(w.zero is zero for w in _weights(s)),
    )


def _schemes() -> tuple[Feature, ...]:
    order = Feature("act-order", lambda k: k.schemes.act_order and _has_integers(k), lambda s: any(w.act_order for w in _weights(s)))
    grains = [kind for kind in GranularityKind if kind is not GranularityKind.TOKEN]
    return (*map(_element, DTYPES), *map(_grain, grains), *map(_zero, ZeroKind), order)


def _taken(dtype: str) -> Feature:
    return Feature(f"activations {dtype}", lambda k: dtype in k.dtypes, lambda s: s.dtype == dtype)


def _written(dtype: str) -> Feature:
    return Feature(f"output {dtype}", lambda k: dtype in k.out_dtypes, lambda s: s.output == dtype)


def _dtypes(kernel: Kernel[Any]) -> tuple[Feature, ...]:
    return (*map(_taken, FLOATS), *(map(_written, FLOATS) if kernel.op != "embedding" else ()))


def _answer(name: str) -> Feature:
    """A yes or no of an epilogue."""
    return Feature(name, lambda k: getattr(k.epilogue, name), _expert_uses(name), name not in _UNTRIED)


def _function(kind: str) -> Feature:
    return Feature(f"activation {kind}", lambda k: kind in k.epilogue.activations, lambda s: s.activation.kind == kind)


def _routing(form: str) -> Feature:
    return Feature(f"routing {form}", lambda k: form in k.routing, lambda s: s.routing == form)


def _expert_uses(name: str) -> Callable[[Any], bool]:
    return {
        "alpha": lambda s: s.activation.alpha is not None,
        "limit": lambda s: s.activation.limit is not None,
        "gated": lambda s: s.gate is not None,
        "ungated": lambda s: s.gate is None,
        "mixed_schemes": lambda s: len(set(s.schemes)) > 1,
        "expert_parallel": lambda s: s.local != s.num_experts,
        "routed_scaling": lambda s: s.routed_scaling != 1.0,
    }.get(name, lambda s: bool(getattr(s, name)))


#: Epilogue answers for which the ops have no argument yet.
_UNTRIED = ("lora", "shared_experts")
_EPILOGUES: dict[str, tuple[Feature, ...]] = {
    "linear": tuple(_answer(field.name) for field in fields(LinearEpilogue)),
    "embedding": (Feature("tied_head", lambda k: k.tied_head, lambda s: s.tied_head),),
    "moe": (
        *map(_function, ACTIVATIONS),
        *(_answer(field.name) for field in fields(MoEEpilogue) if field.name != "activations"),
        *map(_routing, ROUTING_FORMS),
    ),
}
_PROMISES = (
    Feature("deterministic", lambda k: k.numerics.deterministic, lambda s: True),
    Feature("batch-invariant", lambda k: k.numerics.batch_invariant, lambda s: True),
)
_NUMERICS = (
    Feature("exact activations", lambda k: k.numerics.exact, lambda s: True),
    Feature("weights as stored", lambda k: k.numerics.weights == "as_stored", lambda s: True),
    *_PROMISES,
)


def _side(text: str, side: str) -> Feature:
    return Feature(f"{side} {text}", lambda k: served_by(k, text, side), lambda s: str(getattr(s, side)) == text)


def _cache_features() -> tuple[Feature, ...]:
    """Schemes of each side that a quick run tries, sizes, and the parts of the attention."""
    dims = (64, 80, 96, 128, 192, 256)
    uses: dict[str, Callable[[Any], bool]] = {
        "gqa": lambda s: s.num_heads != s.num_kv_heads, "value_dim": lambda s: s.v_dim != s.head_dim,
        "window": lambda s: s.window is not None, "sink_tokens": lambda s: s.sink_tokens > 0,
        "sinks": lambda s: bool(s.sinks), "soft_cap": lambda s: s.soft_cap is not None,
    }  # fmt: skip
    return (
        *(_side(text, "keys") for text in (*_CACHED, "int8", "int4")),
        *(_side(text, "values") for text in _CACHED),
        Feature("keys and values apart", lambda k: k.schemes.mixed, lambda s: s.values != s.keys.for_values()),
        *(_head(dim) for dim in dims),
        *(Feature(f.name, lambda k, n=f.name: getattr(k.epilogue, n), uses[f.name]) for f in fields(KVEpilogue)),  # type: ignore[misc]
    )


def _head(dim: int) -> Feature:
    # A kernel without limits serves every size; the kit tries some of them.
    tried = dim in (64, 80, 96, 128)
    return Feature(f"head_dim {dim}", lambda k: not k.head_dims or dim in k.head_dims, lambda s: dim in {s.head_dim, s.v_dim}, tried)


#: Cache schemes that the matrix has a row for.
_CACHED = (
    "bf16", "fp16", "fp32", "fp8", "fp8:head", "int8:token", "int4:token",
    *(f"turboquant:{bits}{variant}" for bits in ("1", "2", "2.5", "3", "4") for variant in ("", ":raw")),
    *(f"turboquant:{bits}:unbiased" for bits in (1, 2, 3, 4)),
)  # fmt: skip
