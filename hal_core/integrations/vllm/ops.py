"""The registered ops that a layer calls: opaque to Dynamo, which sees their shapes alone. Without compilation they are called directly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal_core.integrations.vllm import held as layers
from hal_core.ops import MoEExperts, QuantEmbedding, QuantLinear, Routed

__all__ = ["embedding", "experts", "linear"]


def _linear(x: Tensor, layer: str, n: int) -> Tensor:
    held = layers.get(layer)
    held.calls += 1
    parts = [op.apply(x) for op in held.ops if isinstance(op, (QuantLinear, QuantEmbedding))]
    if held.pad or not parts:
        parts.append(x.new_zeros(*x.shape[:-1], held.pad))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _experts(x: Tensor, weights: Tensor, ids: Tensor, layer: str) -> Tensor:
    held = layers.get(layer)
    held.calls += 1
    (op,) = held.ops
    assert isinstance(op, MoEExperts)
    return op.apply(x, Routed(ids.to(torch.int32), weights.float()), expert_map=held.expert_map)


def _embedding(ids: Tensor, layer: str, dim: int, dtype: torch.dtype) -> Tensor:
    held = layers.get(layer)
    held.calls += 1
    for op in held.ops:
        assert isinstance(op, QuantEmbedding)
        return op.lookup(ids).to(dtype)
    return torch.zeros(*ids.shape, dim, dtype=dtype, device=ids.device)  # padding only: vLLM masks every id of other ranks


def _linear_shape(x: Tensor, layer: str, n: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


def _experts_shape(x: Tensor, weights: Tensor, ids: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)


def _embedding_shape(ids: Tensor, layer: str, dim: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty(*ids.shape, dim, dtype=dtype)


#: Kept: the ops live as long as this. Registered without torch's decorator for Python ops, whose calls take ten times as long.
_library: Any = torch.library.Library("hal_vllm", "DEF")  # type: ignore[no-untyped-call]
for _schema, _run, _shape in (
    ("linear(Tensor x, str layer, int n) -> Tensor", _linear, _linear_shape),
    ("experts(Tensor x, Tensor weights, Tensor ids, str layer) -> Tensor", _experts, _experts_shape),
    ("embedding(Tensor ids, str layer, int dim, ScalarType dtype) -> Tensor", _embedding, _embedding_shape),
):
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hal_vllm::{_schema.partition('(')[0]}", _shape)


def linear(x: Tensor, layer: str, n: int) -> Tensor:
    """``x [.., K]`` through the linears of a layer: ``[.., n]``, padding included."""
    if torch.compiler.is_compiling():
        return torch.ops.hal_vllm.linear(x, layer, n)  # type: ignore[no-any-return]
    return _linear(x, layer, n)


def experts(x: Tensor, weights: Tensor, ids: Tensor, layer: str) -> Tensor:
    """``x [T, H]`` through this rank's experts, summed with ``weights [T, k]`` for global ``ids [T, k]``: ``[T, H]``."""
    if torch.compiler.is_compiling():
        return torch.ops.hal_vllm.experts(x, weights, ids, layer)  # type: ignore[no-any-return]
    return _experts(x, weights, ids, layer)


def embedding(ids: Tensor, layer: str, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows of this rank's table by local ``ids [..]``: ``[.., dim]``."""
    if torch.compiler.is_compiling():
        return torch.ops.hal_vllm.embedding(ids, layer, dim, dtype)  # type: ignore[no-any-return]
    return _embedding(ids, layer, dim, dtype)
