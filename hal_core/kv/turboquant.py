"""Rotated Lloyd-Max quantization: a norm, and the rotated unit vector's coordinates as codes of an optimal scalar quantizer.

Known for caches as TurboQuant (Zandieh et al. 2025); EDEN (Vargaftik et al. 2022) and HIGGS (Malinovskii et al. 2024) had its parts.
With ``unit = x / |x|`` and a rotation R, code c is the number of midpoints below ``R @ unit``, and ``centroids`` the codebook's entries:

- norm correction (the default): ``scale = |x| / |centroids|``, so that the vector read back has the length of x;
- ``raw``: ``scale = |x|``, the least square error;
- ``unbiased``: ``raw`` with one bit less, and the residual r from what that reads back as its length and the signs of ``S @ r``; it reads
  back as ``|r| * kappa * S.T @ signs``, which has the right inner product with every vector on average.

A vector reads back as ``scale * R.T @ centroids``. The norm of x is summed in float64.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal_core.errors import ShapeError
from hal_core.kv.bits import pack_codes, packed_bytes, unpack_codes
from hal_core.kv.codebook import codebook, midpoints
from hal_core.kv.quantizer import Part, Parts, Quantizer, reciprocal, stored_fp16
from hal_core.kv.rotation import mixed_seed, projection_matrix, rotation_matrix

if TYPE_CHECKING:
    from hal_core.kv.scheme import KVScheme

__all__ = ["TurboQuantizer", "residual_factor", "section_seed"]

_SIDES = {"keys": 0, "values": 1}


def section_seed(seed: int, side: str, section: int) -> int:
    """Seed of the rotation (and projection) of one part of the channels of one side of a cache."""
    return mixed_seed(seed, _SIDES[side], section)


@functools.cache
def residual_factor(dim: int) -> float:
    """``1 / (dim * E|u|)`` for a coordinate u of a unit vector: makes the signs of ``dim`` unit projections an unbiased estimate.

    ``E|u| = gamma(dim / 2) / (sqrt(pi) * gamma((dim + 1) / 2))``, about ``sqrt(2 / (pi * dim))``.
    """
    mean = math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)
    return 1 / (dim * mean)


def _length(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    return norm.float()


class TurboQuantizer(Quantizer):
    """Channels in one or two sections, each with a rotation, a codebook and a scale of its own.

    channels: permutation of the channels whose first entries are the finer section; None for the order as it is.
    """

    def __init__(self, scheme: KVScheme, dim: int, seed: int, side: str, channels: Tensor | None = None) -> None:
        super().__init__(scheme, dim)
        self.sections = scheme.sections(dim)
        self.seeds = tuple(section_seed(seed, side, index) for index in range(len(self.sections)))
        self.channels = None if channels is None else _permutation(channels, dim, side)

    @property
    def parts(self) -> tuple[Part, ...]:
        codes = sum(packed_bytes(channels, bits) for channels, bits in self.sections)
        parts = (Part("codes", torch.uint8, codes),) if codes else ()
        if self.scheme.variant == "unbiased":
            signs = Part("signs", torch.uint8, packed_bytes(self.dim, 1))
            return (*parts, signs, Part("scale", torch.float16, 1), Part("residual", torch.float16, 1))
        return (*parts, Part("scale", torch.float16, len(self.sections)))

    def quantize(self, x: Tensor) -> Parts:
        x = x.float()
        if self.channels is not None:
            x = x[..., self.channels.to(x.device)]
        finite = torch.isfinite(x).all(dim=-1, keepdim=True)
        x = torch.where(finite, x, 0.0)
        sections = torch.split(x, [channels for channels, _ in self.sections], dim=-1)
        found = [self._section(part, bits, seed) for part, (_, bits), seed in zip(sections, self.sections, self.seeds, strict=True)]
        scale = torch.where(finite, torch.cat([scale for _, scale in found], dim=-1), torch.nan)
        parts = {"codes": torch.cat([codes for codes, _ in found], dim=-1), "scale": stored_fp16(scale)}
        if self.scheme.variant == "unbiased":
            parts |= self._residual(x, parts, finite)
        return {part.name: parts[part.name] for part in self.parts}

    def _section(self, x: Tensor, bits: int, seed: int) -> tuple[Tensor, Tensor]:
        """Packed codes and the float32 scale of one section."""
        dim, norm = x.shape[-1], _length(x)
        unit = x * reciprocal(norm)
        rotated = unit @ rotation_matrix(dim, seed, x.device).T
        codes = torch.bucketize(rotated, midpoints(bits, dim, x.device), out_int32=True)
        packed = pack_codes(codes, bits) if bits else codes.new_zeros(*x.shape[:-1], 0, dtype=torch.uint8)
        if self.scheme.variant:
            return packed, norm
        return packed, norm * reciprocal(_length(codebook(bits, dim, x.device)[codes]))

    def _residual(self, x: Tensor, parts: Parts, finite: Tensor) -> Parts:
        scale = torch.where(finite, parts["scale"].float(), 0.0)
        rest = x - self._coarse(parts["codes"], scale)
        signs = (rest @ projection_matrix(self.dim, self.seeds[0], x.device).T) >= 0
        length = torch.where(finite, _length(rest), torch.nan)
        return {"signs": pack_codes(signs.to(torch.uint8), 1), "residual": stored_fp16(length)}

    def _coarse(self, packed: Tensor, scale: Tensor) -> Tensor:
        """What codes and scales read back as, channels in the sections' order."""
        found, start = [], 0
        for index, ((dim, bits), seed) in enumerate(zip(self.sections, self.seeds, strict=True)):
            end = start + packed_bytes(dim, bits)
            book = codebook(bits, dim, packed.device)
            levels = book[unpack_codes(packed[..., start:end], dim, bits)] if bits else scale.new_zeros(*scale.shape[:-1], dim)
            found.append(scale[..., index : index + 1] * (levels @ rotation_matrix(dim, seed, packed.device)))
            start = end
        return torch.cat(found, dim=-1)

    def dequantize(self, parts: Parts) -> Tensor:
        scale = parts["scale"].float()
        packed = parts.get("codes")
        x = self._coarse(scale.new_zeros(*scale.shape[:-1], 0, dtype=torch.uint8) if packed is None else packed, scale)
        if self.scheme.variant == "unbiased":
            signs = unpack_codes(parts["signs"], self.dim, 1).float() * 2 - 1
            back = signs @ projection_matrix(self.dim, self.seeds[0], x.device)
            x = x + parts["residual"].float() * residual_factor(self.dim) * back
        if self.channels is None:
            return x
        return torch.empty_like(x).index_copy_(-1, self.channels.to(x.device), x)


def _permutation(channels: Tensor, dim: int, side: str) -> Tensor:
    flat = channels.detach().cpu().to(torch.int64)
    if flat.shape != (dim,) or not torch.equal(flat.sort().values, torch.arange(dim)):
        raise ShapeError(f"channels of {side}", f"{list(channels.shape)}", f"give a permutation of 0 to {dim - 1}")
    return flat
