"""What is right, in float64, straight from the stored tensors.

Shares no arithmetic with ``hal_core.reference`` or ``QuantizedTensor.dequantize``, so that those are judged like any other kernel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hal_core.schemes import ZeroKind

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.spec import Activation, MoESpec
    from hal_core.testing.rounding import Rounding

__all__ = ["experts", "linear", "weight_matrix"]

#: gpt-oss: the slope of the sigmoid where the checkpoint gives none.
_OAI_SLOPE = 1.702
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: What 4-bit codes stand for where they are no integers: OCP's E2M1, and the table of GGUF's IQ4_NL.
_TABLES = {
    "mxfp4": (*_E2M1, *(-value for value in _E2M1)),
    "nvfp4": (*_E2M1, *(-value for value in _E2M1)),
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}


def weight_matrix(weight: QuantizedTensor) -> Tensor:
    """float64 ``[.., N, K]`` by the definition ``(q - zero) * scale`` or ``q * scale + min``."""
    n, k = weight.shape[-2:]
    codes = _codes(weight, k)
    if not weight.scheme.quantized:
        return codes
    rows, columns = _cells(weight, n, k)
    if weight.zeros is not None:
        codes = codes - _at(weight.zeros, rows, columns)
    codes = codes * _at(_scales(weight), rows, columns)
    if weight.mins is None:
        return codes
    mins = weight.mins.to(torch.float64)
    return codes + _at(mins if weight.sub_mins is None else _levels(weight, mins, weight.sub_mins), rows, columns)


def _codes(weight: QuantizedTensor, k: int) -> Tensor:
    table = _TABLES.get(weight.scheme.dtype)
    if table is None and not (weight.scheme.dtype.startswith("int") and weight.scheme.bits == 4):
        return weight.values.to(torch.float64)
    column = torch.arange(k, device=weight.values.device)
    byte = weight.values.to(torch.int64)[..., column // 2]
    nibble = torch.where(column % 2 == 0, byte % 16, byte // 16)
    if table is not None:
        return torch.tensor(table, dtype=torch.float64, device=nibble.device)[nibble]
    if weight.scheme.zero is ZeroKind.NONE:
        nibble = torch.where(nibble >= 8, nibble - 16, nibble)
    return nibble.to(torch.float64)


def _scales(weight: QuantizedTensor) -> Tensor:
    """One float64 scale for each cell of the finest grid."""
    assert weight.scales is not None  # the canonical tensor holds it
    scales = weight.scales.to(torch.float64)
    if weight.scales.dtype is torch.uint8:  # E8M0: nothing but an exponent
        scales = torch.pow(2.0, scales - 127)
    if weight.global_scale is not None:
        scales = scales * weight.global_scale.to(torch.float64).unsqueeze(-1).unsqueeze(-1)
    return scales if weight.sub_scales is None else _levels(weight, scales, weight.sub_scales)


def _levels(weight: QuantizedTensor, coarse: Tensor, fine: Tensor) -> Tensor:
    """Each group's integer factor times the float of the superblock it lies in."""
    g = weight.scheme.granularity
    assert g.superblock is not None
    assert g.group is not None
    group = torch.arange(fine.shape[-1], device=fine.device)
    return coarse[..., group * g.group // g.superblock] * fine.to(torch.float64)


def _cells(weight: QuantizedTensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """For each row of N its row of the scale grid, and for each column of K its column (``[K]``, or ``[.., K]`` if ordered)."""
    device, g = weight.values.device, weight.scheme.granularity
    row, column = torch.arange(n, device=device), torch.arange(k, device=device)
    if g.group is not None:
        return row, column // g.group if weight.g_idx is None else weight.g_idx.to(torch.int64)
    if g.block is not None:
        return row // g.block[0], column // g.block[1]
    return (row if g.kind.value == "channel" else torch.zeros_like(row)), torch.zeros_like(column)


def _at(grid: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    wide = grid.to(torch.float64)[..., rows, :]
    if columns.dim() == 1:
        return wide[..., columns]
    return torch.gather(wide, -1, columns.unsqueeze(-2).expand(*wide.shape[:-1], columns.shape[-1]))


def linear(weights: LinearWeights, x: Tensor, rounding: Rounding | None = None) -> Tensor:
    """float64 ``[M, N]`` of ``x [M, K]``, which ``rounding`` quantizes."""
    wide = x.to(torch.float64)
    wide = wide if rounding is None else rounding(wide, weights.weight)
    y = wide @ weight_matrix(weights.weight).transpose(-1, -2)
    return y if weights.bias is None else y + weights.bias.to(torch.float64)


def experts(
    spec: MoESpec, weights: MoEWeights, x: Tensor, ids: Tensor, scores: Tensor, expert_map: Tensor | None, rounding: Rounding | None = None
) -> Tensor:
    """float64 ``[T, k, H]``: each slot's weighted expert output, before the sum and the routed scaling."""
    matrices = {name: None if w is None else weight_matrix(w) for name, w in _named(weights)}
    out = torch.zeros(*ids.shape, spec.hidden, dtype=torch.float64, device=x.device)
    wide, score = x.to(torch.float64), scores.to(torch.float64)
    local = ids.to(torch.int64)
    if expert_map is not None:
        local = torch.where(local < 0, local, expert_map.to(torch.int64)[local.clamp(min=0)])
    for index in range(spec.local):
        token, slot = (local == index).nonzero(as_tuple=True)
        rows, factor = wide[token], score[token, slot].unsqueeze(-1)
        if spec.router_weight_on_input:
            out[token, slot] = _expert(spec, weights, matrices, index, rows * factor, rounding)
        else:
            out[token, slot] = _expert(spec, weights, matrices, index, rows, rounding) * factor
    return out


def _named(weights: MoEWeights) -> tuple[tuple[str, QuantizedTensor | None], ...]:
    return (("gate", weights.gate), ("up", weights.up), ("down", weights.down))


def _expert(
    spec: MoESpec, weights: MoEWeights, matrices: dict[str, Tensor | None], index: int, rows: Tensor, rounding: Rounding | None
) -> Tensor:
    def product(name: str, value: Tensor) -> Tensor:
        value = value if rounding is None else rounding(value, getattr(weights, name), index)
        matrix, bias = matrices[name], getattr(weights, f"{name}_bias")
        assert matrix is not None  # asked for only where the spec has it
        y = value @ matrix[index].T
        return y if bias is None else y + bias[index].to(torch.float64)

    gate = None if spec.gate is None else product("gate", rows)
    return product("down", _activation(spec.activation, product("up", rows), gate))


def _activation(activation: Activation, up: Tensor, gate: Tensor | None) -> Tensor:
    limit = activation.limit
    if limit is not None:
        up = torch.clamp(up, -limit, limit)
        gate = None if gate is None else torch.clamp(gate, max=limit)
    if activation.kind == "swiglu_oai":
        assert gate is not None  # the spec refuses it ungated
        slope = _OAI_SLOPE if activation.alpha is None else activation.alpha
        return (up + 1) * gate / (1 + torch.exp(-slope * gate))
    return _curve(activation.kind, up) if gate is None else _curve(activation.kind, gate) * up


def _curve(kind: str, x: Tensor) -> Tensor:
    if kind == "silu":
        return x / (1 + torch.exp(-x))
    if kind == "relu2":
        return torch.clamp(x, min=0) ** 2
    if kind == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
