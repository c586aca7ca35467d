"""Codes of any width as a stream of bits."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_codes", "packed_bytes", "unpack_codes"]


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of ``count`` codes of ``bits`` bits."""
    return -(-count * bits // 8)


def _shifts(count: int, step: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(0, count * step, step, dtype=dtype, device=device)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[.., n]`` below ``2^bits`` to uint8 ``[.., ceil(n * bits / 8)]``: the first code in the lowest bits, little-endian."""
    *lead, count = codes.shape
    if bits == 8:
        return codes.to(torch.uint8)
    # Whole bytes of whole codes: one byte for widths that divide 8, else as many bytes as bits for 8 codes.
    each, dtype = (8 // bits, torch.uint8) if 8 % bits == 0 else (8, torch.int64)
    groups = -(-count // each)
    padded = torch.nn.functional.pad(codes.to(dtype), (0, groups * each - count)).reshape(*lead, groups, each)
    words = padded[..., 0]
    for index in range(1, each):
        words = words | (padded[..., index] << (bits * index))
    if dtype == torch.uint8:
        return words
    stream = ((words.unsqueeze(-1) >> _shifts(bits, 8, dtype, codes.device)) & 255).to(torch.uint8).reshape(*lead, groups * bits)
    return stream[..., : packed_bytes(count, bits)]


def unpack_codes(packed: Tensor, count: int, bits: int) -> Tensor:
    """Inverse of :func:`pack_codes`, int32 ``[.., count]``."""
    lead, device = packed.shape[:-1], packed.device
    if bits == 8:
        return packed.to(torch.int32)
    if 8 % bits == 0:
        each = 8 // bits
        codes = (packed.unsqueeze(-1) >> _shifts(each, bits, torch.uint8, device)) & ((1 << bits) - 1)
        return codes.reshape(*lead, packed.shape[-1] * each)[..., :count].to(torch.int32)
    groups = -(-count // 8)
    padded = torch.nn.functional.pad(packed, (0, groups * bits - packed.shape[-1])).reshape(*lead, groups, bits).to(torch.int64)
    words = padded[..., 0]
    for index in range(1, bits):
        words = words | (padded[..., index] << (8 * index))
    codes = (words.unsqueeze(-1) >> _shifts(8, bits, torch.int64, device)) & ((1 << bits) - 1)
    return codes.reshape(*lead, groups * 8)[..., :count].to(torch.int32)
