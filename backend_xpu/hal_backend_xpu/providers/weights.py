"""Canonical weights as the tensors that the libraries' functions take. Codes stay as stored; scales may be rounded to the model's dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.canonical import pack_nibbles
from hal_core.codes import effective_scales
from hal_core.dtypes import torch_dtype
from hal_core.op_parts import rounded_scales
from hal_core.recast import recast
from hal_core.schemes import ZeroKind

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.canonical import QuantizedTensor

__all__ = ["OFFSET", "ark_blob", "ark_experts", "torch_scaled", "vllm_dense", "vllm_experts"]

#: Turned over, two's complement nibbles are codes with a zero point of 8.
OFFSET = 0x88


def _joined(weights: list[QuantizedTensor], name: str) -> Tensor:
    """One tensor of matrices one above the other."""
    return torch.cat([getattr(weight, name) for weight in weights], dim=-2)


def _floats(weights: list[QuantizedTensor]) -> Tensor:
    return torch.cat([effective_scales(weight.scales, None) for weight in weights if weight.scales is not None], dim=-2)


def _rounded(weights: list[QuantizedTensor], dtype: str, library: str) -> Tensor:
    asked = f"{weights[0].scheme} for {library}"
    return torch.cat([rounded_scales(asked, weight.scales, dtype) for weight in weights if weight.scales is not None], dim=-2)


def vllm_experts(weights: list[QuantizedTensor], dtype: str) -> tuple[Tensor, Tensor | None]:
    """Values and scales of ``w13`` or ``w2`` of vllm-xpu-kernels.

    4-bit: ``uint8 [E, N, K/2]`` with a zero point of 8, or ``float4 [E, N, K/2]``; others ``[E, K, N]``. Scales: ``[E, N, G]`` in the
    model's dtype, E8M0 bytes, or float32 of blocks ``[E, K/128, N/128]``.
    """
    scheme, values = weights[0].scheme, _joined(weights, "values")
    if scheme.dtype == "int4":
        return values ^ OFFSET, _rounded(weights, dtype, "vllm-xpu-kernels")
    if scheme.dtype == "mxfp4":
        return values.view(torch.float4_e2m1fn_x2), _joined(weights, "scales")
    turned = recast(values.transpose(-1, -2).contiguous(), values.dtype)
    return turned, _floats(weights).transpose(-1, -2).contiguous() if scheme.quantized else None


def vllm_dense(weight: QuantizedTensor, dtype: str, column: bool) -> dict[str, Tensor]:
    """Tensors of the products of vllm-xpu-kernels; ``weight`` is passed turned over.

    int4: words ``int32 [N, K/8]``, scales ``[G, N]``, zero points ``int8 [1]`` or words ``int32 [G, N/8]``.
    fp8: ``[N, K]``; float32 scales of blocks ``[K/128, N/128]``, else ``[N, 1]`` where ``column`` says so and ``[N]`` where not.
    """
    if weight.scheme.dtype == "fp8_e4m3":
        scales = _floats([weight])
        if weight.scheme.granularity.block is not None:
            scales = scales.t()
        elif not column:
            scales = scales.flatten()
        return {"weight": weight.values, "scale": scales.contiguous()}
    plain = weight.scheme.zero is ZeroKind.NONE
    codes = (weight.values ^ OFFSET if plain else weight.values).contiguous()
    zero = torch.tensor([8], dtype=torch.int8)
    if weight.zeros is not None:
        zero = recast(pack_nibbles(weight.zeros.t()).contiguous(), torch.int32)
    scales = _rounded([weight], dtype, "vllm-xpu-kernels").t().contiguous()
    return {"weight": recast(codes, torch.int32), "scale": scales, "zero": zero}


def torch_scaled(weight: QuantizedTensor) -> dict[str, Tensor]:
    """Tensors of ``scaled_mm``: ``[N, K]``, which is passed turned over, and float32 scales ``[1, N]``, or of blocks ``[K/128, N/128]``.

    A last block that is smaller has its own scale.
    """
    return {"weight": weight.values, "scale": _floats([weight]).t().contiguous()}


def ark_experts(weights: list[QuantizedTensor], dtype: str) -> dict[str, Tensor]:
    """Tensors of ``auto_round_kernel.moe``: codes ``[E, N, K * bits / 8]``, scales and zero points ``[E, N, G]`` in the model's dtype."""
    values = _joined(weights, "values")
    found = {"weights": recast(values, torch.uint8) if values.dtype == torch.int8 else values}
    found["scales"] = _rounded(weights, dtype, "auto-round-lib")
    if weights[0].zeros is not None:
        found["zeros"] = _joined(weights, "zeros").to(torch_dtype(dtype))
    return found


def ark_blob(weight: QuantizedTensor) -> dict[str, Tensor]:
    """What ``auto_round_kernel.repack_quantized_weight`` takes: signed codes ``int8 [K, N]`` and fp16 scales ``[G, N]``."""
    codes = weight.codes().to(torch.int8).t().contiguous()
    scales = _rounded([weight], "fp16", "auto-round-lib").t().contiguous()
    return {"QB": codes, "scaleB": scales, "zp": torch.empty(0, dtype=torch.int8)}
