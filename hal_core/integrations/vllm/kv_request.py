"""What the configuration of an engine, and the checkpoint that it serves, say of our KV pages."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from hal_core.api import open_checkpoint
from hal_core.errors import SettingError
from hal_core.integrations.vllm.kv import CacheRequest
from hal_core.integrations.vllm.options import HalOptions
from hal_core.integrations.vllm.source import checkpoint_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig

    from hal_core.kv.op import KVParams

__all__ = ["cache_params", "cache_request"]


def cache_request(config: VllmConfig) -> CacheRequest | None:
    """The scheme that is asked for, or None for vLLM's own cache.

    Raises:
        SettingError, ValueDecodeError, PolicyError: not a setting that can be served.
    """
    options = HalOptions.of(config.additional_config)
    if options.kv_cache is None:
        return None
    if not current_platform.is_cpu():
        raise SettingError(f"kv_cache {options.kv_cache}", f"the device is {current_platform.device_type}", "only a CPU has our pages yet")
    return CacheRequest.parse(options.kv_cache, options.chosen_policy)


def cache_params(config: VllmConfig) -> Mapping[int, KVParams]:
    """The checkpoint's static scales by layer; empty where it has none.

    Raises:
        FormatError: scales that no cache can use.
    """
    return _checkpoint_params(checkpoint_name(config.model_config.model, config.model_config.revision))


@functools.lru_cache(maxsize=1)
def _checkpoint_params(name: str) -> Mapping[int, KVParams]:
    return open_checkpoint(name).kv_params()
