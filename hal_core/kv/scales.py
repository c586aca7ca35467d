"""Static scales of fp8 caches, computed from tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hal_core.kv.quantizer import FP8_MOST

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.kv.op import KVParams
    from hal_core.kv.scheme import KVScheme
    from hal_core.spec import KVCacheSpec

__all__ = ["computed_params", "computed_scale"]

#: Later tokens may be so many times larger than those seen before they saturate; e4m3 loses no precision by it, only range below.
_HEADROOM = 2.0


def computed_scale(x: Tensor, scheme: KVScheme) -> Tensor:
    """float32 ``[1]`` or, per head, ``[Hkv]``: twice the largest magnitude of ``x [T, Hkv, D]`` becomes the largest code."""
    finite = x.float().nan_to_num(0.0, 0.0, 0.0).abs()
    largest = finite.amax(dim=(0, 2)) if scheme.granularity == "head" else finite.max().reshape(1)
    return torch.where(largest > 0, largest * (_HEADROOM / FP8_MOST), torch.ones_like(largest)).clamp(min=torch.finfo(torch.float32).tiny)


def computed_params(spec: KVCacheSpec, k: Tensor, v: Tensor, params: KVParams) -> KVParams:
    """``params`` with the scales of these tokens where the spec needs some."""
    return replace(
        params,
        key_scale=computed_scale(k, spec.keys) if spec.keys.scaled else params.key_scale,
        value_scale=computed_scale(v, spec.values) if spec.values.scaled else params.value_scale,
        source="computed",
    )
