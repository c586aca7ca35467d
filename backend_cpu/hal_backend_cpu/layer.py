"""A decoder layer in two native calls: attention and MLP, each with its norm and its residual."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_backend_cpu import _native
from hal_backend_cpu.layout import joined
from hal_core.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

    from hal_backend_cpu.ops import CpuLinear
    from hal_core.decoder import DecoderParts

__all__ = ["CpuLayer"]

_ATTENTION, _MLP = _native.ops.attention.default, _native.ops.mlp.default
#: What the native attention takes: whole vectors of 16 channels, and work space for no more than these.
_LANES, _MOST_DIM = 16, 256
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
#: A matrix that stands behind the rows of the one before it.
_BEHIND = (None, None, None, None, None, None, 0, 0, "")


class CpuLayer:
    """The fused forward of a layer whose linears are this backend's.

    Linears over one input are joined into one matrix where they can be; their own packed tensors become views of it, so that they go on
    computing, and ``update`` of them reaches the layer.
    """

    def __init__(self, parts: DecoderParts) -> None:
        self.parts = parts
        self._gather()

    @staticmethod
    def serves(parts: DecoderParts) -> bool:
        """Whether the native ops compute such a layer."""
        return parts.head_dim % _LANES == 0 and parts.head_dim <= _MOST_DIM and parts.activation in _ACTIVATIONS

    @torch.inference_mode(False)  # or linears whose tensors are joined during a call in that mode could be updated in no other
    def _gather(self) -> None:
        """The arguments of both calls that do not change from call to call."""
        p = self.parts
        self.attention = (p.input_norm, p.q_norm, p.k_norm, *_arguments(p.q, p.k, p.v), *_arguments(p.o), p.heads, p.eps, p.scale)
        self.mlp = (p.post_norm, *_arguments(p.gate, p.up), *_arguments(p.down), p.gate.spec.n, p.eps, p.activation)
        owned = [(linear.weight._buffers, "codes") for linear in p.linears] + [(linear._buffers, "bias") for linear in p.linears]
        self.buffers = tuple((owner, name, owner[name]) for owner, name in owned if owner[name] is not None)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, held: int) -> Tensor:
        for owner, name, tensor in self.buffers:
            if owner[name] is not tensor:  # the model was moved, or its biases were given another dtype
                self._gather()
                break
        try:
            return _MLP(_ATTENTION(x, cos, sin, keys, values, held, *self.attention), *self.mlp)
        except (RuntimeError, NotImplementedError) as error:
            raise ShapeError("cpu decoder layer", str(error).splitlines()[0]) from error


def _arguments(*linears: CpuLinear) -> tuple[object, ...]:
    """As the native ops take linears over one input."""
    alike = len({(linear.isa, linear._buffers["bias"] is None) for linear in linears}) == 1
    whole = joined([linear.weight for linear in linears]) if alike and len(linears) > 1 else None
    if whole is None:
        return tuple(argument for linear in linears for argument in _one(linear, linear.weight.arguments(), linear._buffers["bias"]))
    bias = None
    if linears[0]._buffers["bias"] is not None:
        bias = torch.cat([linear._buffers["bias"] for linear in linears])
        for linear, part in zip(linears, bias.split([linear.weight.n for linear in linears]), strict=True):
            linear._buffers["bias"] = part
    return (*_one(linears[0], whole, bias), *_BEHIND * (len(linears) - 1))


def _one(linear: CpuLinear, packed: tuple[Tensor | None, ...], bias: Tensor | None) -> tuple[object, ...]:
    return (*packed, bias, linear.weight.group, linear.weight.scheme.bits, linear.isa)
