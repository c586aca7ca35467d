"""transformers' own float cache, appended in place: a token costs a copy of its keys and values, not one of the whole prefix."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GrowingLayer", "cache_argument", "growing_cache"]

_STEP = 256


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer whose keys and values are the front of a larger buffer.

    Everything else that transformers does to a layer (crop, reorder, repeat) sets ``keys`` and ``values``. What was set, and is no front of
    the buffers, is copied into new ones before more is appended.
    """

    def __init__(self) -> None:
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._length = 0
        self._set: dict[str, Tensor | None] = {}
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def keys(self) -> Tensor | None:
        """All keys, ``[B, H, tokens, D]``; a view of the buffer, made when asked for, which fused layers do not."""
        return self._side("keys", 0)

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._replace("keys", value)

    @property
    def values(self) -> Tensor | None:
        """All values, as the keys."""
        return self._side("values", 1)

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._replace("values", value)

    def _side(self, name: str, index: int) -> Tensor | None:
        if name in self._set or self._buffers is None:
            return self._set.get(name)
        return self._buffers[index].narrow(-2, 0, self._length)

    def _replace(self, name: str, value: Tensor | None) -> None:
        self._set = {"keys": self.keys, "values": self.values} | {name: value}

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """All keys and values, ``[B, H, tokens, D]``, views of the buffers."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return super().update(key_states, value_states)
        count = key_states.shape[-2]
        keys, values, held = self.room(key_states, value_states, count)
        keys.narrow(-2, held, count).copy_(key_states)
        values.narrow(-2, held, count).copy_(value_states)
        self.grow(held + count)
        return keys.narrow(-2, 0, held + count), values.narrow(-2, 0, held + count)

    def room(self, keys_like: Tensor, values_like: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
        """Buffers ``[B, H, room, D]`` that hold the present tokens and have room for ``count`` more, and the number of the present ones.

        Args:
            keys_like: ``[B, H, any, D]``, of the dtype and device wanted.
            values_like: the same.
            count: new tokens.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys_like, values_like)
        held = self.get_seq_length()
        wanted = held + count
        buffers = self._buffers
        if buffers is not None and held and wanted <= buffers[0].shape[-2] and self._is_front(buffers):
            return *buffers, held
        room = (max(wanted, held + held // 2) // _STEP + 1) * _STEP  # never full: a prompt is followed by a token
        with torch.inference_mode(False):  # or a cache that was begun in that mode could go on in no other
            made = tuple(
                torch.empty((*new.shape[:-2], room, new.shape[-1]), dtype=new.dtype, device=new.device) for new in (keys_like, values_like)
            )
        for buffer, old in zip(made, (self.keys, self.values), strict=True):
            if held and old is not None:
                buffer.narrow(-2, 0, held).copy_(old)
        self._buffers = made[0], made[1]
        self.grow(held)
        return *self._buffers, held

    def grow(self, length: int) -> None:
        """From now on the first ``length`` tokens of the buffers are those present."""
        self._length, self._set = length, {}

    def get_seq_length(self) -> int:
        return self._length if not self._set else int(super().get_seq_length())

    def _is_front(self, buffers: tuple[Tensor, Tensor]) -> bool:
        return not self._set or all(
            held is not None
            and held.data_ptr() == buffer.data_ptr()
            and held.stride() == buffer.stride()
            and held.shape[:-2] == buffer.shape[:-2]
            for held, buffer in zip((self.keys, self.values), buffers, strict=True)
        )

    def reset(self) -> None:
        super().reset()
        self._buffers, self._length, self._set = None, 0, {}


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
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
