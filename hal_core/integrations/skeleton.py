"""A transformers model without storage, built from a configuration that is not trusted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from hal_core.errors import FormatError, MissingDependencyError
from hal_core.reading import short

if TYPE_CHECKING:
    from hal_core.formats.base import Checkpoint

__all__ = ["finish", "model_skeleton"]

#: Fields that say nothing of the weights and could make transformers fetch code, allocate by their value or change its answers.
_DROPPED = frozenset({
    "quantization_config", "compression_config", "dtype", "torch_dtype", "auto_map", "num_labels", "id2label", "label2id", "problem_type",
    "return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "torchscript", "is_encoder_decoder", "is_decoder",
    "add_cross_attention", "task_specific_params", "chunk_size_feed_forward", "pruned_heads",
})  # fmt: skip


def model_skeleton(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The model on the meta device: every shape, no storage.

    Raises:
        FormatError: the configuration describes no model that transformers can build.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingDependencyError("loading a model", "transformers is not installed", "pip install 'hal-core[transformers]'") from error
    fields = {name: value for name, value in checkpoint.config.items() if _harmless(name)}
    model_type = fields.pop("model_type", None)
    _check_numbers(fields, checkpoint)
    try:
        config = AutoConfig.for_model(model_type, **fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except Exception as error:
        reason = short(error) if str(error) else type(error).__name__
        found = f"model_type {short(repr(model_type), 60)}: {reason}"
        raise FormatError(f"model of {checkpoint.path}", found, "check config.json") from error
    return model.eval().requires_grad_(False)


def _harmless(name: str) -> bool:
    return name not in _DROPPED and not name.startswith("_") and "implementation" not in name


def _check_numbers(fields: dict[str, Any], checkpoint: Checkpoint) -> None:
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"):
        value = fields.get(name)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value) or value < 0):
            raise FormatError(f"model of {checkpoint.path}: field {name}", f"{short(repr(value), 60)}", "it is a small positive number")
        if type(value) is int:
            fields[name] = float(value)  # transformers takes no integer where JSON wrote 0


def finish(model: Any, checkpoint: Checkpoint) -> None:
    """Compute the buffers that no checkpoint stores (rotary frequencies) and read the generation settings.

    Raises:
        FormatError: a buffer that comes out non-finite, or settings that cannot be read.
    """
    for module in model.modules():
        empty = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in empty:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu").fill_(float("nan"))
        if empty and any(True for _ in module.parameters(recurse=False)):
            raise FormatError(f"module {type(module).__name__}", "has both weights and computed buffers", "report this model type")
        if empty:
            model._init_weights(module)
        for name in empty:
            if not bool(module._buffers[name].isfinite().all()):
                found = "not finite as computed from config.json"
                raise FormatError(f"buffer {name} of {type(module).__name__}", found, "check its rope fields")
    if (checkpoint.path / "generation_config.json").is_file():
        from transformers import GenerationConfig

        try:
            model.generation_config = GenerationConfig.from_pretrained(checkpoint.path, local_files_only=True)
        except Exception as error:
            raise FormatError(f"{checkpoint.path / 'generation_config.json'}", short(error), "mend it, or remove it") from error
