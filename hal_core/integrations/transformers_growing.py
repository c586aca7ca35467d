"""transformers' own float cache, appended in place: a token costs a copy of its keys and values, not one of the whole prefix."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cache_argument", "growing_cache"]

_STEP = 256


class _GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer whose keys and values are the front of a larger buffer.

    Everything else that transformers does to a layer (crop, reorder, repeat) replaces ``keys`` and ``values``. What is found there and is
    no front of the buffers any more is copied into new ones, so nothing but ``update`` needs to know of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """All keys and values, ``[B, H, tokens, D]``, views of the buffers."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return super().update(key_states, value_states)
        held = self.get_seq_length()
        keys, values = self._room(key_states, value_states, held)
        count = key_states.shape[-2]
        keys.narrow(-2, held, count).copy_(key_states)
        values.narrow(-2, held, count).copy_(value_states)
        self.keys, self.values = keys.narrow(-2, 0, held + count), values.narrow(-2, 0, held + count)
        return self.keys, self.values

    def _room(self, key_states: Tensor, value_states: Tensor, held: int) -> tuple[Tensor, Tensor]:
        """Buffers that hold the present tokens and have room for the new ones."""
        wanted = held + key_states.shape[-2]
        buffers = self._buffers
        if buffers is not None and held and wanted <= buffers[0].shape[-2] and self._is_front(buffers):
            return buffers
        room = -(-max(wanted, held + held // 2) // _STEP) * _STEP
        made = tuple(new.new_empty((*new.shape[:-2], room, new.shape[-1])) for new in (key_states, value_states))
        for buffer, old in zip(made, (self.keys, self.values), strict=True):
            if held and old is not None:
                buffer.narrow(-2, 0, held).copy_(old)
        self._buffers = made[0], made[1]
        return self._buffers

    def _is_front(self, buffers: tuple[Tensor, Tensor]) -> bool:
        return all(
            held is not None
            and held.data_ptr() == buffer.data_ptr()
            and held.stride() == buffer.stride()
            and held.shape[:-2] == buffer.shape[:-2]
            for held, buffer in zip((self.keys, self.values), buffers, strict=True)
        )

    def reset(self) -> None:
        super().reset()
        self._buffers = None


def cache_argument(model: Any) -> str:
    """The name under which this version of transformers takes a cache, in ``forward`` and in ``generate``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def growing_cache(model: Any) -> DynamicCache | None:
    """The cache that ``model.generate`` would make, with plain layers appended in place; layers of other kinds stay transformers' own.

    Args:
        model: a ``transformers`` model; its config says which kinds of layers there are.

    Returns:
        None where ``generate`` makes a cache of another class for this model.
    """
    if not model._supports_default_dynamic_cache() or model.config.is_encoder_decoder or model.generation_config.cache_implementation:
        return None
    cache = DynamicCache(config=model.config)
    cache.layers = [_GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
