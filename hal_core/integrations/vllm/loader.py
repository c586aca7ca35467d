"""vLLM's load format ``hal``: plain parameters come from our readers too, checked, and every parameter of the model must be among them.

Needed for files whose names vLLM does not know (GGUF); elsewhere it spares reading the quantized tensors twice.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from hal_core.errors import SettingError
from hal_core.integrations.vllm.config import HalConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["HalLoader"]


@register_model_loader("hal")
class HalLoader(DefaultModelLoader):
    """vLLM's loader with our reader as its source, and its check of completeness, which is off for quantized models, turned on."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="auto"))
        self.enable_weights_track = True

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        config = get_current_vllm_config().quant_config
        if not isinstance(config, HalConfig):
            raise SettingError("load_format hal", f"quantization is {model_config.quantization}", "use it with quantization='hal'")
        served = config.opened()
        self.counter_before_loading_weights = time.perf_counter()
        hidden = served.hidden_names()
        for name, entry in served.checkpoint.entries.items():
            if not entry.quantized and name not in hidden:
                yield name, served.checkpoint.load(name)
