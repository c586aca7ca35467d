"""The method ``hal`` in a vLLM that it was not tested with: whoever asks for it is told so, and nobody else is disturbed."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from hal_core import settings
from hal_core.errors import SettingError
from hal_core.integrations import vllm as integration

__all__ = ["register_refusal"]


def register_refusal(found: str) -> None:
    """Register a method that refuses; log why, where even that interface is gone."""
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config
        from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    except ImportError as error:
        logging.getLogger("vllm.hal_core").error("%s (%s)", _refusal(found), error)
        return

    def override(cls: type, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None) -> None:
        if user_quant == "hal" or (user_quant is None and settings.vllm_auto()):
            raise _refusal(found)

    def from_config(cls: type, config: dict[str, Any]) -> NoReturn:
        raise _refusal(found)

    body = {"override_quantization_method": classmethod(override), "from_config": classmethod(from_config)}
    register_quantization_config("hal")(type("UntestedHalConfig", (QuantizationConfig,), body))


def _refusal(found: str) -> SettingError:
    first, last = integration.TESTED
    fix = f"pip install 'vllm>={first},<{last}', or a hal-core that was tested with {found}"
    return SettingError(f"quantization hal in vLLM {found}", f"tested with vLLM from {first} up to, not including, {last}", fix)
