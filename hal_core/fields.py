"""Codes of a few bits to a little-endian bit stream and back, in whole-word steps.

Field ``i`` of width ``b`` takes bits ``[i*b, (i+1)*b)`` of the stream, so eight fields fill ``b`` whole bytes. Each step joins two
neighbours, which lie side by side in a word of twice the size; three steps make eight fields one number.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from hal_core.recast import recast

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["join_fields", "split_fields", "split_last"]

#: The words of each step, and the bits that one neighbour may take of them.
_STEPS = ((torch.int16, 8), (torch.int32, 16), (torch.int64, 32))
#: Codes in work at a time.
_CODES = 1 << 20


def split_last(tensor: Tensor, *sizes: int) -> Tensor:
    """The last dim as several; one of ``sizes`` may be -1."""
    return tensor.reshape(*tensor.shape[:-1], *sizes)


def join_fields(codes: Tensor, bits: int) -> Tensor:
    """uint8 ``[.., count]``, each below ``2**bits``, to bytes ``[.., ceil(count/8)*bits]``; unused bits are 0."""
    *lead, count = codes.shape
    rows = codes.reshape(math.prod(lead), count)
    out = torch.empty(rows.shape[0], -(-count // 8) * bits, dtype=torch.uint8, device=codes.device)
    for part in _parts(rows):
        out[part] = _join(rows[part], bits)
    return out.view(*lead, out.shape[1])


def split_fields(data: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of :func:`join_fields`: the first ``count`` codes of a stream, uint8 ``[.., count]``; missing bytes are 0."""
    *lead, width = data.shape
    rows = data.reshape(math.prod(lead), width)
    out = torch.empty(rows.shape[0], count, dtype=torch.uint8, device=data.device)
    for part in _parts(out):
        out[part] = _split(rows[part], bits, count)
    return out.view(*lead, count)


def _parts(rows: Tensor) -> Iterator[slice]:
    """Runs of rows that stay in a processor's cache while they are worked on."""
    step = max(1, _CODES // max(1, rows.shape[1]))
    return (slice(start, start + step) for start in range(0, rows.shape[0], step))


def _join(codes: Tensor, bits: int) -> Tensor:
    count = codes.shape[-1]
    words = recast(pad(codes, (0, -count % 8)) if count % 8 else codes, torch.int64).flatten()
    width = bits
    for dtype, half in _STEPS:
        words = words.view(dtype)
        words = (words & ((1 << width) - 1)).bitwise_or_((words >> half) << width)
        width *= 2
    return words.view(torch.uint8).view(codes.shape[0], -(-count // 8), 8)[..., :bits].flatten(-2)


def _split(data: Tensor, bits: int, count: int) -> Tensor:
    eights = -(-count // 8)
    stream = data[:, : eights * bits]
    if stream.shape[1] < eights * bits:
        stream = pad(stream, (0, eights * bits - stream.shape[1]))
    words = _eights(stream.contiguous().view(-1), bits)
    for dtype, half in reversed(_STEPS):
        width = bits * half // 8
        words = words.view(dtype)
        words = (words & ((1 << width) - 1)).bitwise_or_((words >> width).bitwise_left_shift_(half))
    return words.view(torch.uint8).view(data.shape[0], eights * 8)[:, :count]


def _eights(stream: Tensor, bits: int) -> Tensor:
    """Each ``bits`` bytes of a flat stream as one number, int64."""
    if bits == 2:
        return recast(stream, torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
    parts = stream.view(-1, bits)
    words = torch.zeros(parts.shape[0], 8, dtype=torch.uint8, device=stream.device)
    for byte in range(bits):
        words[:, byte] = parts[:, byte]
    return words.view(torch.int64).flatten()
