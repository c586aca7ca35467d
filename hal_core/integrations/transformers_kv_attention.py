"""The attention function ``hal`` of transformers' attention interface, and its mask function.

With a :class:`~hal_core.integrations.transformers_kv.KVCache` the keys that arrive are the new ones only, marked with the cache's layer,
which appends them and attends from its pages. Without one the function computes plain attention, so that a model that was set to ``hal``
serves every other call too.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from hal_core.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["NAME", "AttentionCall", "PackedLength", "Pending", "is_supported", "mark", "register", "register_function"]

NAME = "hal"
_MARK = "_hal_pending"
#: Arguments of some models' attention that change its result and that no cache of ours serves.
_UNSERVED = ("position_bias", "indices", "head_mask", "block_table")


class PackedLength(int):
    """A length of keys that a packed cache gives for its mask: the mask function then returns the padding alone, or None."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What a model asks of attention in one layer.

    query: ``[B, Hq, T, D]``. scale: of the logits. window: tokens seen, None for all. sinks: float32 ``[Hq]`` or None.
    padding: bool ``[B, cached + T]``, False for tokens that nobody may see; None where there are none.
    """

    query: Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None
    padding: Tensor | None


class Pending(Protocol):
    """A cache's layer that has received new keys and values and waits for the queries."""

    def attend(self, call: AttentionCall) -> Tensor:
        """``[B, T, Hq, Dv]`` in the query's dtype."""


def mark(key: Tensor, pending: Pending) -> Tensor:
    """The keys, from which the attention function finds the layer again."""
    marked = key.view_as(key)
    setattr(marked, _MARK, pending)
    return marked


def is_supported(model: Any) -> bool:
    """Whether the model's attention can be replaced: its modules ask transformers' attention interface."""
    if not hasattr(model, "set_attn_implementation"):
        return False
    try:
        return "ALL_ATTENTION_FUNCTIONS.get_interface(" in inspect.getsource(sys.modules[type(model).__module__])
    except (OSError, TypeError, KeyError):
        return False


def register_function(name: str, function: Callable[..., Any]) -> None:
    """Make an attention function known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)


def register() -> None:
    """Make ``hal`` known to transformers: attention and masks."""
    from transformers import AttentionMaskInterface

    register_function(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: ``[B, H, T, D]`` to ``[B, T, H, Dv]``."""
    pending: Pending | None = getattr(key, _MARK, None)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    soft_cap, sinks = others.get("softcap"), others.get("s_aux")
    _check_served(module, dropout, others)
    if pending is None:
        causal = others.get("is_causal")
        causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
        return _plain(query, key, value, attention_mask, scale, soft_cap, sinks, causal), None
    if attention_mask is not None and attention_mask.dim() != 2:
        found = f"a mask of shape {list(attention_mask.shape)}"
        raise ShapeError("attention from a packed cache", found, "give the padding alone, [batch, tokens]; attention is causal")
    if others.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ShapeError(f"attention of {type(module).__name__} from a packed cache", "is not causal", "use transformers' own cache")
    sinks = None if sinks is None else sinks.detach().float()
    call = AttentionCall(query, scale, others.get("sliding_window"), soft_cap, sinks, attention_mask)
    return pending.attend(call), None


def _check_served(module: nn.Module, dropout: float, others: dict[str, Any]) -> None:
    given = [name for name in _UNSERVED if others.get(name) is not None] + ["dropout"] * (dropout > 0)
    if given:
        raise ShapeError(f"attention {NAME} of {type(module).__name__}", f"asks for {', '.join(given)}", "set another attention function")


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, soft_cap: float | None, sinks: Tensor | None, causal: bool
) -> Tensor:
    """Attention over all keys; ``mask`` is boolean, or None for causal attention of as many queries as keys (or of one query)."""
    causal = causal and mask is None and query.shape[2] > 1
    if soft_cap is None and sinks is None:
        out = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = (query.float() @ key.float().transpose(2, 3)) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.float().reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)), dim=-1)
    # a row that sees nothing (padding) would be NaN
    weights = logits.softmax(dim=-1).nan_to_num(0.0)[..., : key.shape[2]]
    return (weights @ value.float()).to(query.dtype).transpose(1, 2).contiguous()


def _mask(**call: Any) -> Tensor | None:
    """Masks as transformers asks for them: padding alone for a packed cache, else the boolean mask of ``sdpa``."""
    from transformers.masking_utils import sdpa_mask

    if not isinstance(call["kv_length"], PackedLength):
        return sdpa_mask(**call)
    if call.get("use_vmap") or not call.get("allow_is_causal_skip", True):
        found = "a mask other than causal, e.g. bidirectional attention inside an image or packed sequences"
        raise ShapeError("attention from a packed cache", found, "use transformers' own cache")
    padding: Tensor | None = call["attention_mask"]
    if padding is None:
        return None
    if padding.dim() != 2 or padding.shape != (call["batch_size"], call["kv_length"]):
        found = f"an attention mask of shape {list(padding.shape)}"
        raise ShapeError("attention from a packed cache", found, f"give [{call['batch_size']}, {int(call['kv_length'])}]")
    padding = padding.bool()
    return None if bool(padding.all()) else padding
