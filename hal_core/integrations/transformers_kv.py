"""``KVCache``: a transformers cache whose keys and values lie in quantized pages, from which ``generate`` attends.

The model's attention is set to the function ``hal`` (:mod:`hal_core.integrations.transformers_kv_attention`). Each layer appends the new
keys and values and attends from its pages: no prefix is dequantized as a whole here, and tokens that the attention mask hides (padding)
take no room. A prompt attends to its own quantized keys too, so that what is measured through the cache is what is served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers.cache_utils import Cache

from hal_core.errors import SettingError, ShapeError, ValueDecodeError
from hal_core.integrations.transformers_growing import cache_argument
from hal_core.integrations.transformers_kv_attention import NAME, is_supported, register
from hal_core.integrations.transformers_kv_conditioning import is_useful
from hal_core.integrations.transformers_kv_layer import KVCacheLayer, LayerPlan
from hal_core.kv.op import KVParams
from hal_core.kv.scheme import KV_GROUP, KVScheme, parse_pair
from hal_core.policy import current_policy
from hal_core.spec import KVCacheSpec

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.policy import Policy

__all__ = ["KVCache"]

_SERVED = ("full_attention", "sliding_attention")


class KVCache(Cache):
    """A quantized key/value cache of a ``transformers`` model, for ``model.generate(.., cache=KVCache(model, "turboquant:4"))``.

    A cache holds one batch; ``reset`` empties it. Greedy and beam search, sampling, assisted decoding, padding, sliding windows, sinks and
    soft caps are served; masks other than causal, and layers that are no attention or share keys with others, are refused.

    Args:
        model: the model, whose attention is set to ``hal``; its other calls compute as before.
        scheme: how keys and values are stored: ``int8``, ``turboquant:4``, ``k4v3``, ``k=int8,v=turboquant:4``, or a pair.
        policy: which kernels may serve; default: the surrounding ``hal.policy``, ``HAL_POLICY``, or ``auto``.
        page_size: tokens of a page, a multiple of 32 where keys are scaled per channel.
        seed: of the rotations.
        scales: of fp8: None for those of the model's checkpoint and, in layers without, those computed from the first tokens; or the word
            ``computed`` or ``default`` (1.0, which ``require`` refuses) for all layers.
        params: static scales and channel splits by layer, instead of the checkpoint's.
        condition: whether the first call's tokens, if they are 32 or more, shift and scale the channels of keys and queries, which leaves
            attention as it is (:mod:`hal_core.integrations.transformers_kv_conditioning`); None where keys have one scale a vector.

    Raises:
        SettingError: the model's attention cannot be replaced, it has layers that this cache cannot hold, or params or condition are of
            another kind. ValueDecodeError: not such a scheme, page size or seed. PolicyError: the policy does not parse.
    """

    def __init__(
        self,
        model: Any,
        scheme: str | tuple[KVScheme, KVScheme] = "turboquant:4",
        *,
        policy: Policy | str | None = None,
        page_size: int = KV_GROUP,
        seed: int = 0,
        scales: str | None = None,
        params: Mapping[int, KVParams] | None = None,
        condition: bool | None = None,
    ) -> None:
        keys, values = _pair(scheme)
        if not is_supported(model):
            found = "its attention does not ask transformers' attention interface"
            raise SettingError(f"a quantized KV cache of {type(model).__name__}", found, "use transformers' own cache")
        windows = _windows(model.config.get_text_config(decoder=True), type(model).__name__)
        KVCacheSpec(1, 1, KV_GROUP, page_size, keys, values, seed=seed)  # or it raises; the heads come with the first tokens
        _check_params(params, len(windows))
        if condition is not None and not isinstance(condition, bool):
            raise SettingError(f"condition {condition!r:.40} of a KV cache", "not a truth value", "give True, False or None")
        if params is None:
            params = getattr(model, "hal_kv_params", {}) if scales is None and (keys.scaled or values.scaled) else {}
        chosen, missing = current_policy(policy), _word(scales)
        condition = is_useful(keys) if condition is None else condition
        self._held: list[KVCacheLayer] = []
        for index, window in enumerate(windows):
            given = params.get(index)
            source = missing if given is None else given.source
            self._held.append(KVCacheLayer(LayerPlan(index, window, keys, values, chosen, page_size, seed, source, given, condition)))
        super().__init__(layers=list(self._held))
        self.scheme = str(keys) if values == keys.for_values() else f"k={keys},v={values}"
        register()
        if model.config._attn_implementation != NAME:
            model.set_attn_implementation(NAME)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, marked for the attention function.

        Raises:
            ShapeError: the model attends with another function than ``hal``, or an earlier call failed between two layers, so that they
                hold different tokens.
        """
        self._held[layer_idx - 1].check_attended()
        ahead, own = self._held[0].get_seq_length(), self._held[layer_idx].get_seq_length()
        if layer_idx and own + key_states.shape[2] != ahead:
            found = f"layer 0 has {ahead} columns, layer {layer_idx} has {own} and gets {key_states.shape[2]}"
            raise ShapeError("KV cache", found, "an earlier call failed halfway: reset() the cache")
        return self._held[layer_idx].update(key_states, value_states)

    @property
    def nbytes(self) -> int:
        """Bytes held, pages that wait for tokens included."""
        return sum(layer.nbytes for layer in self._held)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that hold tokens."""
        return sum(layer.used_bytes for layer in self._held)

    @property
    def token_bytes(self) -> float:
        """Bytes that a token takes in all layers, scales and norms included; 0 before the first forward."""
        return sum(layer.spec.token_bytes for layer in self._held if layer.spec is not None)

    @staticmethod
    def argument(model: Any) -> str:
        """The name under which this version of transformers takes a cache, in ``forward`` and in ``generate``."""
        return cache_argument(model)

    def kernels(self) -> dict[str, int]:
        """Number of layers by the name of the kernel that serves them; empty before the first forward."""
        return dict(Counter(layer.selection.kernel for layer in self._held if layer.selection is not None))

    def emptied(self) -> KVCache:
        """This cache without its tokens."""
        self.reset()  # type: ignore[no-untyped-call]
        return self

    def report(self) -> dict[str, Any]:
        """What served, as JSON: schemes, kernels, specs, sources of static scales, layers with conditioned keys, tokens and bytes."""
        specs = Counter(str(layer.spec) for layer in self._held if layer.spec is not None)
        scaled = any(layer.spec is not None and (layer.spec.keys.scaled or layer.spec.values.scaled) for layer in self._held)
        return {
            "scheme": self.scheme, "kernels": self.kernels(), "specs": dict(specs), "tokens": self._held[0].tokens,
            "scales": dict(Counter(layer.scales for layer in self._held)) if scaled else {},
            "conditioned": sum(layer.conditioning is not None for layer in self._held),
            "bytes_per_token": self.token_bytes, "used_bytes": self.used_bytes, "bytes": self.nbytes,
        }  # fmt: skip


def _pair(scheme: object) -> tuple[KVScheme, KVScheme]:
    if isinstance(scheme, str):
        return parse_pair(scheme)
    if isinstance(scheme, tuple) and len(scheme) == 2 and all(isinstance(side, KVScheme) for side in scheme):
        return scheme
    raise ValueDecodeError(f"scheme {scheme!r:.80} of a KV cache", "neither a text nor two KVSchemes", 'give a text such as "turboquant:4"')


def _check_params(params: object, layers: int) -> None:
    what, fix = "params of a KV cache", "give a mapping of a layer's index to KVParams, or None"
    if params is not None and not isinstance(params, Mapping):
        raise SettingError(what, type(params).__name__, fix)
    for index, own in (params or {}).items():
        if type(index) is not int or not 0 <= index < layers or not isinstance(own, KVParams):
            raise SettingError(what, f"{index!r:.40} to {type(own).__name__}, of {layers} layers", fix)


def _word(scales: str | None) -> str:
    """Source of the scales of layers that are given none."""
    if scales not in (None, "computed", "default"):
        raise SettingError(f"scales {scales!r} of a KV cache", "unknown", "give None, computed or default, or the scales as params")
    return scales or "computed"


def _windows(config: Any, model: str) -> list[int | None]:
    """The window of each layer, None for all tokens.

    Raises:
        SettingError: layers of another kind than causal attention over keys of their own.
    """
    what, fix = f"a quantized KV cache of {model}", "use transformers' own cache"
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise SettingError(what, "its layers share keys and values", fix)
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        raise SettingError(what, "its attention is not causal", fix)
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kind = "chunked_attention" if getattr(config, "attention_chunk_size", None) else "full_attention"
        kinds = [kind if window is None else "sliding_attention"] * count
    other = next((kind for kind in kinds if kind not in _SERVED), None)
    if other is not None or len(kinds) != count:
        raise SettingError(what, f"it has layers of {other}" if other else f"{len(kinds)} kinds for {count} layers", fix)
    if window is not None and (type(window) is not int or window < 1):
        raise SettingError(what, f"sliding_window {window!r}", "check config.json")
    return [window if kind == "sliding_attention" else None for kind in kinds]
