"""The caches to try on a kernel, and those just outside of what it declares."""

from __future__ import annotations

import math
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from hal_core.kv.scheme import KV_GROUP, KV_SCHEMES, KVScheme
from hal_core.spec import FLOATS, KVCacheSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hal_core.kernel import KVKernel

__all__ = ["KV_FEATURES", "kv_label", "kv_outside", "kv_specs", "pairs_of", "served_by"]

#: Fields of the parts of attention beside the plain one.
KV_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 21}, "sink_tokens": {"window": 9, "sink_tokens": 5}, "sinks": {"sinks": True},
    "soft_cap": {"soft_cap": 2.0}, "all": {"window": 40, "sink_tokens": 3, "sinks": True, "soft_cap": 3.0},
}  # fmt: skip
_HEADS = ((4, 2), (3, 3), (8, 1))
#: Where a kernel serves every size.
_DIMS = (64, 20, 96, 128, 80)
_PAGES = (16, 64, 48, 32)
#: Bits of a coordinate to try; the other widths say nothing new.
_QUICK_BITS = (1.0, 2.0, 3.0, 4.0, 2.5, 3.25)
_FULL_BITS = (*_QUICK_BITS, 1.5, 3.5, 5.0, 7.75, 8.0)


def pairs_of(kernel: KVKernel, full: bool) -> tuple[tuple[KVScheme, KVScheme], ...]:
    """Every declared scheme on the sides that it is declared for, and some pairs of two schemes where these may be mixed."""
    tried = [s for s in KV_SCHEMES if s.bits is None or s.bits in (_FULL_BITS if full else _QUICK_BITS)]
    keys = [s for s in tried if _served(s, kernel.schemes.keys)]
    values = list(dict.fromkeys(s.for_values() for s in tried if _served(s.for_values(), kernel.schemes.values)))
    same = [(s, s.for_values()) for s in keys if s.for_values() in values]
    if not kernel.schemes.mixed:
        return tuple(same)
    turned = [(keys[index % len(keys)], values[-1 - index % len(values)]) for index in range(max(len(keys), len(values)))]
    return tuple(dict.fromkeys((*same, *(turned if full else turned[::3]))))


def _served(scheme: KVScheme, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(str(scheme), glob) for glob in globs)


def served_by(kernel: KVKernel, text: str, side: str) -> bool:
    """Whether the kernel declares a scheme for ``keys`` or ``values``."""
    return _served(KVScheme.parse(text), getattr(kernel.schemes, side))


def _features(kernel: KVKernel) -> tuple[str, ...]:
    e = kernel.epilogue
    on = {"window": e.window, "sink_tokens": e.window and e.sink_tokens, "sinks": e.sinks, "soft_cap": e.soft_cap}
    return ("plain", *(name for name, served in on.items() if served), *(["all"] if all(on.values()) else []))


def kv_specs(kernel: KVKernel, full: bool) -> Iterator[Callable[[], KVCacheSpec]]:
    """Makers of specs over schemes, heads, sizes, pages, features and dtypes; a maker raises where no spec can be so."""
    from hal_core.testing.space import as_declared, combined_rows

    dims = kernel.head_dims or _DIMS
    heads = _HEADS if kernel.epilogue.gqa else ((3, 3),)
    axes = (
        pairs_of(kernel, full),
        heads,
        dims,
        _PAGES,
        _features(kernel),
        kernel.dtypes,
        (False, True) if kernel.epilogue.value_dim else (False,),
    )
    numerics = as_declared(kernel.numerics)
    for (keys, values), (queries, kv), dim, page, feature, dtype, other in combined_rows(axes, full):
        value_dim = dims[(dims.index(dim) + 1) % len(dims)] if other else None
        size = math.lcm(page, KV_GROUP) if keys.grouped else page
        more = {"value_dim": value_dim, "scales": "calibrated", "seed": dim, **KV_FEATURES[feature]}
        yield partial(KVCacheSpec, queries, kv, dim, size, keys, values, numerics, dtype, **more)


def kv_label(spec: KVCacheSpec) -> str:
    """A short text without blanks that tells specs of one kernel apart."""
    size = f"d{spec.head_dim}" + (f"/{spec.v_dim}" if spec.v_dim != spec.head_dim else "")
    more = [f"window{spec.window}"] * (spec.window is not None) + [f"first{spec.sink_tokens}"] * (spec.sink_tokens > 0)
    more += ["sinks"] * spec.sinks + ([f"cap{spec.soft_cap:g}"] if spec.soft_cap is not None else [])
    return ",".join(
        (f"k={spec.keys}", f"v={spec.values}", f"h{spec.num_heads}/{spec.num_kv_heads}", size, f"p{spec.page_size}", spec.dtype, *more)
    )


def kv_outside(kernel: KVKernel, base: KVCacheSpec) -> Iterator[tuple[str, str, Callable[[], KVCacheSpec]]]:
    """(label, code, maker) for each step out of the declaration."""
    plain = replace(base, window=None, sink_tokens=0, sinks=False, soft_cap=None, page_size=math.lcm(base.page_size, KV_GROUP))
    for scheme in KV_SCHEMES:
        if not _served(scheme, kernel.schemes.keys):
            yield f"keys={scheme}", "kv.scheme", lambda s=scheme: replace(plain, keys=s)  # type: ignore[misc]
        if not _served(scheme.for_values(), kernel.schemes.values):
            yield f"values={scheme}", "kv.scheme", lambda s=scheme: replace(plain, values=s)  # type: ignore[misc]
    if not kernel.schemes.mixed:
        other = next((s for s in KV_SCHEMES if s.for_values() != plain.keys.for_values()), None)
        if other is not None:
            yield "mixed", "kv.mixed", lambda: replace(plain, values=other)
    if kernel.head_dims:
        yield "head_dim", "kv.head_dim", lambda: replace(plain, head_dim=max(kernel.head_dims) + 4)
        yield "value_dim", "kv.head_dim", lambda: replace(plain, value_dim=max(kernel.head_dims) + 4)
    asks: dict[str, dict[str, Any]] = {
        "gqa": {"num_heads": 2 * plain.num_kv_heads}, "value_dim": {"value_dim": plain.head_dim + 4}, "window": {"window": 8},
        "sink_tokens": {"window": 8, "sink_tokens": 2}, "sinks": {"sinks": True}, "soft_cap": {"soft_cap": 30.0},
    }  # fmt: skip
    for name, fields in asks.items():
        if not getattr(kernel.epilogue, name):
            yield name, f"epilogue.{name}", lambda f=fields: replace(plain, **f)  # type: ignore[misc]
    for dtype in (d for d in FLOATS if d not in kernel.dtypes):
        yield f"activations={dtype}", "dtype.activation", lambda d=dtype: replace(plain, dtype=d)  # type: ignore[misc]
