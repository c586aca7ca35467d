"""Static scales of an fp8 key/value cache that a checkpoint carries: ``k_scale`` and ``v_scale`` of each attention layer.

compressed-tensors stores them under the attention module, ModelOpt under its ``k_proj`` and ``v_proj``. A stored code times the scale is
the number in both. One scale a layer, or one a kv head.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from hal_core.errors import FormatError
from hal_core.kv.op import KVParams
from hal_core.kv.quantizer import USABLE_SCALES, usable_scales

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from hal_core.formats.safetensors_file import TensorInfo

__all__ = ["CACHE_SCALES", "cache_notes", "cache_params"]

#: Last parts of their names; scales of queries and of probabilities belong to kernels that attend in fp8, which none here does.
CACHE_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "prob_scale"})
_SIDES = ("k_scale", "v_scale")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.(?:self_attn|attn|attention)\.(?:[kv]_proj\.)?([kv]_scale)")
_FLOATS = ("F32", "F16", "BF16")
_MOST_HEADS = 4096


def cache_params(infos: Iterable[TensorInfo], config: Mapping[str, Any]) -> dict[int, KVParams]:
    """Calibrated parameters by layer; empty where the checkpoint has no scales that an fp8 cache can use.

    Raises:
        FormatError: scales of one side only, stored twice, of another shape than one or one a kv head, or no positive, normal numbers.
    """
    if not _for_fp8(config):
        return {}
    found: dict[int, dict[str, TensorInfo]] = {}
    for info in infos:
        match = _LAYER.fullmatch(info.name)
        if match is not None:
            sides = found.setdefault(int(match[1]), {})
            if match[2] in sides:
                raise FormatError(f"tensor {info.name}", f"stored beside {sides[match[2]].name}", "a layer has one scale for each side")
            sides[match[2]] = info
    return {layer: _params(layer, sides, config) for layer, sides in sorted(found.items())}


def _params(layer: int, sides: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> KVParams:
    missing = next((side for side in _SIDES if side not in sides), None)
    if missing is not None:
        raise FormatError(f"KV-cache scales of layer {layer}", f"{missing} is missing", "complete the checkpoint")
    layers = config.get("num_hidden_layers")
    if type(layers) is int and layer >= layers:
        raise FormatError(f"tensor {sides['k_scale'].name}", f"layer {layer} of {layers}", "check num_hidden_layers in config.json")
    keys, values = (_scale(sides[side], config) for side in _SIDES)
    return KVParams(keys, values, "calibrated")


def _scale(info: TensorInfo, config: Mapping[str, Any]) -> Tensor:
    """float32 ``[1]`` or ``[kv heads]``."""
    heads = config.get("num_key_value_heads", config.get("num_attention_heads"))
    count = int(torch.Size(info.shape).numel())
    if info.dtype not in _FLOATS or count > _MOST_HEADS or count not in (1, heads):
        raise FormatError(f"tensor {info.name}", f"{info.dtype} {list(info.shape)}", f"a scale is one float, or one a kv head ({heads})")
    scale = info.read().reshape(-1).float()
    if not usable_scales(scale):
        raise FormatError(f"tensor {info.name}", f"{scale[:4].tolist()}", USABLE_SCALES)
    return scale


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    quant = config.get("quantization_config")
    return quant if isinstance(quant, dict) else {}


def _for_fp8(config: Mapping[str, Any]) -> bool:
    """Whether the scales are those of 8-bit floats: unless the config says something else."""
    scheme = _quantization(config).get("kv_cache_scheme")
    return not isinstance(scheme, dict) or (scheme.get("type", "float") == "float" and scheme.get("num_bits", 8) == 8)


def cache_notes(scales: int, config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the checkpoint says of its KV cache, one sentence; the cache is the caller's choice."""
    if scales and _for_fp8(config):
        return (f"KV-cache scales are present, which an fp8 cache uses: {scales} tensors",)
    if scales:
        return (f"KV-cache scales are present and not used, as the config says they are not those of fp8: {scales} tensors",)
    asked = _quantization(config).get("kv_cache_scheme") is not None
    return ("the config's kv_cache_scheme is not followed by itself: ask for a quantized KV cache",) if asked else ()
