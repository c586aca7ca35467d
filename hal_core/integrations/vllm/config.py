"""vLLM's quantization method ``hal``: our readers decide what is quantized, our methods serve it, everything else stays vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from hal_core import settings
from hal_core.api import open_checkpoint
from hal_core.dtypes import dtype_word
from hal_core.errors import FormatError
from hal_core.integrations.vllm.complete import check_plain_parameters
from hal_core.integrations.vllm.experts import HalExpertsMethod
from hal_core.integrations.vllm.held import serving_key
from hal_core.integrations.vllm.kv_request import cache_request
from hal_core.integrations.vllm.linear import HalLinearMethod
from hal_core.integrations.vllm.options import HalOptions
from hal_core.integrations.vllm.served import ServedCheckpoint, fused_parts
from hal_core.integrations.vllm.source import checkpoint_name
from hal_core.integrations.vllm.vocab import HalTiedHeadMethod, HalVocabMethod
from hal_core.memory import Trimmer

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

__all__ = ["HalConfig"]


class _HiddenNames:
    """In the place of a pattern that finds the names that vLLM's loader must drop."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def search(self, key: str) -> bool:
        return key in self.names


@register_quantization_config("hal")
class HalConfig(QuantizationConfig):
    """One engine's view of its checkpoint. Sent to other processes as a path: each opens the checkpoint for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.path: str | None = None
        self.served: ServedCheckpoint | None = None
        self.key = ""
        self.options = HalOptions()
        self.trimmer = Trimmer()
        self._mapper: WeightsMapper | None = None
        self._checked = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "served": None, "_mapper": None, "_checked": False}

    def get_name(self) -> str:
        return "hal"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HalConfig:
        return cls()

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None) -> str | None:
        return "hal" if user_quant == "hal" or (user_quant is None and settings.vllm_auto()) else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the headers and plan, before an engine is started and memory is spent.

        Raises:
            FormatError: the checkpoint is incomplete, contradicts itself, or holds nothing that is quantized.
        """
        self.path = checkpoint_name(model_name, revision)
        checkpoint = open_checkpoint(self.path)
        planned = ServedCheckpoint(checkpoint, "fp32", "checkpoint").modules.values()
        if not planned:
            raise FormatError(f"checkpoint {model_name}", "nothing in it is quantized", "leave quantization='hal' out")
        check_plain_parameters(checkpoint, planned)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self._mapper = hf_to_vllm_mapper

    def opened(self) -> ServedCheckpoint:
        """The checkpoint, opened in this process when first asked for.

        Raises:
            SettingError, PolicyError, ValueDecodeError: options that are unknown or do not parse.
        """
        if self.served is None:
            config = get_current_vllm_config()
            self.options = HalOptions.of(config.additional_config)
            cache_request(config)  # where it cannot be served, no attention of ours would be asked
            assert self.path is not None  # vLLM tells it before it builds a model
            dtype, rename = dtype_word(config.model_config.dtype), None if self._mapper is None else self._mapper.map_name
            self.served = ServedCheckpoint(open_checkpoint(self.path), dtype, self.options.numerics, rename)
            parallel, options = config.parallel_config, (self.options, self.options.chosen_policy)
            self.key = serving_key(self.path, dtype, *options, parallel.rank, parallel.world_size, parallel.enable_expert_parallel)
        return self.served

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:  # type: ignore[override,unused-ignore]
        """Drops the tensors of quantized layers from what vLLM loads: they are read when their layer is prepared."""
        names = self.opened().hidden_names()
        mapped = () if self._mapper is None else filter(None, map(self._mapper.map_name, names))
        return WeightsMapper(orig_to_new_regex={_HiddenNames(names.union(mapped)): None})

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """Our method where the layer is quantized; vLLM's own where nothing of it is.

        Raises:
            FormatError: a layer of another kind with quantized parameters, or one that is quantized in part.
        """
        served = self.opened()
        if isinstance(layer, LinearBase):
            found = served.take(prefix, fused_parts(prefix, self.packed_modules_mapping))
            return HalLinearMethod(self, prefix, found) if found else UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts):
            found = served.take(prefix)
            if found:
                return HalExpertsMethod(self, layer.moe_config, prefix, found[0])
        if isinstance(layer, VocabParallelEmbedding):
            prefix = prefix or served.only_embedding()  # many models of vLLM do not tell it
            found = served.take(prefix)
            if found:
                return HalVocabMethod(self, prefix, found[0])
            if prefix.rpartition(".")[2] == "lm_head" and served.tied_embedding() is not None:
                return HalTiedHeadMethod()
        stray = served.below(prefix)
        if stray is not None:
            found_kind = f"a {type(layer).__name__}, and {stray} is quantized"
            raise FormatError(f"layer {prefix}", found_kind, "only linears, routed experts, embeddings and heads are served")
        return None

    def ready(self) -> ServedCheckpoint:
        """The checkpoint, once all layers exist: every quantized parameter must have found its place."""
        served = self.opened()
        if not self._checked:
            served.check_all_taken(whole_model=get_current_vllm_config().parallel_config.pipeline_parallel_size == 1)
            self._checked = True
        return served
