"""Linears of vLLM, in every cut: replicated, by columns (merged and qkv too), by rows. A row-parallel rank returns its partial sum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear

from hal_core.errors import FormatError, ShapeError
from hal_core.integrations.vllm import ops
from hal_core.integrations.vllm.layer import serve
from hal_core.sharding import Cut, RowsPart, linear_spec, rank_cut, rank_linears

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.formats.base import Checkpoint
    from hal_core.integrations.vllm.config import HalConfig
    from hal_core.integrations.vllm.held import HeldLayer
    from hal_core.plan import PlannedOp

__all__ = ["HalLinearMethod"]


class HalLinearMethod(LinearMethodBase):
    """One layer's method: it makes no parameters, and reads its part of the checkpoint when vLLM has loaded the rest."""

    def __init__(self, config: HalConfig, prefix: str, planned: tuple[PlannedOp, ...]) -> None:
        self.config, self.prefix, self.planned = config, prefix, planned
        self.held: HeldLayer | None = None
        self.key, self.n, self.k, self.sizes = "", 0, 0, [0]

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        base = next(cls for cls in type(layer).__mro__ if cls.__module__ == LinearMethodBase.__module__)
        if any(getattr(type(layer), name, None) is not getattr(base, name, None) for name in ("weight_loader", "weight_loader_v2")):
            found = f"a {type(layer).__name__}, which cuts its weights in a way of its own"
            raise FormatError(f"layer {self.prefix}", found, "store it unquantized")
        self.sizes, self.n, self.k = list(output_partition_sizes), sum(output_partition_sizes), input_size_per_partition

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read, cut, select, prepare.

        Raises:
            FormatError, ShapeError, NoKernelError: names the layer.
        """
        checkpoint = self.config.ready().checkpoint
        bias = self._fused_bias(layer, checkpoint)
        columns = rank_cut(f"{self.prefix}: k", linear_spec(self.planned[0]).k, self.k, layer.tp_rank, layer.tp_size)
        asked = rank_linears(checkpoint, self._parts(layer), columns, self.config.options.numerics, bias)
        serve(self, layer, (layer.tp_rank, layer.tp_size), asked)

    def _parts(self, layer: Any) -> list[RowsPart]:
        rank, degree = layer.tp_rank, layer.tp_size
        if len(self.planned) == len(self.sizes):
            pairs = zip(self.planned, self.sizes, strict=True)
            return [RowsPart(p, rank_cut(f"{p.module}: n", linear_spec(p).n, size, rank, degree)) for p, size in pairs]
        if len(self.planned) > 1:
            found = f"{len(self.planned)} modules in the checkpoint, {len(self.sizes)} parts in the engine"
            raise ShapeError(f"layer {self.prefix}", found, "check model_type and architectures in config.json")
        return self._parts_of_one(layer)

    def _parts_of_one(self, layer: Any) -> list[RowsPart]:
        """A module that the file holds fused as the engine does: its parts follow each other."""
        (planned,), rank, degree = self.planned, layer.tp_rank, layer.tp_size
        where, whole = f"{planned.module}: n", linear_spec(planned).n
        replicas = [1, *[getattr(layer, "num_kv_head_replicas", 1)] * (len(self.sizes) - 1)]
        wholes = [size * degree // held_by for size, held_by in zip(self.sizes, replicas, strict=True)]
        if sum(wholes) != whole:
            raise ShapeError(where, f"{whole} rows in the checkpoint, {wholes} in the engine", "check the head counts in config.json")
        if degree == 1:
            return [RowsPart(planned, Cut.all_of(whole))]
        parts, offset = [], 0
        for part, size in zip(wholes, self.sizes, strict=True):
            cut = rank_cut(where, part, size, rank, degree)
            parts.append(RowsPart(planned, Cut(offset + cut.start, offset + cut.stop, whole, math.gcd(offset, size))))
            offset += part
        return parts

    def _fused_bias(self, layer: Any, checkpoint: Checkpoint) -> Tensor | None:
        """The bias that the op adds; vLLM has loaded it, and adds it itself where ``skip_bias_add`` says so."""
        bias: Tensor | None = layer.bias
        for planned in self.planned:
            stored = next(iter(planned.names("bias")), None)
            if bias is not None and stored is None:
                raise FormatError(f"parameter {planned.module}.bias", "missing, and the model adds it", "complete the checkpoint")
            if bias is None and stored is not None and bool(checkpoint.load(stored).any()):
                raise FormatError(f"parameter {stored}", "not zero, and the engine's model adds no bias", "check model_type in config.json")
        elsewhere = layer.skip_bias_add or (isinstance(layer, RowParallelLinear) and layer.tp_rank > 0)
        return None if bias is None or elsewhere else bias.data

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.linear(x, self.key, self.n)
