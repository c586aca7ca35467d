"""Fields of a few bits in 32-bit words, and their canonical storage.

The stream is little-endian: field ``i`` of width ``b`` takes bits ``[i*b, (i+1)*b)`` counted from the lowest bit of
the first word. Every served packing is this stream along one dimension, in natural or interleaved order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hal_core.canonical import pack_nibbles, unpack_nibbles
from hal_core.fields import join_fields, split_fields

__all__ = ["canonical_codes", "pack_fields", "signed_storage", "stored_codes", "unpack_fields", "unsigned_storage"]


def unpack_fields(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 ``[.., W]`` to the first ``count`` fields, uint8 ``[.., count]``."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data[..., :count].contiguous()
    if bits == 4:
        return unpack_nibbles(data[..., : (count + 1) // 2], count)
    return split_fields(data, bits, count)


def pack_fields(codes: Tensor, bits: int) -> Tensor:
    """uint8 ``[.., count]`` to int32 ``[.., ceil(count*bits/32)]``; unused bits are 0."""
    size = -(-codes.shape[-1] * bits // 32) * 4
    stream = join_fields(codes, bits)[..., :size]
    return pad(stream, (0, size - stream.shape[-1])).contiguous().view(torch.int32)


def canonical_codes(words: Tensor, bits: int, k: int) -> Tensor:
    """int32 ``[.., W]`` packed along K to the canonical unsigned storage: nibble pairs for 4 bits, else a byte per code.

    4-bit words hold eight codes from the low nibble up, so on a little-endian machine their bytes are canonical already.
    """
    if bits != 4:
        return unpack_fields(words, bits, k)
    packed = words.contiguous().view(torch.uint8)[..., : (k + 1) // 2].contiguous()
    return _without_padding(packed, k)


def stored_codes(values: Tensor, bits: int, k: int) -> Tensor:
    """Inverse of :func:`canonical_codes`."""
    return pack_fields(unpack_nibbles(values, k) if bits == 4 else values, bits)


def signed_storage(values: Tensor, bits: int, k: int) -> Tensor:
    """Canonical unsigned codes to two's complement, ``code - 2**(bits-1)``; may reuse the memory of ``values``."""
    if bits == 4:
        return _without_padding(values.bitwise_xor_(0x88), k)
    return values.view(torch.int8).sub_(1 << (bits - 1)) if bits < 8 else values.bitwise_xor_(0x80).view(torch.int8)


def unsigned_storage(values: Tensor, bits: int, k: int) -> Tensor:
    """Inverse of :func:`signed_storage`, in fresh memory."""
    if bits == 4:
        return pack_nibbles(unpack_nibbles(values, k) ^ 8)
    return (values.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)


def _without_padding(packed: Tensor, k: int) -> Tensor:
    """With odd K the last high nibble is nobody's: keep it 0, so that equal weights are equal bytes."""
    if k % 2:
        packed[..., -1] &= 15
    return packed
