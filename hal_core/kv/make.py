"""The function that makes a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hal_core.errors import ValueDecodeError
from hal_core.kv.cache import PagedKVCache
from hal_core.kv.op import KVOp, KVParams
from hal_core.spec import KVCacheSpec

if TYPE_CHECKING:
    import torch

    from hal_core.policy import Policy

__all__ = ["kv_cache", "kv_op"]


def kv_op(spec: KVCacheSpec, params: KVParams | None = None, *, policy: Policy | str | None = None, layer: str | None = None) -> KVOp:
    """The selected kernel's op over pages that the caller owns; it carries its selection.

    Args:
        spec: the cache. Where ``params`` are given, their source is the source of its scales.
        params: static scales, channel orders; None for what the spec needs no measuring for.
        policy: which kernels may serve.
        layer: name of the layer, for messages.

    Raises:
        NoKernelError, PolicyError: as :func:`hal_core.select`; ``require`` refuses default scales.
        ShapeError: the parameters do not fit the spec.
    """
    from hal_core.api import prepare

    if not isinstance(spec, KVCacheSpec):
        raise ValueDecodeError(f"spec of type {type(spec).__name__}", "not of a cache", "give a KVCacheSpec")
    if params is not None and not isinstance(params, KVParams):
        raise ValueDecodeError(f"params of type {type(params).__name__}", "not of a cache", "give KVParams, or None")
    if params is not None and (params.key_scale is not None or params.value_scale is not None):
        spec = replace(spec, scales=params.source)
    op = prepare(spec, params or KVParams(), policy, layer=layer)
    assert isinstance(op, KVOp)  # a kernel of kind kv prepares nothing else
    return op


def kv_cache(
    spec: KVCacheSpec,
    *,
    capacity: int | None = None,
    params: KVParams | None = None,
    device: torch.device | str = "cpu",
    policy: Policy | str | None = None,
    decode_cache: int = 0,
    check_finite: bool = True,
    layer: str | None = None,
) -> PagedKVCache:
    """A paged cache of one layer on the best kernel for ``spec``.

    Args:
        spec: shapes, page size and schemes. ``scales="computed"`` measures static scales on the first tokens appended.
        capacity: tokens, rounded up to pages; None grows as needed.
        params: static scales, channel orders.
        device: where pages live.
        policy: which kernels may serve.
        decode_cache: bytes for dequantized prefixes; 0 for none.
        check_finite: refuse keys and values that are not finite.
        layer: name of the layer, for messages.

    Raises:
        NoKernelError, PolicyError, ShapeError: as :func:`kv_op`.
    """
    op = kv_op(spec, params, policy=policy, layer=layer)
    return PagedKVCache(op, capacity=capacity, device=device, decode_cache=decode_cache, check_finite=check_finite)
