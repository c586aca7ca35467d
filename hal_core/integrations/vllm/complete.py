"""Does a checkpoint hold every plain parameter of its model? vLLM does not ask this of quantized ones, and serves what memory held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.errors import FormatError
from hal_core.integrations.skeleton import model_skeleton
from hal_core.integrations.transformers import published_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hal_core.formats.base import Checkpoint
    from hal_core.plan import PlannedOp

__all__ = ["check_plain_parameters"]


def check_plain_parameters(checkpoint: Checkpoint, planned: Iterable[PlannedOp]) -> None:
    """Raise where transformers' model of the config has a parameter that is neither stored nor part of a quantized layer.

    Models that transformers does not know, or whose published names are all others, are passed over: vLLM's own names decide there, by
    the load format ``hal``.

    Raises:
        FormatError: names the parameter.
    """
    try:
        model = model_skeleton(checkpoint, torch.float32)
    except FormatError:
        return  # vLLM has models of its own
    quantized = tuple(f"{op.module}." for op in planned)
    names: dict[int, list[str]] = {}  # a tied parameter has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(published_name(name, checkpoint.entries))
    plain = [group for group in names.values() if not any(name.startswith(quantized) or ".experts." in name for name in group)]
    missing = [group for group in plain if not any(name in checkpoint.entries for name in group)]
    others = any(not entry.quantized and not name.startswith(quantized) for name, entry in checkpoint.entries.items())
    named_otherwise = others and len(missing) == len(plain)
    if missing and not named_otherwise:
        raise FormatError(f"parameter {missing[0][0]}", "missing from the files", "complete the checkpoint")
