"""GGUF's superblocks of 256: one fp16 scale (and minimum) for all, times a small integer for each group of 16 or 32.

The two levels stay apart: a group's scale is ``d * sub_scale``, and its minimum ``-dmin * sub_min``. The fp16 minimum is
negated on the way in, so that a weight is ``q * scale + min`` as everywhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.fields import split_last
from hal_core.formats.gguf_bits import Parts, from_planes, halves, nibble_halves, nibble_pairs, planes, raw

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SUPERBLOCK_TYPES"]


def _signed(codes: Tensor, middle: int) -> Tensor:
    return codes.view(torch.int8).sub_(middle)


def _unsigned(codes: Tensor, middle: int) -> Tensor:
    return (codes + middle).view(torch.uint8)


def _unpack_q2(blocks: Tensor, kind: str) -> Parts:
    return {
        "values": planes(blocks[..., 16:80], 32, 2), "scales": halves(blocks, 80), "mins": -halves(blocks, 82),
        "sub_scales": (blocks[..., :16] & 15).view(torch.int8), "sub_mins": blocks[..., :16] >> 4,
    }  # fmt: skip


def _pack_q2(parts: Parts, kind: str) -> list[Tensor]:
    levels = parts["sub_scales"].view(torch.uint8) | (parts["sub_mins"] << 4)
    return [levels, from_planes(parts["values"], 32, 2), raw(parts["scales"]), raw(-parts["mins"])]


def _unpack_q3(blocks: Tensor, kind: str) -> Parts:
    codes = planes(blocks[..., 32:96], 32, 2) | (planes(blocks[..., :32], 32, 1) << 2)
    levels = planes(blocks[..., 96:104], 8, 4) | (planes(blocks[..., 104:108], 4, 2) << 4)
    return {"values": _signed(codes, 4), "scales": halves(blocks, 108), "sub_scales": _signed(levels, 32)}


def _pack_q3(parts: Parts, kind: str) -> list[Tensor]:
    codes, levels = _unsigned(parts["values"], 4), _unsigned(parts["sub_scales"], 32)
    return [
        from_planes(codes >> 2, 32, 1), from_planes(codes & 3, 32, 2),
        from_planes(levels & 15, 8, 4), from_planes(levels >> 4, 4, 2), raw(parts["scales"]),
    ]  # fmt: skip


def _unpack_levels(data: Tensor) -> Parts:
    """Eight 6-bit scales and eight minima in 12 bytes: the upper four of each are split over the spare bits."""
    first, second, third = data[..., :4], data[..., 4:8], data[..., 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 0x30)], dim=-1)
    return {"sub_scales": scales.view(torch.int8), "sub_mins": torch.cat([second & 63, (third >> 4) | ((second >> 2) & 0x30)], dim=-1)}


def _pack_levels(parts: Parts) -> Tensor:
    scales, mins = parts["sub_scales"].view(torch.uint8), parts["sub_mins"]
    third = (scales[..., 4:] & 15) | ((mins[..., 4:] & 15) << 4)
    return torch.cat([*(part[..., :4] | ((part[..., 4:] & 0x30) << 2) for part in (scales, mins)), third], dim=-1)


def _unpack_q45(blocks: Tensor, kind: str) -> Parts:
    heads = {"scales": halves(blocks, 0), "mins": -halves(blocks, 2), **_unpack_levels(blocks[..., 4:16])}
    if kind == "Q4_K":
        return {"values": nibble_pairs(blocks[..., 16:], 32), **heads}
    return {"values": planes(blocks[..., 48:], 32, 4) | (planes(blocks[..., 16:48], 32, 1) << 4), **heads}


def _pack_q45(parts: Parts, kind: str) -> list[Tensor]:
    heads = [raw(parts["scales"]), raw(-parts["mins"]), _pack_levels(parts)]
    if kind == "Q4_K":
        return [*heads, nibble_halves(parts["values"], 32)]
    return [*heads, from_planes(parts["values"] >> 4, 32, 1), from_planes(parts["values"] & 15, 32, 4)]


def _unpack_q6(blocks: Tensor, kind: str) -> Parts:
    codes = planes(blocks[..., :128], 64, 4) | (planes(blocks[..., 128:192], 32, 2) << 4)
    return {"values": _signed(codes, 32), "scales": halves(blocks, 208), "sub_scales": blocks[..., 192:208].view(torch.int8)}


def _pack_q6(parts: Parts, kind: str) -> list[Tensor]:
    codes = _unsigned(parts["values"], 32)
    return [from_planes(codes & 15, 64, 4), from_planes(codes >> 4, 32, 2), raw(parts["sub_scales"]), raw(parts["scales"])]


def _unpack_iq4(blocks: Tensor, kind: str) -> Parts:
    levels = planes(blocks[..., 4:8].unsqueeze(-1), 1, 4).flatten(-2) | (planes(blocks[..., 2:4].unsqueeze(-1), 1, 2).flatten(-2) << 4)
    return {"values": nibble_pairs(blocks[..., 8:], 16), "scales": halves(blocks, 0), "sub_scales": _signed(levels, 32)}


def _pack_iq4(parts: Parts, kind: str) -> list[Tensor]:
    levels = _unsigned(parts["sub_scales"], 32)
    high = from_planes(split_last(levels >> 4, 2, 4), 1, 2).flatten(-2)
    low = from_planes(split_last(levels & 15, 4, 2), 1, 4).flatten(-2)
    return [raw(parts["scales"]), high, low, nibble_halves(parts["values"], 16)]


#: Type: canonical scheme, elements and bytes of a block, and the two directions.
SUPERBLOCK_TYPES = {
    "Q2_K": ("int2:g16/256:min", 256, 84, _unpack_q2, _pack_q2),
    "Q3_K": ("int3:g16/256", 256, 110, _unpack_q3, _pack_q3),
    "Q4_K": ("int4:g32/256:min", 256, 144, _unpack_q45, _pack_q45),
    "Q5_K": ("int5:g32/256:min", 256, 176, _unpack_q45, _pack_q45),
    "Q6_K": ("int6:g16/256", 256, 210, _unpack_q6, _pack_q6),
    "IQ4_XS": ("iq4_nl:g32/256", 256, 136, _unpack_iq4, _pack_iq4),
}
