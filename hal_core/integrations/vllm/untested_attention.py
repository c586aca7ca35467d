"""vLLM's CPU attention in a release that the plugin was not tested with: its own, or an error where a ``kv_cache`` of ours is asked for."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from hal_core.integrations.vllm.options import HalOptions
from hal_core.integrations.vllm.untested import untested

__all__ = ["UntestedCPUBackend"]


class UntestedCPUBackend(CPUAttentionBackend):
    """vLLM's, unless a scheme is asked for."""

    @staticmethod
    def get_impl_cls() -> Any:
        config = get_current_vllm_config_or_none()
        asked = None if config is None else HalOptions.of(config.additional_config).kv_cache
        if asked is not None:
            raise untested(f"kv_cache {asked}", str(vllm.__version__))
        return CPUAttentionBackend.get_impl_cls()
