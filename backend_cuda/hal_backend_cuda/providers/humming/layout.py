"""Layout ``humming``: a canonical weight as the tensors that Humming's own preparation takes, and back.

Humming re-lays these on the device for the architecture at hand; that step is its own and has no inverse here. What this module
makes is a bijection: codes as offset-binary words, zero points packed along N, scales in the type that the kernels multiply by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hal_core.canonical import QuantizedTensor, pack_nibbles, unpack_nibbles
from hal_core.errors import FormatError
from hal_core.layouts import Layout
from hal_core.op_parts import rounded_scales
from hal_core.recast import recast
from hal_core.schemes import GranularityKind, WeightScheme, ZeroKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["HummingLayout", "humming_tensors", "stacked_rows"]

#: The sign bit of each code of a byte: turning it over adds half of the range.
_SIGNS = {"int4": 0x88, "int8": 0x80}


@dataclass(frozen=True)
class HummingLayout(Layout):
    """dtype: of the activations. scale_dtype: of the canonical scales, which Humming's tensors do not tell."""

    dtype: str = "bf16"
    scale_dtype: torch.dtype = torch.bfloat16
    global_dtype: torch.dtype = torch.float32
    name = "humming"

    def obstacle(self, scheme: WeightScheme, shape: tuple[int, ...]) -> str:
        g = scheme.granularity
        if scheme.dtype not in {"int4", "int8", "fp8_e4m3", "mxfp4", "nvfp4"} or scheme.act_order or scheme.zero is ZeroKind.MINIMUM:
            return "it holds int4, int8, fp8_e4m3, mxfp4 and nvfp4 without activation order and float minima"
        if g.kind not in {GranularityKind.CHANNEL, GranularityKind.GROUP, GranularityKind.BLOCK}:
            return "it has scales per channel, group and block"
        if shape[1] * scheme.bits % 32:
            return f"K={shape[1]} codes of {scheme.bits} bits do not fill whole words"
        if scheme.zero is ZeroKind.INTEGER and shape[0] * scheme.bits % 32:
            return f"N={shape[0]} zero points of {scheme.bits} bits do not fill whole words"
        for name, size, step in (
            ("K", shape[1], g.group),
            ("N", shape[0], g.block and g.block[0]),
            ("K", shape[1], g.block and g.block[1]),
        ):
            if step and size % step:
                return f"{name}={size} is not a multiple of {step}, what shares a scale"
        return ""

    def pack(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        self._check(weight.scheme, weight.shape)
        return humming_tensors(weight, self.dtype)

    def unpack(self, tensors: Mapping[str, Tensor], scheme: WeightScheme, shape: tuple[int, ...]) -> QuantizedTensor:
        self._check(scheme, shape)
        if missing := sorted({"weight", "weight_scale"} - tensors.keys()):
            raise FormatError(f"layout {self.name}", f"no {', '.join(missing)}", "give what pack returns")
        scales, whole, zeros = tensors["weight_scale"], None, None
        if scheme.dtype == "mxfp4":
            scales = scales.view(torch.uint8)
        elif scheme.dtype == "nvfp4":
            whole = tensors["weight_scale_2"].reshape(()).to(self.global_dtype)
        else:
            scales = scales.to(self.scale_dtype)
        if scheme.zero is ZeroKind.INTEGER:
            zeros = _unpacked_zeros(tensors["zero_point"], scheme.bits, shape[0])
        return QuantizedTensor(scheme, shape, _values(tensors["weight"], scheme), scales.clone(), zeros, global_scale=whole)


def humming_tensors(weight: QuantizedTensor, dtype: str) -> dict[str, Tensor]:
    """Tensors by Humming's names, with the leading dims of ``weight``.

    weight ``int32 [.., N, K * bits / 32]``; weight_scale ``[.., N, G]`` or ``[.., N/n, K/k] float32``;
    zero_point ``int32 [.., N * bits / 32, G]``; weight_scale_2 ``float32 [E]`` or ``[1]``.

    Raises:
        UnfitWeightsError: scales that ``dtype`` holds only as zero, infinity, or with more than a rounding's error.
    """
    scheme, scales = weight.scheme, weight.scales
    assert scales is not None  # every quantized scheme has scales
    tensors = {"weight": _words(weight)}
    if scheme.dtype == "mxfp4":
        tensors["weight_scale"] = scales.view(torch.float8_e8m0fnu)
    elif scheme.dtype == "nvfp4":
        tensors["weight_scale"] = scales
        whole = torch.ones(weight.shape[:-2]) if weight.global_scale is None else weight.global_scale
        tensors["weight_scale_2"] = whole.to(scales.device, torch.float32).reshape(-1)
    elif scheme.granularity.block is not None:
        tensors["weight_scale"] = rounded_scales(f"{scheme} for humming", scales, "fp32")
    else:
        tensors["weight_scale"] = rounded_scales(f"{scheme} for humming", scales, dtype)
    if weight.zeros is not None:
        tensors["zero_point"] = _packed_zeros(weight.zeros, scheme.bits)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def stacked_rows(parts: list[dict[str, Tensor]], dtype: str) -> dict[str, Tensor]:
    """Matrices one below the other, gate above up. Each row has the global scale of its own: ``weight_scale_2 [E, N]`` in ``dtype``.

    Raises:
        UnfitWeightsError: global scales that ``dtype`` holds only as zero, infinity, or with more than a rounding's error.
    """
    out = {name: torch.cat([part[name] for part in parts], dim=-2) for name in parts[0] if name != "weight_scale_2"}
    if "weight_scale_2" in parts[0]:
        spread = [part["weight_scale_2"][:, None].expand(part["weight"].shape[:-1]) for part in parts]
        out["weight_scale_2"] = rounded_scales("global scales for humming", torch.cat(spread, dim=-1), dtype)
    return out


def _words(weight: QuantizedTensor) -> Tensor:
    """int32 words of offset-binary codes, the first code lowest."""
    data = recast(weight.values.contiguous(), torch.uint8)
    if weight.scheme.dtype in _SIGNS and weight.scheme.zero is ZeroKind.NONE:
        data = data ^ _SIGNS[weight.scheme.dtype]
    return recast(data, torch.int32)


def _values(words: Tensor, scheme: WeightScheme) -> Tensor:
    data = recast(words.contiguous(), torch.uint8)
    if scheme.dtype in _SIGNS and scheme.zero is ZeroKind.NONE:
        data = data ^ _SIGNS[scheme.dtype]
    kinds = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8 if scheme.zero is ZeroKind.NONE else torch.uint8}
    return data.clone().view(kinds.get(scheme.dtype, torch.uint8))


def _packed_zeros(zeros: Tensor, bits: int) -> Tensor:
    """``uint8 [.., N, G]`` to ``int32 [.., N * bits / 32, G]``: words run along N."""
    along = zeros.transpose(-1, -2).contiguous()
    packed = pack_nibbles(along) if bits == 4 else along
    return recast(packed.contiguous(), torch.int32).transpose(-1, -2)


def _unpacked_zeros(words: Tensor, bits: int, n: int) -> Tensor:
    data = recast(words.transpose(-1, -2).contiguous(), torch.uint8)
    return (unpack_nibbles(data, n) if bits == 4 else data).transpose(-1, -2).contiguous()
