"""Are weights what a spec was selected for, and may they take the place of others? Asked by every backend, before anything is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.errors import ShapeError
from hal_core.kernel import LinearWeights, MoEWeights

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.schemes import WeightScheme
    from hal_core.spec import EmbeddingSpec, LinearSpec, MoESpec

__all__ = [
    "Kinds",
    "check_embedding_weights",
    "check_linear_weights",
    "check_moe_weights",
    "check_same_kind",
    "kinds_of",
    "refuse_gradients",
]

#: Role, tensor, dtype and shape of everything that an op was prepared from.
Kinds = tuple[tuple[str, str, str, tuple[int, ...]], ...]
_BIASES = (torch.float32, torch.bfloat16, torch.float16)


def _check_weight(asked: str, weight: QuantizedTensor, shape: tuple[int, ...], scheme: WeightScheme | None) -> None:
    if weight.shape != shape or weight.scheme != scheme:
        raise ShapeError(asked, f"weight {weight.scheme} {list(weight.shape)}", f"the spec says {scheme} {list(shape)}")


def _check_bias(asked: str, bias: Tensor | None, wanted: bool, shape: tuple[int, ...]) -> None:
    if (bias is not None) == wanted and (bias is None or (tuple(bias.shape) == shape and bias.dtype in _BIASES)):
        return
    found = "none" if bias is None else f"{bias.dtype} {list(bias.shape)}"
    raise ShapeError(f"{asked} bias", found, f"the spec says {f'a float bias {list(shape)}' if wanted else 'no bias'}")


def _check_kind(asked: str, weights: object, kind: type) -> None:
    if not isinstance(weights, kind):
        raise ShapeError(asked, f"weights of type {type(weights).__name__}", f"give a {kind.__name__}")


def check_linear_weights(spec: LinearSpec, weights: LinearWeights) -> None:
    """Raise ShapeError unless weight and bias are those of ``spec``."""
    _check_kind("linear", weights, LinearWeights)
    _check_weight("linear", weights.weight, (spec.n, spec.k), spec.weights)
    _check_bias("linear", weights.bias, spec.bias, (spec.n,))


def check_embedding_weights(spec: EmbeddingSpec, weights: LinearWeights) -> None:
    """Raise ShapeError unless the table is that of ``spec``."""
    _check_kind("embedding", weights, LinearWeights)
    _check_weight("embedding", weights.weight, (spec.rows, spec.dim), spec.weights)
    _check_bias("embedding", weights.bias, False, ())


def check_moe_weights(spec: MoESpec, weights: MoEWeights) -> None:
    """Raise ShapeError unless the matrices and biases are those of ``spec``."""
    _check_kind("experts", weights, MoEWeights)
    wide, tall = (spec.local, spec.intermediate, spec.hidden), (spec.local, spec.hidden, spec.intermediate)
    if (weights.gate is None) != (spec.gate is None):
        raise ShapeError("experts", f"gate {'missing' if weights.gate is None else 'given'}", "the spec says otherwise")
    if weights.gate is not None:
        _check_weight("experts gate", weights.gate, wide, spec.gate)
    _check_weight("experts up", weights.up, wide, spec.up)
    _check_weight("experts down", weights.down, tall, spec.down)
    _check_bias("experts gate", weights.gate_bias, spec.bias and spec.gate is not None, wide[:2])
    _check_bias("experts up", weights.up_bias, spec.bias, wide[:2])
    _check_bias("experts down", weights.down_bias, spec.bias, tall[:2])


def kinds_of(weights: LinearWeights | MoEWeights) -> Kinds:
    """What ``weights`` consist of, without their values."""
    if isinstance(weights, LinearWeights):
        matrices, biases = {"weight": weights.weight}, {"": weights.bias}
    else:
        matrices = {name: m for name, m in (("gate", weights.gate), ("up", weights.up), ("down", weights.down)) if m is not None}
        biases = {"gate": weights.gate_bias, "up": weights.up_bias, "down": weights.down_bias}
    tensors = [(role, name, t) for role, matrix in matrices.items() for name, t in matrix.tensors().items()]
    tensors += [(role, "bias", bias) for role, bias in biases.items() if bias is not None]
    return tuple((role, name, str(t.dtype), tuple(t.shape)) for role, name, t in tensors)


def check_same_kind(prepared: Kinds, weights: LinearWeights | MoEWeights) -> None:
    """Raise ShapeError unless ``weights`` consist of the same tensors, dtypes and shapes as those that an op was prepared from.

    Copying into the prepared storage would round scales of another dtype and keep what the new weights lack.
    """
    found = kinds_of(weights)
    differ = sorted(set(found) ^ set(prepared))
    if differ:
        role, name, *_ = differ[0]
        old, new = ([f"{d} {list(s)}" for r, n, d, s in kinds if (r, n) == (role, name)] or ["none"] for kinds in (prepared, found))
        raise ShapeError(
            f"update of a prepared weight: {role} {name}".rstrip(),
            f"{new[0]}, prepared from {old[0]}",
            "prepare a new op for weights of another kind",
        )


def refuse_gradients(asked: str, x: Tensor) -> None:
    """Raise ShapeError where autograd would record a kernel that has no backward: its gradients would be silently missing."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ShapeError(
            f"{asked} input",
            "requires a gradient, and this kernel has no backward",
            "use torch.inference_mode(), or policy require:reference",
        )
