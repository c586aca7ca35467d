"""Weights of narrow floats as csrc/kernels/narrow_floats.hpp takes them: words along K for every column, scales arranged once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.codes import effective_scales
from hal_core.recast import recast
from hal_core.schemes import GranularityKind

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.canonical import QuantizedTensor

__all__ = ["narrow_tensors", "scale_group", "words_along_k"]


def words_along_k(values: Tensor) -> Tensor:
    """Bytes ``[N, B]`` along K as ``int32 [B / 4, N]``, the first byte lowest."""
    return recast(recast(values.contiguous(), torch.uint8), torch.int32).t().contiguous()


def scale_group(weight: QuantizedTensor) -> int:
    """Elements along K that share a scale of a column; K where a column has one."""
    g = weight.scheme.granularity
    return g.group or (g.block[1] if g.block else weight.shape[-1])


def narrow_tensors(weight: QuantizedTensor) -> dict[str, Tensor]:
    """Words ``int32 [K * bits / 32, N]``, and float32 scales ``[G, N]`` of groups or blocks, or columns ``[N]`` where each has one."""
    n = weight.shape[-2]
    assert weight.scales is not None  # every quantized scheme has scales
    scales = effective_scales(weight.scales, weight.global_scale)
    g = weight.scheme.granularity
    found = {"words": words_along_k(weight.values)}
    if g.kind in (GranularityKind.CHANNEL, GranularityKind.TENSOR):
        return {**found, "columns": scales.expand(n, 1).flatten().contiguous()}
    rows = scales if g.block is None else scales.repeat_interleave(g.block[0], 0)[:n]
    return {**found, "scales": rows.t().contiguous()}
