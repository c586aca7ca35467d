"""The canonical quantization of keys and values: which codes, scales and norms a vector gets. Kernels lay out these numbers as they like.

Rules that hold for every scheme: arithmetic is float32; a scale, minimum or norm is rounded to its stored type, float16, before codes
are chosen with it, and saturates at 65504 instead of becoming infinite; codes are rounded half to even; a number is multiplied by the
float32 reciprocal of the stored scale, which is 0 for a scale of 0. A vector (or a channel of a group) that holds a NaN or an infinity
gets the scale NaN, so it reads as NaN and no other is touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError
from hal_core.kv.bits import pack_codes, packed_bytes, unpack_codes
from hal_core.kv.scheme import KV_GROUP, KVScheme

if TYPE_CHECKING:
    from hal_core.kv.op import KVParams
    from hal_core.spec import KVCacheSpec

__all__ = [
    "FP8_MOST",
    "FP16_MOST",
    "USABLE_SCALES",
    "Part",
    "Parts",
    "Quantizer",
    "fp8_scale",
    "quantizer",
    "reciprocal",
    "stored_fp16",
    "usable_scales",
]

FP16_MOST = 65504.0
FP8_MOST = 448.0
#: What to do about scales that are not.
USABLE_SCALES = "scales are positive numbers, finite and from 1.18e-38 on"
#: What a vector became: the tensors of :attr:`Quantizer.parts` by name.
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    """One stored tensor of a quantized vector: ``width`` elements of ``dtype`` for each token, or for each group of 32 tokens."""

    name: str
    dtype: torch.dtype
    width: int
    grouped: bool = False

    @property
    def bytes(self) -> int:
        return self.width * self.dtype.itemsize


class Quantizer(ABC):
    """Quantizes vectors of one side of a cache; the leading dimensions end with kv heads.

    For grouped schemes a call takes whole groups, ``[.., 32, Hkv, D]``, and the grouped parts lack the dimension of 32.
    """

    def __init__(self, scheme: KVScheme, dim: int) -> None:
        self.scheme, self.dim = scheme, dim

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """What is stored of a vector."""

    @abstractmethod
    def quantize(self, x: Tensor) -> Parts:
        """float32 ``[.., Hkv, D]`` to its parts ``[.., Hkv, width]``."""

    @abstractmethod
    def dequantize(self, parts: Parts) -> Tensor:
        """Inverse, up to what was lost: float32 ``[.., Hkv, D]``."""

    def error(self, x: Tensor) -> Tensor:
        """``dequantize(quantize(x)) - x`` in float32."""
        wide = x.float()
        return self.dequantize(self.quantize(wide)) - wide


def stored_fp16(x: Tensor) -> Tensor:
    """float32 to float16, saturating; NaN stays NaN."""
    return x.clamp(-FP16_MOST, FP16_MOST).to(torch.float16)


def reciprocal(scale: Tensor) -> Tensor:
    """float32 ``1 / scale``, and 0 where the scale is 0."""
    wide = scale.float()
    return torch.where(wide == 0, torch.zeros_like(wide), 1 / wide)


def usable_scales(scale: Tensor) -> bool:
    """Whether these are positive, finite float32 numbers that are not subnormal: the reciprocal of a smaller one may be infinite."""
    wide = scale.detach().float()
    return bool((torch.isfinite(wide) & (wide >= torch.finfo(torch.float32).tiny)).all())


def _or_nan(scale: Tensor, x: Tensor, dim: int) -> Tensor:
    return torch.where(torch.isfinite(x).all(dim=dim, keepdim=True), scale, torch.nan)


class _Float(Quantizer):
    """As it is, in another float type: rounded to nearest even, saturating."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("values", torch_dtype(self.scheme.kind), self.dim),)

    def quantize(self, x: Tensor) -> Parts:
        dtype = self.parts[0].dtype
        most = torch.finfo(dtype).max
        return {"values": torch.where(torch.isfinite(x), x.clamp(-most, most), torch.nan).to(dtype)}

    def dequantize(self, parts: Parts) -> Tensor:
        return parts["values"].float()


class _Fp8(Quantizer):
    """e4m3 codes times a static scale: ``x / scale`` saturates at 448 and is rounded to nearest even."""

    def __init__(self, scheme: KVScheme, dim: int, scale: Tensor) -> None:
        super().__init__(scheme, dim)
        self.scale = scale

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("values", torch.float8_e4m3fn, self.dim),)

    def quantize(self, x: Tensor) -> Parts:
        scaled = (x * reciprocal(self.scale.to(x.device))[:, None]).clamp(-FP8_MOST, FP8_MOST)
        return {"values": torch.where(torch.isfinite(x), scaled, torch.nan).to(torch.float8_e4m3fn)}

    def dequantize(self, parts: Parts) -> Tensor:
        return parts["values"].float() * self.scale.to(parts["values"].device)[:, None]


class _Integer(Quantizer):
    """int8: ``scale = max|x| / 127``, codes -127 to 127. int4: a minimum, ``scale = (max - min) / 15``, codes 0 to 15.

    Over a vector, or over the 32 tokens of a group for each channel.
    """

    @property
    def parts(self) -> tuple[Part, ...]:
        grouped = self.scheme.grouped
        width = self.dim if grouped else 1
        if self.scheme.kind == "int8":
            return Part("codes", torch.int8, self.dim), Part("scale", torch.float16, width, grouped)
        codes = Part("codes", torch.uint8, packed_bytes(self.dim, 4))
        return codes, Part("scale", torch.float16, width, grouped), Part("minimum", torch.float16, width, grouped)

    def quantize(self, x: Tensor) -> Parts:
        if self.scheme.grouped and (x.dim() < 3 or x.shape[-3] != KV_GROUP):
            raise ShapeError(f"{self.scheme} keys", f"{list(x.shape)}", f"whole groups [.., {KV_GROUP}, heads, channels] are quantized")
        along = -3 if self.scheme.grouped else -1
        finite = x.nan_to_num(0.0, 0.0, 0.0)
        if self.scheme.kind == "int8":
            scale = stored_fp16(_or_nan(finite.abs().amax(along, keepdim=True) / 127, x, along))
            codes = (finite * reciprocal(scale)).round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)
            return {"codes": codes, "scale": self._narrow(scale)}
        low, high = finite.amin(along, keepdim=True), finite.amax(along, keepdim=True)
        scale, minimum = stored_fp16(_or_nan((high - low) / 15, x, along)), stored_fp16(low)
        codes = ((finite - minimum.float()) * reciprocal(scale)).round().clamp(0, 15).nan_to_num(0.0).to(torch.uint8)
        return {"codes": pack_codes(codes, 4), "scale": self._narrow(scale), "minimum": self._narrow(minimum)}

    def _narrow(self, x: Tensor) -> Tensor:
        return x.squeeze(-3) if self.scheme.grouped else x

    def dequantize(self, parts: Parts) -> Tensor:
        scale = parts["scale"].float()
        scale = scale.unsqueeze(-3) if self.scheme.grouped else scale
        if self.scheme.kind == "int8":
            return parts["codes"].float() * scale
        minimum = parts["minimum"].float()
        minimum = minimum.unsqueeze(-3) if self.scheme.grouped else minimum
        return unpack_codes(parts["codes"], self.dim, 4).float() * scale + minimum


def fp8_scale(scale: Tensor | None, heads: int, scheme: KVScheme, what: str) -> Tensor:
    """float32 ``[heads]`` of a static scale; None is 1.0.

    Raises:
        ShapeError: another shape, several scales where the scheme has one, or a scale that is no positive, normal number.
    """
    if scale is None:
        return torch.ones(heads)
    flat = scale.detach().reshape(-1).float()
    several = flat.numel() == heads and scheme.granularity == "head"
    if flat.numel() != 1 and not several:
        wanted = f"[{heads}] of them, one a head, or one" if scheme.granularity == "head" else "one for all heads"
        raise ShapeError(f"{what} of {scheme}", f"{flat.numel()} scales", f"give {wanted}")
    if not usable_scales(flat):
        raise ShapeError(f"{what} of {scheme}", f"{flat[:8].tolist()}", USABLE_SCALES)
    return flat.expand(heads).clone()


def quantizer(spec: KVCacheSpec, side: str, params: KVParams | None = None) -> Quantizer:
    """The quantizer of ``"keys"`` or ``"values"``.

    Raises:
        ShapeError: parameters that do not fit the spec.
    """
    from hal_core.kv.op import KVParams
    from hal_core.kv.turboquant import TurboQuantizer

    params = params or KVParams()
    keys = side == "keys"
    scheme, dim = (spec.keys, spec.head_dim) if keys else (spec.values, spec.v_dim)
    if scheme.kind == "fp8":
        scale = params.key_scale if keys else params.value_scale
        return _Fp8(scheme, dim, fp8_scale(scale, spec.num_kv_heads, scheme, "key_scale" if keys else "value_scale"))
    if scheme.kind in {"int8", "int4"}:
        return _Integer(scheme, dim)
    if scheme.kind == "turboquant":
        return TurboQuantizer(scheme, dim, spec.seed, side, params.key_channels if keys else params.value_channels)
    return _Float(scheme, dim)
