"""What a quantized cache does to a model's predictions, in one forward of a whole text instead of one for each token.

Every query attends to keys and values that were quantized and read back, exactly those that it would find in the packed pages when its
own token was decoded: where scales hold over groups of 32 tokens, the keys of its open group are still unquantized. Nothing is packed,
so this measures quality, not speed or memory.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hal_core.dtypes import dtype_word
from hal_core.errors import SettingError
from hal_core.integrations.transformers_kv_attention import is_supported, register_function
from hal_core.integrations.transformers_kv_conditioning import Conditioning
from hal_core.kv.op import KVParams
from hal_core.kv.quantizer import Quantizer, quantizer
from hal_core.kv.scales import check_given_scales, computed_params
from hal_core.kv.scheme import KV_GROUP, KVScheme
from hal_core.spec import KVCacheSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

__all__ = ["simulated_cache"]

_NAME = "hal_simulated"


@dataclass
class _Simulation:
    """Schemes of a run, and the quantizers of its layers, made when a layer is first seen."""

    keys: KVScheme
    values: KVScheme
    seed: int
    params: Mapping[int, KVParams]
    prompt: int
    made: dict[int, tuple[Quantizer, Quantizer]] = field(default_factory=dict)

    def quantizers(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Quantizer, Quantizer]:
        if layer not in self.made:
            spec = KVCacheSpec(
                query.shape[1], key.shape[1], key.shape[3], KV_GROUP, self.keys, self.values, dtype=dtype_word(key.dtype),
                value_dim=value.shape[3], seed=self.seed,
            )  # fmt: skip
            params = self.params.get(layer)
            if params is None and (spec.keys.scaled or spec.values.scaled):
                tokens, others = key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1)
                params = computed_params(spec, tokens, others, KVParams())
            check_given_scales(spec, params or KVParams())
            self.made[layer] = quantizer(spec, "keys", params), quantizer(spec, "values", params)
        return self.made[layer]


_running: ContextVar[_Simulation | None] = ContextVar("hal_simulated_cache", default=None)


@contextmanager
def simulated_cache(
    model: Any, keys: KVScheme, values: KVScheme, *, seed: int = 0, params: Mapping[int, KVParams] | None = None, prompt: int = 0
) -> Iterator[None]:
    """``with`` block in which ``model(input_ids=.., use_cache=False)`` reads keys and values as a cache of these schemes gives them.

    Args:
        model: a ``transformers`` causal model without sliding windows, sinks or soft caps.
        keys: how keys are stored.
        values: how values are stored.
        seed: of the rotations.
        params: static scales and channel splits by layer; scales of the others are computed from the first forward's tokens.
        prompt: tokens at the start of each row that keys are conditioned by (:mod:`hal_core.integrations.transformers_kv_conditioning`), as
            those of a prompt of this length are in the cache; 0 for unconditioned keys.

    Raises:
        SettingError: the model's attention cannot be replaced.
    """
    if not is_supported(model):
        found = "does not use transformers' attention interface"
        raise SettingError(f"a simulated cache of {type(model).__name__}", found, "use a model that does")
    register_function(_NAME, _attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    token = _running.set(_Simulation(keys, values.for_values(), seed, params or {}, prompt))
    try:
        yield
    finally:
        _running.reset(token)
        model.set_attn_implementation(before)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **others: Any
) -> tuple[Tensor, None]:
    simulation = _running.get()
    if simulation is None:
        raise SettingError(f"attention {_NAME}", "used outside of a simulated_cache block", "set another attention implementation")
    unserved = [name for name in ("sliding_window", "softcap", "s_aux") if others.get(name) is not None]
    if attention_mask is not None or key.shape[2] != query.shape[2] or unserved:
        found = f"has {', '.join(unserved) or 'a mask or a cache'}"
        raise SettingError(f"a simulated cache of {type(module).__name__}", found, "use the cache itself")
    if simulation.prompt:
        first_keys, first_queries = (x[:, :, : simulation.prompt].transpose(1, 2).flatten(0, 1) for x in (key, query))
        conditioning = Conditioning.measured(first_keys, first_queries, shifted=True)
        if conditioning is not None:
            key, query = conditioning.keys(key.transpose(1, 2)).transpose(1, 2), _conditioned(query, conditioning)
    of_keys, of_values = simulation.quantizers(int(module.layer_idx), query, key, value)  # type: ignore[arg-type]
    stored = of_values.dequantize(of_values.quantize(value.transpose(1, 2).float())).transpose(1, 2)
    if of_keys.scheme.grouped:
        out = _over_groups(query.float(), key.float(), stored, of_keys, scaling)
    else:
        read = of_keys.dequantize(of_keys.quantize(key.transpose(1, 2).float())).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(query.float(), read, stored, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).to(query.dtype).contiguous(), None


def _conditioned(query: Tensor, conditioning: Conditioning) -> Tensor:
    rows = query.transpose(1, 2)
    return conditioning.queries(rows.flatten(0, 1)).reshape(rows.shape).transpose(1, 2)


def _over_groups(query: Tensor, key: Tensor, value: Tensor, of_keys: Quantizer, scale: float | None) -> Tensor:
    """Attention where the query at p sees the quantized keys of groups that are complete with p, and the others as they were."""
    tokens = key.shape[2]
    closed = tokens // KV_GROUP * KV_GROUP
    groups = key[:, :, :closed].transpose(1, 2).reshape(len(key), -1, KV_GROUP, key.shape[1], key.shape[3])
    read = of_keys.dequantize(of_keys.quantize(groups)).flatten(1, 2).transpose(1, 2)
    at = torch.arange(tokens, device=key.device)
    complete = (at + 1) // KV_GROUP * KV_GROUP
    from_pages = at[:closed] < complete[:, None]
    from_tail = (at >= complete[:, None]) & (at <= at[:, None])
    mask = torch.cat((from_pages, from_tail), dim=1)
    both = torch.cat((value[:, :, :closed], value), dim=2)
    return nn.functional.scaled_dot_product_attention(
        query, torch.cat((read, key), dim=2), both, attn_mask=mask, scale=scale, enable_gqa=True
    )
