"""Static scales of fp8 caches, computed from tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hal_core.errors import ShapeError
from hal_core.kv.quantizer import FP8_MOST

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.kv.op import KVParams
    from hal_core.kv.scheme import KVScheme
    from hal_core.spec import KVCacheSpec

__all__ = ["check_given_scales", "computed_params", "computed_scale", "scales_wait"]

#: Later tokens may be so many times larger than those seen before they saturate; e4m3 loses no precision by it, only range below.
_HEADROOM = 2.0


def computed_scale(x: Tensor, scheme: KVScheme) -> Tensor:
    """float32 ``[1]`` or, per head, ``[Hkv]``: twice the largest magnitude of ``x [T, Hkv, D]`` becomes the largest code."""
    finite = x.float().nan_to_num(0.0, 0.0, 0.0).abs()
    largest = finite.amax(dim=(0, 2)) if scheme.granularity == "head" else finite.max().reshape(1)
    return torch.where(largest > 0, largest * (_HEADROOM / FP8_MOST), torch.ones_like(largest)).clamp(min=torch.finfo(torch.float32).tiny)


def _missing(spec: KVCacheSpec, params: KVParams) -> dict[str, KVScheme]:
    """The sides that need a static scale and were given none."""
    sides = (("key", spec.keys, params.key_scale), ("value", spec.values, params.value_scale))
    return {side: scheme for side, scheme, scale in sides if scheme.scaled and scale is None}


def scales_wait(spec: KVCacheSpec, params: KVParams) -> bool:
    """Whether the first tokens are still to give a scale."""
    return spec.scales == "computed" and bool(_missing(spec, params))


def check_given_scales(spec: KVCacheSpec, params: KVParams) -> None:
    """Scales that are said to be somebody's must be there, on each side that needs one.

    A spec that says ``computed`` may leave them out, all of them: the first tokens give them.

    Raises:
        ShapeError: a side has none.
    """
    source = params.source if params.source != "default" else spec.scales if spec.scales == "calibrated" else None
    if source is None:
        return
    for side, scheme in _missing(spec, params).items():
        fix = "give it in KVParams, or have all computed: scales='computed' in the spec and no scales in KVParams"
        raise ShapeError(f"{side}_scale of {scheme}", f"missing, though the scales are said to be {source}", fix)


def computed_params(spec: KVCacheSpec, k: Tensor, v: Tensor, params: KVParams) -> KVParams:
    """``params`` with the scales of these tokens where the spec needs some and none was given."""
    missing = _missing(spec, params)
    return replace(
        params,
        key_scale=computed_scale(k, spec.keys) if "key" in missing else params.key_scale,
        value_scale=computed_scale(v, spec.values) if "value" in missing else params.value_scale,
        source="computed",
    )
