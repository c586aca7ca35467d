"""What a quantized model is compared with: the same weights in float32, computed by transformers alone."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hal_core.errors import FormatError, MissingDependencyError
from hal_core.formats.base import Checkpoint
from hal_core.schemes import WeightScheme

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.canonical import QuantizedTensor

__all__ = ["Dequantized", "dequantized_model", "transformers_model"]


class Dequantized(Checkpoint):
    """A checkpoint seen through float32: every parameter is plain, and is dequantized when it is asked for."""

    def __init__(self, packed: Checkpoint) -> None:
        self.packed = packed
        self.format = f"{packed.format}, dequantized"
        self.path, self.config, self.files = packed.path, packed.config, packed.files
        plain = WeightScheme("fp32")
        self.entries = {
            name: replace(entry, scheme=plain, activations=None, fused=False) for name, entry in packed.entries.items()
        }  # fmt: skip

    def read(self, name: str) -> QuantizedTensor:
        raise FormatError(f"tensor {name}", "is dequantized here", "use load()")

    def load(self, name: str) -> Tensor:
        entry = self.packed.entries.get(name)
        if entry is not None and entry.quantized:
            weight = self.packed.read(name).dequantize()
            return weight.transpose(-1, -2).contiguous() if entry.fused else weight
        return self.packed.load(name).float()


def dequantized_model(checkpoint: Checkpoint) -> Any:
    """A plain ``transformers`` model in float32 of the weights as this library dequantizes them. No HAL op is in it."""
    from hal_core.integrations.transformers import load

    return load(Dequantized(checkpoint), dtype="fp32")


def transformers_model(checkpoint: Checkpoint) -> Any:
    """As :func:`dequantized_model`; a GGUF file is read and dequantized by transformers' own loader, which shares no code with ours.

    Raises:
        FormatError: transformers cannot read the file; holds its reason.
        MissingDependencyError: a GGUF file without accelerate, which transformers needs for it.
    """
    if checkpoint.path.suffix != ".gguf":
        return dequantized_model(checkpoint)
    if find_spec("accelerate") is None:
        fix = "pip install accelerate, or compare with --against dequantized"
        raise MissingDependencyError("a GGUF file in transformers", "accelerate is not installed", fix)
    import torch
    from transformers import AutoModelForCausalLM

    folder, name = str(checkpoint.path.parent), checkpoint.path.name
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FormatError(f"{checkpoint.path} in transformers", reason, "compare with --against dequantized") from error
    model.requires_grad_(False)
    return model  # from_pretrained leaves it in evaluation mode
