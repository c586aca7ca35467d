"""vLLM's attention over pages of a hal scheme; vLLM imports it when a layer asks for its CPU attention.

The plugin puts :class:`HalAttentionBackend` in the place of the CPU backend, the only way in: on a CPU vLLM takes that one whatever is
asked for. Unless the settings name a scheme, it answers with vLLM's own classes. Allocation, prefix cache, chunked prefill and preemption
stay vLLM's; bytes of a token are told to its allocator by ``customize_spec``.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none, get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from hal_core.api import select
from hal_core.dtypes import dtype_word
from hal_core.errors import SettingError
from hal_core.integrations.vllm.held import HeldLayer, hold
from hal_core.integrations.vllm.kv import CacheRequest, LayerPages, rank_params
from hal_core.integrations.vllm.kv_request import cache_params, cache_request
from hal_core.spec import KVCacheSpec

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec


__all__ = ["HalAttention", "HalAttentionBackend", "HalAttentionMetadataBuilder"]

#: No graph reaches pages by a key, so theirs may differ from engine to engine.
_numbers = itertools.count()


class HalAttentionBackend(CPUAttentionBackend):
    """The CPU backend: ours where the settings of the engine being built name a scheme, else vLLM's own."""

    #: What the engine that was built last asks for: vLLM wants some of the answers outside of any current config.
    _request: ClassVar[CacheRequest | None] = None

    @classmethod
    def request(cls) -> CacheRequest | None:
        config = get_current_vllm_config_or_none()
        if config is not None:
            HalAttentionBackend._request = cache_request(config)
        return HalAttentionBackend._request

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CPUAttentionBackendImpl if HalAttentionBackend.request() is None else HalAttention

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return CPUAttentionMetadataBuilder if HalAttentionBackend.request() is None else HalAttentionMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        request = HalAttentionBackend.request()
        if request is None:
            return super().customize_spec(spec)
        return replace(spec, dtype=torch.uint8, state_content_bytes=request.token_bytes(spec.head_size, spec.head_size_v))


class HalAttention(CPUAttentionBackendImpl):
    """Attention of one layer over our pages; refuses at construction what it could not serve later."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, sinks,
        )  # fmt: skip
        config = get_current_vllm_config()
        request = cache_request(config)
        assert request is not None  # the backend has looked
        self.request = request
        self._check_served(kv_cache_dtype)
        self.spec = KVCacheSpec(
            num_heads, num_kv_heads, head_size, config.cache_config.block_size, request.keys, request.values,
            dtype=dtype_word(config.model_config.dtype), window=sliding_window, sinks=sinks is not None, soft_cap=logits_soft_cap or None,
        )  # fmt: skip
        self.pages: LayerPages | None = None
        self.held: HeldLayer
        if not request.scaled:  # else the checkpoint's scales are part of the question
            select(self.spec, policy=request.policy)

    def _check_served(self, kv_cache_dtype: str) -> None:
        asked = f"kv_cache {self.request}"
        if kv_cache_dtype not in {"auto", "float32", "float16", "bfloat16"}:
            raise SettingError(asked, f"kv_cache_dtype is {kv_cache_dtype!r} beside it", "leave vLLM's setting at auto")
        if self.attn_type != AttentionType.DECODER:
            raise SettingError(asked, f"a layer of type {self.attn_type!r}", "decoder self-attention is served; leave kv_cache out")
        if self.alibi_slopes is not None:
            raise SettingError(asked, "a layer with ALiBi slopes", "leave kv_cache out: vLLM's own cache serves it")

    def prepare(self, config: VllmConfig, layer: str, value_dim: int, block_size: int) -> None:
        """Make the op, for the block size that vLLM settled on.

        Raises:
            NoKernelError, PolicyError, SettingError: nothing serves it.
        """
        spec = replace(self.spec, page_size=block_size, value_dim=value_dim)
        rank = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        params = None
        if self.request.scaled:
            found = cache_params(config).get(extract_layer_index(layer))
            params = rank_params(found, config.model_config.get_total_num_kv_heads(), *rank)
        self.pages = LayerPages(spec, params, self.request.policy, layer)
        self.held = HeldLayer(layer, (self.pages.op,), rank)
        hold(f"kv{next(_numbers)}", self.held)

    def _ready(self) -> LayerPages:
        if self.pages is None:
            raise SettingError(f"kv_cache {self.request}", "a layer whose pages were never prepared", "leave kv_cache out")
        return self.pages

    def do_kv_cache_update(self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        self._ready().append(kv_cache, key, value, slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise SettingError(f"kv_cache {self.request}", "output to be quantized by attention", "turn that fusion off")
        if attn_metadata is None:  # a warm-up
            return output
        rows = attn_metadata.num_actual_tokens
        self.held.calls += 1
        self._ready().attend(
            query[:rows], kv_cache, attn_metadata.block_table, attn_metadata.seq_lens, attn_metadata.query_start_loc,
            scale=self.scale, causal=attn_metadata.causal, sinks=None if self.sinks is None else self.sinks.float(), out=output[:rows],
        )  # fmt: skip
        return output


class HalAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Prepares the layers of its group, and passes on what a step needs: vLLM's plan for its own kernel is not made."""

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        for name, layer in get_layers_from_vllm_config(vllm_config, Attention, layer_names).items():
            assert isinstance(layer.impl, HalAttention)
            layer.impl.prepare(vllm_config, name, layer.head_size_v, kv_cache_spec.block_size)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise SettingError("kv_cache", "a batch in which some requests attend causally and some do not", "leave kv_cache out")
        return CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens, max_query_len=common.max_query_len, query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len, seq_lens=common.seq_lens, block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping, scheduler_metadata=None, causal=common.causal,
        )  # fmt: skip
