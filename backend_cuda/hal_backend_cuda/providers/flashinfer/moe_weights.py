"""Weights of a block of experts as each of FlashInfer's entries reads them, by the names of its parameters.

The intermediate size is widened to a multiple of 128, gate and up each by itself, with weights of 0 and scales of 1, so that the
padding adds nothing. Every preparation is a function of the weights alone: ``update`` makes the same again and copies it over, the
padding with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hal_backend_cuda.providers.flashinfer.moe_layouts import blocked, first_rows, interleaved, padded_halves, padded_to, shuffle_order, up
from hal_core.canonical import QuantizedTensor
from hal_core.errors import UnfitWeightsError
from hal_core.recast import recast

if TYPE_CHECKING:
    from torch import Tensor

    from hal_backend_cuda.providers.flashinfer.moe_entries import Entry
    from hal_core.kernel import MoEWeights
    from hal_core.spec import MoESpec

__all__ = ["STEP", "Padded", "prepared_weights"]

#: What the intermediate size is widened to a multiple of.
STEP = 128
_ONE_E8M0 = 127


@dataclass(frozen=True, eq=False)
class Padded:
    """Both products' matrices, widened and as they are stored: ``first [E, 2 I', ..]`` up before gate, ``second [E, H, ..]``."""

    first: Tensor
    second: Tensor
    first_scale: Tensor | None = None
    second_scale: Tensor | None = None


def prepared_weights(entry: Entry, spec: MoESpec, weights: MoEWeights) -> dict[str, Tensor]:
    """Tensors by the names that the entry's arguments give them.

    Raises:
        UnfitWeightsError: numbers that the entry's form cannot hold.
    """
    if entry.form in {"cutlass_bf16", "cutlass_fp8_block"}:
        return _plain(_padded(spec, weights))
    if entry.form == "cutlass_mxfp4":
        return _cutlass_mxfp4(spec, weights)
    if entry.form == "trtllm_bf16":
        return _block_major(entry, spec, weights)
    if entry.form == "trtllm_fp8_block":
        found = _plain(_padded(spec, weights))
        return {"first_scale": found.pop("first_scale"), "second_scale": found.pop("second_scale"), **found}
    if entry.form == "trtllm_fp8_tensor":
        return _tensor_scaled(entry, spec, weights)
    return _shuffled_blocks(entry, spec, weights)


def _halves(weights: MoEWeights) -> list[QuantizedTensor]:
    return [weights.up] if weights.gate is None else [weights.up, weights.gate]


def _padded(spec: MoESpec, weights: MoEWeights) -> Padded:
    """Every element widened with 0; scales, where there are any, with 1."""
    size, bits = up(spec.intermediate, STEP), spec.up.bits
    columns = spec.hidden * bits // 8 if bits == 4 else spec.hidden
    tall = size * bits // 8 if bits == 4 else size
    halves = _halves(weights)
    first = padded_halves([half.values for half in halves], size, columns, 0)
    second = padded_to(weights.down.values, spec.hidden, tall, 0)
    if not spec.up.quantized or spec.up.granularity.kind.value == "tensor":
        return Padded(first, second)
    g = spec.up.granularity
    n, k = (1, g.group or 1) if g.block is None else g.block
    one = _ONE_E8M0 if spec.up.dtype == "mxfp4" else 1.0
    one_scale = [_scales(half) for half in halves]
    first_scale = padded_halves(one_scale, up(size, n) // n, -(-spec.hidden // k), one)
    second_scale = padded_to(_scales(weights.down), -(-spec.hidden // n), up(size, k) // k, one)
    return Padded(first, second, first_scale, second_scale)


def _scales(weight: QuantizedTensor) -> Tensor:
    assert weight.scales is not None  # quantized schemes have scales
    if weight.scheme.granularity.block is not None:
        return weight.scales.float()
    if weight.scheme.dtype == "int4":
        cast = weight.scales.to(torch.bfloat16)
        if bool(((cast.float() - weight.scales.float()).abs() > weight.scales.float().abs() * 2.0**-8).any()):
            raise UnfitWeightsError("experts for flashinfer", "scales outside the range of bf16", "use another kernel")
        return cast
    return weight.scales


def _plain(found: Padded) -> dict[str, Tensor]:
    tensors = {"first": found.first, "second": found.second, "first_scale": found.first_scale, "second_scale": found.second_scale}
    return {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}


def _ones(spec: MoESpec, like: Tensor) -> Tensor:
    return torch.ones(spec.local, dtype=torch.float32, device=like.device)


def _cutlass_mxfp4(spec: MoESpec, weights: MoEWeights) -> dict[str, Tensor]:
    """Weights as words of 64 bits, scales in tiles of 128 rows and 4 columns as words of 32 bits, global scales of 1."""
    found = _padded(spec, weights)
    assert found.first_scale is not None  # mxfp4 has scales
    assert found.second_scale is not None
    return {
        "first": recast(found.first.contiguous(), torch.int64), "second": recast(found.second.contiguous(), torch.int64),
        "first_scale": recast(interleaved(found.first_scale), torch.int32),
        "second_scale": recast(interleaved(found.second_scale), torch.int32),
        "ones": _ones(spec, found.first),
    }  # fmt: skip


def _rows(matrix: Tensor, order: Tensor) -> Tensor:
    return matrix[:, order.to(matrix.device)]


def _orders(entry: Entry, found: Padded, gated: bool) -> tuple[Tensor, Tensor]:
    assert entry.tile is not None  # entries of this form have one
    return first_rows(found.first.shape[1], entry.tile, gated=gated), shuffle_order(found.second.shape[1], entry.tile)


def _block_major(entry: Entry, spec: MoESpec, weights: MoEWeights) -> dict[str, Tensor]:
    """bf16 ``[E, K / 64, M, 64]``: rows shuffled, columns in blocks of 128 bytes."""
    found = _padded(spec, weights)
    one, two = _orders(entry, found, spec.gate is not None)
    columns = 128 // found.first.itemsize
    return {"first": blocked(_rows(found.first, one), columns), "second": blocked(_rows(found.second, two), columns)}


def _tensor_scaled(entry: Entry, spec: MoESpec, weights: MoEWeights) -> dict[str, Tensor]:
    """fp8 with one scale a matrix, and static input scales: three factors an expert take the place of all five scales."""
    found = _padded(spec, weights)
    one, two = _orders(entry, found, spec.gate is not None)
    gate = weights.gate if weights.gate is not None else weights.up
    into = _input_scale(weights.up, gate)
    between = _own_scale(weights.down)
    factor = {name: _matrix_scale(weight) for name, weight in (("up", weights.up), ("gate", gate), ("down", weights.down))}
    return {
        "first": _rows(found.first, one).contiguous(), "second": _rows(found.second, two).contiguous(), "input_scale": into.reshape(1),
        # the gate's factor makes real numbers for its function; the up factor also scales what the second product reads
        "scale_gate": factor["gate"] * into, "scale_up": factor["up"] * into / between, "scale_down": factor["down"] * between,
    }  # fmt: skip


def _matrix_scale(weight: QuantizedTensor) -> Tensor:
    assert weight.scales is not None  # quantized schemes have scales
    return weight.scales.float().reshape(-1)


def _own_scale(weight: QuantizedTensor) -> Tensor:
    if weight.input_scale is None:
        found = "no static input scale"
        raise UnfitWeightsError("experts for flashinfer", found, "use a kernel that quantizes activations in the call")
    return weight.input_scale.float().reshape(-1)


def _input_scale(*weights: QuantizedTensor) -> Tensor:
    """The one scale of all experts' inputs: a token is quantized once."""
    scales = torch.cat([_own_scale(weight) for weight in weights])
    if not bool((scales == scales[0]).all()):
        found = f"input scales from {float(scales.min()):g} to {float(scales.max()):g} over experts"
        raise UnfitWeightsError("experts for flashinfer", found, "use a kernel that quantizes each expert's input by itself")
    return scales[0]


def _shuffled_blocks(entry: Entry, spec: MoESpec, weights: MoEWeights) -> dict[str, Tensor]:
    """4-bit weights with rows shuffled, scales in the same order and then in tiles; nvfp4's scales of matrices as three factors."""
    found = _padded(spec, weights)
    assert found.first_scale is not None  # schemes of these entries have group scales
    assert found.second_scale is not None
    one, two = _orders(entry, found, spec.gate is not None)
    scales = [interleaved(_rows(scale, order)) for scale, order in ((found.first_scale, one), (found.second_scale, two))]
    matrices = [_rows(matrix, order).contiguous() for matrix, order in ((found.first, one), (found.second, two))]
    if entry.form == "trtllm_mxint4":
        matrices = [blocked(matrix, 128) for matrix in matrices]
    else:
        scales = [recast(scale, torch.float8_e4m3fn) for scale in scales]
    out = {"first": matrices[0], "second": matrices[1], "first_scale": scales[0], "second_scale": scales[1]}
    if spec.bias:
        out["first_bias"] = _rows(_padded_bias(spec, weights), one).contiguous()
        out["second_bias"] = _rows(weights.down_bias.float(), two).contiguous()
    return {**out, **_factors(entry, spec, weights, found.first)}


def _padded_bias(spec: MoESpec, weights: MoEWeights) -> Tensor:
    size = up(spec.intermediate, STEP)
    biases = [weights.up_bias] if spec.gate is None else [weights.up_bias, weights.gate_bias]
    return torch.cat([torch.nn.functional.pad(bias.float(), (0, size - spec.intermediate)) for bias in biases], dim=-1)


def _factors(entry: Entry, spec: MoESpec, weights: MoEWeights, like: Tensor) -> dict[str, Tensor]:
    """Factors of the two products' outputs, and the activation's numbers for each expert."""
    a = spec.activation
    out: dict[str, Tensor] = {}
    if entry.form == "trtllm_nvfp4":
        gate = weights.gate if weights.gate is not None else weights.up
        into, between = _input_scale(weights.up, gate), _own_scale(weights.down)
        whole = {n: _global_scale(w) for n, w in (("up", weights.up), ("gate", gate), ("down", weights.down))}
        out = {
            "input_scale": into.reshape(1), "scale_gate": whole["gate"] * into, "scale_up": whole["up"] * into / between,
            "scale_down": whole["down"] * between,
        }  # fmt: skip
    ones = _ones(spec, like)
    if a.kind == "swiglu_oai":
        out["alpha"], out["beta"] = ones * (1.702 if a.alpha is None else a.alpha), ones.clone()
    if a.limit is not None:
        out["limit"] = ones * a.limit
    return out


def _global_scale(weight: QuantizedTensor) -> Tensor:
    if weight.global_scale is None:
        return torch.ones(weight.shape[0], dtype=torch.float32, device=weight.device)
    return weight.global_scale.float().reshape(-1)
