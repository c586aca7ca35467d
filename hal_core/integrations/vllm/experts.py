"""Blocks of routed experts of vLLM, under tensor and expert parallelism. A rank returns its partial sum; routing stays vLLM's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from hal_core.errors import FormatError, ShapeError
from hal_core.integrations.vllm import ops
from hal_core.integrations.vllm.layer import serve
from hal_core.sharding import ExpertsShare, rank_cut, rank_experts
from hal_core.spec import Activation, MoESpec

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    from hal_core.integrations.vllm.config import HalConfig
    from hal_core.integrations.vllm.held import HeldLayer
    from hal_core.plan import PlannedOp

__all__ = ["HalExpertsMethod"]

#: Of vLLM's names, those that are one of ours, and whether they have a gate.
_ACTIVATIONS = {
    "silu": ("silu", True), "gelu": ("gelu", True), "gelu_tanh": ("gelu_tanh", True), "swigluoai": ("swiglu_oai", True),
    "swigluoai_uninterleave": ("swiglu_oai", True), "relu2_no_mul": ("relu2", False),
}  # fmt: skip


class HalExpertsMethod(FusedMoEMethodBase):
    """One block's method: it makes no parameters, and reads its experts of the checkpoint when vLLM has loaded the rest."""

    def __init__(self, config: HalConfig, moe: FusedMoEConfig, prefix: str, planned: PlannedOp) -> None:
        super().__init__(moe)
        self.config, self.prefix, self.planned = config, prefix, planned
        self.held: HeldLayer | None = None
        self.key, self.inner = "", 0

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, *others: Any) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        spec = self._spec()
        engine = (layer.global_num_experts, layer.top_k, hidden_size)
        if engine != (spec.num_experts, spec.top_k, spec.hidden):
            found = (
                f"{engine} experts, top k and hidden size in the engine, {(spec.num_experts, spec.top_k, spec.hidden)} in the checkpoint"
            )
            raise ShapeError(f"layer {self.prefix}", found, "fused shared and redundant experts are not served: turn them off")
        self.inner = intermediate_size_per_partition

    def _spec(self) -> MoESpec:
        if not isinstance(self.planned.spec, MoESpec):
            raise FormatError(f"layer {self.prefix}", f"experts in the engine, {self.planned.spec.op} in the checkpoint")
        return self.planned.spec

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read, cut, select, prepare.

        Raises:
            FormatError, ShapeError, NoKernelError: names the layer.
        """
        checkpoint, parallel = self.config.ready().checkpoint, self.moe.moe_parallel_config
        local = layer.expert_map
        ids = tuple(range(layer.global_num_experts)) if local is None else _global_ids(local)
        inner = rank_cut(f"{self.prefix}: intermediate", self._spec().intermediate, self.inner, parallel.tp_rank, parallel.tp_size)
        share = ExpertsShare(ids, inner, adds_bias=parallel.tp_rank == 0)
        spec, weights = rank_experts(checkpoint, self.planned, share, self.config.options.numerics, layer.params_dtype)
        spec = replace(spec, activation=self._activation(layer), router_weight_on_input=layer.apply_router_weight_on_input)
        rank = (parallel.ep_rank, parallel.ep_size) if parallel.use_ep else (parallel.tp_rank, parallel.tp_size)
        mapped = local.to(torch.int32) if spec.expert_map else None
        serve(self, layer, rank, [(spec, weights)], notes=self.planned.notes, expert_map=mapped)

    def _activation(self, layer: Any) -> Activation:
        """What the engine's model computes; numbers that it leaves to its kernels are those of the checkpoint."""
        spec, name = self._spec(), layer.activation.value
        kind, gated = _ACTIVATIONS.get(name, ("", False))
        if not kind or gated != (spec.gate is not None) or layer.swiglu_beta not in (None, 1.0):
            found = f"activation {name} with beta {layer.swiglu_beta}, and {'a' if spec.gate else 'no'} gate in the checkpoint"
            raise ShapeError(f"layer {self.prefix}", found, f"served: {', '.join(_ACTIVATIONS)}")
        own = spec.activation if spec.activation.kind == kind else Activation(kind)
        alpha = layer.swiglu_alpha if kind == "swiglu_oai" and layer.swiglu_alpha is not None else own.alpha
        return Activation(kind, alpha, own.limit if layer.swiglu_limit is None else layer.swiglu_limit)

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any, shared_experts_input: Tensor | None
    ) -> Tensor:
        return ops.experts(x, topk_weights, topk_ids, self.key)


def _global_ids(expert_map: Tensor) -> tuple[int, ...]:
    """Global ids of this rank's experts in the order of their local ones."""
    held = sorted((local, expert) for expert, local in enumerate(expert_map.tolist()) if local >= 0)
    return tuple(expert for _, expert in held)
