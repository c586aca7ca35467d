"""Decoder layers of a loaded model in one call each, where a backend has such a call and the layer is one whose forward is known.

A known layer is told by the exact classes of its modules, and one of each kind is computed both ways before any is replaced. Calls that
the fused layer does not serve (gradients, ``torch.compile``, a mask, another cache, hooks, a replaced module) go to its own forward.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from hal_core.decoder import DecoderParts
from hal_core.integrations.transformers_growing import GrowingLayer, cache_argument, growing_cache
from hal_core.ops import QuantLinear

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.decoder import FusedLayer
    from hal_core.memory import Trimmer

__all__ = ["FusedForward", "fuse_layers"]

#: Modules of transformers whose layers have one form, and how the names of their classes begin.
_FAMILIES = {f"transformers.models.{name}.modeling_{name}": name.capitalize() for name in ("llama", "mistral", "qwen2", "qwen3")}
_LINEARS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
_NORMS = {
    "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
}  # fmt: skip
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
#: What a layer is called with; anything else that is given changes what it computes in ways not known here.
_NAMES = frozenset({"attention_mask", "position_ids", "use_cache", "position_embeddings", "cache_position", "cache", "past_key_values"})
#: What asks for nothing where it is False. Of other arguments False may ask for much, as ``is_causal`` does.
_OUTPUTS = frozenset({"output_attentions", "output_hidden_states", "return_dict"})
#: Attributes that modules compute with, and that anyone may set.
_ATTRIBUTES = frozenset({"is_causal", "scaling", "variance_epsilon"})
#: Hooks of all modules of the process.
_EVERYWHERE = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
#: Attention functions that compute plain attention where there is no mask.
_PLAIN_ATTENTION = ("sdpa", "eager")
#: Largest relative L2 error of a fused layer's change to its input against that of its own forward, by dtype. A rounding that falls the
#: other way before an int8 code is one step of 127.
_BOUNDS = {torch.float32: 5e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class FusedForward:
    """Takes the place of a decoder layer's ``forward``."""

    def __init__(self, layer: Any, parts: DecoderParts, fused: FusedLayer, cache_name: str) -> None:
        self.layer, self.parts, self.fused, self.cache_name = layer, parts, fused, cache_name
        self.index, self.config = layer.self_attn.layer_idx, layer.self_attn.config
        self.none: Tensor | None = None
        inner = [module for module in layer.modules() if module is not layer]
        self.hooks = [hooks for module in inner for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        parents = (layer, layer.self_attn, layer.mlp)
        self.children = [(parent._modules, name, child) for parent in parents for name, child in parent.named_children()]
        # Not the dictionaries that hold them: a copied module gets another.
        named = [(child, name) for _, _, child in self.children for name in ("forward", *(_ATTRIBUTES & vars(child).keys()))]
        self.attributes = [(child, name, vars(child).get(name)) for child, name in named]
        self.children += [(norm._parameters, "weight", norm.weight) for norm in _norms(layer).values()]
        self.norms = tuple(norm.weight for norm in _norms(layer).values())

    def __call__(self, hidden_states: Tensor, *rest: Any, **named: Any) -> Any:
        layer = None if rest else self._served(hidden_states, named)
        if layer is None:
            return type(self.layer).forward(self.layer, hidden_states, *rest, **named)
        count = hidden_states.shape[1]
        like = self._like(hidden_states)
        keys, values, held = layer.room(like, like, count)
        cos, sin = named["position_embeddings"]
        out = self.fused(hidden_states, cos, sin, keys, values, held)
        layer.grow(held + count)
        return out

    def _like(self, x: Tensor) -> Tensor:
        """Keys of no tokens."""
        none = self.none  # another thread may set it meanwhile
        if none is None or none.shape[0] != x.shape[0] or none.dtype is not x.dtype:
            none = self.none = torch.empty((x.shape[0], self.parts.kv_heads, 0, self.parts.head_dim), dtype=x.dtype)
        return none

    def _served(self, x: Tensor, named: dict[str, Any]) -> Any:
        """The cache's layer if the fused layer computes this call, else None."""
        if torch.compiler.is_compiling() or not self._is_plain(x, named) or not self._is_whole():
            return None
        layers = getattr(named.get(self.cache_name), "layers", ())
        layer = layers[self.index] if len(layers) > self.index else None
        # transformers leaves the mask out for one token, and for several where nothing came before
        return layer if type(layer) is GrowingLayer and (x.shape[1] == 1 or not layer.get_seq_length()) else None

    def _is_plain(self, x: Tensor, named: dict[str, Any]) -> bool:
        """Whether the arguments ask for attention to all that came before, without gradients, in the layer's dtype."""
        if named.get("attention_mask") is not None or x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
            return False
        for name, value in named.items():
            if name not in _NAMES and value is not None and not (value is False and name in _OUTPUTS):
                return False
        angles = named.get("position_embeddings")
        if angles is None:
            return False
        for tensor in (*angles, *self.norms):
            if tensor.dtype is not x.dtype or not tensor.is_contiguous():
                return False
        return bool(x.is_contiguous())

    def _is_whole(self) -> bool:
        """Whether the layer still has the modules that it had, computes as they do, and nobody listens to them."""
        for there, name, child in self.children:  # `all` takes twice as long, which thirty layers a token feel
            if there.get(name) is not child:
                return False
        for module, name, value in self.attributes:
            if module.__dict__.get(name) != value:
                return False
        # The property answers the same, and takes longer than the rest of these checks.
        attention = vars(self.config).get("_attn_implementation_internal") or self.config._attn_implementation
        return not self.layer.training and not any(self.hooks) and not any(_EVERYWHERE) and attention in _PLAIN_ATTENTION


def fuse_layers(model: Any, trimmer: Trimmer) -> tuple[str, ...]:
    """Give every decoder layer of a ``transformers`` model a fused forward where one serves it.

    Args:
        model: its linears are prepared.
        trimmer: gives back what laying a layer's weights anew has left.

    Returns:
        One line that counts the fused layers, and one for each reason why others keep their own forward; none without decoder layers.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return ()
    cache, sound = growing_cache(model), dict[tuple[str, ...], str]()
    reasons = Counter[str]()
    for layer in layers:
        reasons[_fuse(model, layer, cache, sound)] += 1
        trimmer.passed(sum(buffer.nbytes for buffer in layer.buffers()))
    fused = reasons.pop("", 0)
    lines = [f"{fused} of {len(layers)} decoder layers run in one call each"] if fused else []
    return (*lines, *(f"{count} of {len(layers)} decoder layers keep their own forward: {why}" for why, count in reasons.items()))


def _fuse(model: Any, layer: Any, cache: Any, sound: dict[tuple[str, ...], str]) -> str:
    """Fuse a layer; the reason why not, or nothing. ``cache``: an empty one; ``sound``: what the check of each kind of layer found."""
    if not _is_known(layer):
        return f"{type(layer).__name__} is not one whose steps are known"
    if cache is None or type(cache.layers[layer.self_attn.layer_idx]) is not GrowingLayer:
        return "generate gives them a cache of another kind"
    linears = {name.removesuffix("_proj"): layer.get_submodule(f"{block}.{name}") for block, names in _LINEARS.items() for name in names}
    kinds = {type(linear) for linear in linears.values()}
    kind = next(iter(kinds))
    if len(kinds) > 1 or not issubclass(kind, QuantLinear):
        return "their linears are not all of one backend"
    parts = _parts(layer, linears)
    fused = None if parts is None else kind.fuse(parts)
    if parts is None or fused is None:
        return f"{kind.__name__} has no call for layers of their form"
    forward = FusedForward(layer, parts, fused, cache_argument(model))
    key = tuple(str(linear.selection) for linear in parts.linears)
    if key not in sound:
        sound[key] = _fault(forward, cache)
    if not sound[key]:
        layer.forward = forward
    return sound[key]


def _is_known(layer: Any) -> bool:
    """Whether the layer, its attention, MLP and norms are exactly the classes of one family."""
    family = _FAMILIES.get(type(layer).__module__)
    if family is None:
        return False
    classes = vars(sys.modules[type(layer).__module__])
    wanted = {"DecoderLayer": layer, "Attention": layer.self_attn, "MLP": layer.mlp}
    norms = all(type(norm) is classes[f"{family}RMSNorm"] for norm in _norms(layer).values())
    return norms and all(type(module) is classes[family + name] for name, module in wanted.items())


def _norms(layer: Any) -> dict[str, Any]:
    """The norms that the layer has, by their names as parts."""
    modules = dict(layer.named_modules())
    return {part: modules[name] for part, name in _NORMS.items() if name in modules}


def _parts(layer: Any, linears: dict[str, Any]) -> DecoderParts | None:
    attention, norms = layer.self_attn, _norms(layer)
    activation = _ACTIVATIONS.get(attention.config.hidden_act)
    if activation is None or len({norm.variance_epsilon for norm in norms.values()}) > 1:
        return None
    weights = {"q_norm": None, "k_norm": None, **{part: norm.weight for part, norm in norms.items()}}
    return DecoderParts(
        **linears, **weights, head_dim=attention.head_dim, eps=norms["input_norm"].variance_epsilon, scale=attention.scaling,
        heads=linears["q"].spec.n // attention.head_dim, kv_heads=linears["k"].spec.n // attention.head_dim, activation=activation,
    )  # fmt: skip


@torch.inference_mode()
def _fault(forward: FusedForward, cache: Any) -> str:
    """What is wrong with the fused layer, found by computing three tokens and then one more both ways; or nothing."""
    calls = ((forward.layer, copy.deepcopy(cache)), (forward, copy.deepcopy(cache)))
    generator, parts = torch.Generator().manual_seed(0), forward.parts
    dtype = parts.input_norm.dtype
    angles = torch.rand((1, 4, parts.head_dim // 2), generator=generator).mul(6.28).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    x = torch.randn((1, 4, parts.input_norm.numel()), generator=generator).to(dtype)
    for span in (slice(0, 3), slice(3, 4)):
        named = {"position_embeddings": (cos[:, span], sin[:, span]), "attention_mask": None, "use_cache": True}
        own, fused = (call(x[:, span], **named, **{forward.cache_name: cache}).float() - x[:, span].float() for call, cache in calls)
        error = float((fused - own).norm() / own.norm())
        if not error <= _BOUNDS[dtype]:
            return f"the fused form is off by {error:.2g} on random input"
    return ""
