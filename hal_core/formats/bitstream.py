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
from hal_core.recast import recast

__all__ = ["canonical_codes", "pack_fields", "stored_codes", "unpack_fields", "unsigned_storage"]


def byte_rows(words: Tensor) -> Tensor:
    """int32 ``[.., W]`` as uint8 ``[.., 4*W]``."""
    return recast(words, torch.uint8)


def unpack_fields(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 ``[.., W]`` to the first ``count`` fields, uint8 ``[.., count]``."""
    data = byte_rows(words)
    if bits == 8:
        return data[..., :count].contiguous()
    if bits == 4:
        return unpack_nibbles(data[..., : (count + 1) // 2], count)
    return split_fields(data, bits, count)


def pack_fields(codes: Tensor, bits: int) -> Tensor:
    """uint8 ``[.., count]`` to int32 ``[.., ceil(count*bits/32)]``; unused bits are 0."""
    size = -(-codes.shape[-1] * bits // 32) * 4
    stream = join_fields(codes, bits)[..., :size]
    return recast(pad(stream, (0, size - stream.shape[-1])), torch.int32)


def canonical_codes(words: Tensor, bits: int, k: int, signed: bool, reuse: bool = False) -> Tensor:
    """int32 ``[.., W]`` packed along K to canonical storage: nibble pairs for 4 bits, else a byte per code.

    Words of 4 bits hold eight codes from the low nibble up, so on a little-endian machine their bytes are canonical already.

    signed: codes are stored plus half their range, and wanted as two's complement. reuse: the result may take over the
    memory of ``words``; else it is fresh.
    """
    if bits not in (4, 8):
        codes = unpack_fields(words, bits, k)
        return codes.view(torch.int8).sub_(1 << (bits - 1)) if signed else codes
    data = byte_rows(words)[..., : -(-k * bits // 8)]
    if not (reuse and data.is_contiguous()):
        data = (data ^ (0x88 if bits == 4 else 0x80) if signed else data.clone()).contiguous()
    elif signed:
        data.bitwise_xor_(0x88 if bits == 4 else 0x80)
    return _without_padding(data, k) if bits == 4 else data.view(torch.int8) if signed else data


def stored_codes(values: Tensor, bits: int, k: int) -> Tensor:
    """Inverse of :func:`canonical_codes` for unsigned codes."""
    return pack_fields(unpack_nibbles(values, k) if bits == 4 else values, bits)


def unsigned_storage(values: Tensor, bits: int, k: int) -> Tensor:
    """Canonical two's complement to unsigned codes, ``code + 2**(bits-1)``, in fresh memory."""
    if bits == 4:
        return pack_nibbles(unpack_nibbles(values, k) ^ 8)
    return (values.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)


def _without_padding(packed: Tensor, k: int) -> Tensor:
    """With odd K the last high nibble is nobody's: keep it 0, so that equal weights are equal bytes."""
    if k % 2:
        packed[..., -1] &= 15
    return packed
