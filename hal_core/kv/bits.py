"""Codes of any width as a stream of bits."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_codes", "packed_bytes", "unpack_codes"]


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of ``count`` codes of ``bits`` bits."""
    return -(-count * bits // 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[.., n]`` below ``2^bits`` to uint8 ``[.., ceil(n * bits / 8)]``: the first code in the lowest bits, little-endian."""
    *lead, count = codes.shape
    if bits == 8:
        return codes.to(torch.uint8)
    if bits == 4 and count % 2 == 0:
        low, high = codes.to(torch.uint8).reshape(*lead, count // 2, 2).unbind(-1)
        return low | (high << 4)
    wide = (codes.to(torch.int32).unsqueeze(-1) >> torch.arange(bits, device=codes.device, dtype=torch.int32)) & 1
    stream = wide.reshape(*lead, count * bits)
    stream = torch.nn.functional.pad(stream, (0, 8 * packed_bytes(count, bits) - count * bits))
    weights = torch.tensor([1 << i for i in range(8)], device=codes.device, dtype=torch.int32)
    packed: Tensor = (stream.reshape(*lead, packed_bytes(count, bits), 8) * weights).sum(-1)
    return packed.to(torch.uint8)


def unpack_codes(packed: Tensor, count: int, bits: int) -> Tensor:
    """Inverse of :func:`pack_codes`, int32 ``[.., count]``."""
    if bits == 8:
        return packed.to(torch.int32)
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :count].to(torch.int32)
    stream = (packed.to(torch.int32).unsqueeze(-1) >> torch.arange(8, device=packed.device, dtype=torch.int32)) & 1
    stream = stream.flatten(-2)[..., : count * bits].reshape(*packed.shape[:-1], count, bits)
    weights = torch.tensor([1 << i for i in range(bits)], device=packed.device, dtype=torch.int32)
    codes: Tensor = (stream * weights).sum(-1)
    return codes.to(torch.int32)
