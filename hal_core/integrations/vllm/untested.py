"""The plugin in a vLLM that it was not tested with: whoever asks for anything of it is told so, and nobody else is disturbed."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from hal_core import settings
from hal_core.errors import SettingError
from hal_core.integrations import vllm as integration

__all__ = ["register_refusal", "untested"]


def register_refusal(found: str) -> None:
    """Register a method, and an attention, that refuse; log why, where even those interfaces are gone."""
    for asked, register in (("quantization hal", _register_method), ("kv_cache", _register_attention)):
        try:
            register(found)
        except (ImportError, AttributeError) as error:
            logging.getLogger("vllm.hal_core").error("%s (%s)", untested(asked, found), error)


def _register_method(found: str) -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    def override(cls: type, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None) -> None:
        if user_quant == "hal" or (user_quant is None and settings.vllm_auto()):
            raise untested("quantization hal", found)

    def from_config(cls: type, config: dict[str, Any]) -> NoReturn:
        raise untested("quantization hal", found)

    body = {"override_quantization_method": classmethod(override), "from_config": classmethod(from_config)}
    register_quantization_config("hal")(type("UntestedHalConfig", (QuantizationConfig,), body))


def _register_attention(_found: str) -> None:
    """Without the method nothing else of ours would see that a ``kv_cache`` is asked for."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        from hal_core.integrations.vllm import untested_attention as ours  # here, where it may fail and disturb nobody

        register_backend(AttentionBackendEnum.CPU_ATTN, f"{ours.__name__}.{ours.UntestedCPUBackend.__name__}")


def untested(asked: str, found: str) -> SettingError:
    """The error for what is asked of the plugin in a release ``found``."""
    first, last = integration.TESTED
    fix = f"pip install 'vllm>={first},<{last}', or a hal-core that was tested with {found}"
    return SettingError(f"{asked} in vLLM {found}", f"tested with vLLM from {first} up to, not including, {last}", fix)
