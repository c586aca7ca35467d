"""Is every layer and every expert there? Asked of names alone, before anything is read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hal_core.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["check_layers", "expert_count", "text_config"]

_LAYER = re.compile(r"((?:.*\.)?layers)\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def expert_count(config: Mapping[str, Any]) -> int | None:
    """Experts of a layer by the configuration, or None when it does not say."""
    for key in _COUNTS:
        value = text_config(config).get(key)
        if type(value) is int and value > 0:
            return value
    return None


def check_layers(names: Iterable[str], config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that lacks a whole layer, or an expert of a layer.

    Raises:
        FormatError: names the missing layer, or the missing expert's tensor.
    """
    layers: dict[str, set[int]] = {}
    experts: dict[str, dict[int, set[str]]] = {}
    for name in names:
        if match := _LAYER.match(name):
            layers.setdefault(match[1], set()).add(int(match[2][:9]))
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(int(match[2][:9]), set()).add(match[3])
    count = text_config(config).get("num_hidden_layers")
    if type(count) is int and layers:
        prefix = max(layers, key=lambda key: len(layers[key]))
        missing = next((index for index in range(min(count, 100_000)) if index not in layers[prefix]), None)
        if missing is not None:
            raise FormatError(f"layer {prefix}.{missing}", f"has no tensor, the config says {count} layers", "fetch the missing file")
    for prefix, found in experts.items():
        _check_experts(prefix, found, expert_count(config))


def _check_experts(prefix: str, found: Mapping[int, set[str]], count: int | None) -> None:
    wanted = set().union(*found.values())
    total = max(found) + 1 if count is None else count
    extra = next((index for index in found if index >= total), None)
    if extra is not None:
        raise FormatError(f"expert {prefix}.{extra}", f"the config says {total} experts", "file and config do not belong together")
    for index in range(min(total, 100_000)):
        lacking = sorted(wanted - found.get(index, set()))
        if lacking:
            raise FormatError(
                f"tensor {prefix}.{index}.{lacking[0]}", f"missing, its {total} experts must all be there", "fetch the missing file"
            )
