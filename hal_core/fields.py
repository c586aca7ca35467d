"""Codes of a few bits to a little-endian bit stream and back, in whole-word steps.

Field ``i`` of width ``b`` takes bits ``[i*b, (i+1)*b)`` of the stream, so eight fields fill ``b`` whole bytes. Each step joins two
neighbours, which lie side by side in a word of twice the size; three steps make eight fields one number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["join_fields", "split_fields", "split_last"]

#: The words of each step, and the bits that one neighbour may take of them.
_STEPS = ((torch.int16, 8), (torch.int32, 16), (torch.int64, 32))


def split_last(tensor: Tensor, *sizes: int) -> Tensor:
    """The last dim as several; one of ``sizes`` may be -1."""
    return tensor.reshape(*tensor.shape[:-1], *sizes)


def join_fields(codes: Tensor, bits: int) -> Tensor:
    """uint8 ``[.., count]``, each below ``2**bits``, to bytes ``[.., ceil(count/8)*bits]``; unused bits are 0."""
    count = codes.shape[-1]
    # flat, because a contiguous tensor may have any stride in a dimension of one
    words = (pad(codes, (0, -count % 8)) if count % 8 else codes.contiguous()).flatten()
    width = bits
    for dtype, half in _STEPS:
        words = words.view(dtype)
        words = (words & ((1 << width) - 1)).bitwise_or_((words >> half) << width)
        width *= 2
    return words.view(torch.uint8).view(*codes.shape[:-1], -(-count // 8), 8)[..., :bits].flatten(-2)


def split_fields(data: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of :func:`join_fields`: the first ``count`` codes of a stream, uint8 ``[.., count]``; missing bytes are 0."""
    if not data.numel():  # strides of nothing cannot be viewed as wider words
        return torch.zeros(*data.shape[:-1], count, dtype=torch.uint8, device=data.device)
    eights = -(-count // 8)
    stream = data[..., : eights * bits]
    if stream.shape[-1] < eights * bits:
        stream = pad(stream, (0, eights * bits - stream.shape[-1]))
    words = torch.zeros(*data.shape[:-1], eights, 8, dtype=torch.uint8, device=data.device)
    words[..., :bits] = split_last(stream, eights, bits)
    words = words.view(torch.int64).flatten(-2)
    for dtype, half in reversed(_STEPS):
        width = bits * half // 8
        words = words.view(dtype)
        words = (words & ((1 << width) - 1)).bitwise_or_((words >> width).bitwise_left_shift_(half))
    codes = words.view(torch.uint8)
    return codes if codes.shape[-1] == count else codes[..., :count].contiguous()
