"""Linears of vLLM, in every cut: replicated, by columns (merged and qkv too), by rows. A row-parallel rank returns its partial sum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear
from vllm.platforms import current_platform

from hal_core.api import prepare
from hal_core.dtypes import torch_dtype
from hal_core.errors import FormatError, HalError, ShapeError
from hal_core.integrations.placement import placed
from hal_core.integrations.vllm import ops
from hal_core.integrations.vllm.held import HeldLayer, hold
from hal_core.ops import QuantLinear
from hal_core.sharding import Cut, RowsPart, linear_spec, rank_cut, rank_linears
from hal_core.spec import LinearSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hal_core.formats.base import Checkpoint
    from hal_core.integrations.vllm.config import HalConfig
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.ops import Op
    from hal_core.plan import PlannedOp
    from hal_core.spec import Spec

__all__ = ["HalLinearMethod", "prepare_ops"]


def prepare_ops(config: HalConfig, prefix: str, asked: Sequence[tuple[Spec, LinearWeights | MoEWeights]]) -> tuple[Op, ...]:
    """Select and prepare on the engine's device.

    Raises:
        HalError: nothing may serve it; the message names the layer.
    """
    device = torch.device(current_platform.device_type)
    try:
        return tuple(_prepared(config, prefix, spec, placed(weights, device)) for spec, weights in asked)
    except HalError as error:
        error.args = (f"layer {prefix}: {error}",)
        raise


def _prepared(config: HalConfig, prefix: str, spec: Spec, weights: LinearWeights | MoEWeights) -> Op:
    if isinstance(spec, LinearSpec) and not spec.weights.quantized:
        return _PlainLinear(spec, weights)  # type: ignore[arg-type]
    return prepare(spec, weights, config.options.chosen_policy, layer=prefix)


class _PlainLinear(QuantLinear):
    """An unquantized part of a layer whose other parts are quantized, in the model's dtype, as vLLM computes it."""

    def __init__(self, spec: LinearSpec, weights: LinearWeights) -> None:
        super().__init__()
        self.register_buffer("weight", weights.weight.values.to(torch_dtype(spec.dtype)))
        self.register_buffer("bias", weights.bias)

    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = torch.nn.functional.linear(x, self.get_buffer("weight"), self._buffers["bias"])
        return y if out is None else out.copy_(y)

    def update(self, weights: LinearWeights) -> None:
        self.get_buffer("weight").copy_(weights.weight.values)
        if self._buffers["bias"] is not None:
            self.get_buffer("bias").copy_(weights.bias)


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
        if self.held is not None:
            raise ShapeError(f"layer {self.prefix}", "its weights were loaded before", "start another engine: reloading is not served")
        bias = self._fused_bias(layer, checkpoint)
        columns = rank_cut(f"{self.prefix}: k", linear_spec(self.planned[0]).k, self.k, layer.tp_rank, layer.tp_size)
        asked = rank_linears(checkpoint, self._parts(layer), columns, self.config.options.numerics, bias)
        made = prepare_ops(self.config, self.prefix, asked)
        self.held = HeldLayer(self.prefix, made, (layer.tp_rank, layer.tp_size))
        self.key = hold(self.config.key, self.held)
        layer.hal_ops = torch.nn.ModuleList(made)

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
