"""The project's words for float dtypes, and torch's."""

from __future__ import annotations

import torch

from hal_core.errors import ShapeError

__all__ = ["dtype_word", "torch_dtype"]

_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WORDS = {value: key for key, value in _TORCH.items()}


def torch_dtype(word: str) -> torch.dtype:
    """``"bf16"`` to ``torch.bfloat16``."""
    if word not in _TORCH:
        raise ShapeError(f"dtype {word!r}", "not a float dtype of the project", f"use one of {', '.join(_TORCH)}")
    return _TORCH[word]


def dtype_word(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` to ``"bf16"``."""
    if dtype not in _WORDS:
        raise ShapeError(f"dtype {dtype}", "not served", f"use one of {', '.join(map(str, _WORDS))}")
    return _WORDS[dtype]
