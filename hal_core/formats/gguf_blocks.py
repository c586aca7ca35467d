"""GGUF's blocks of 32 to canonical tensors and back; codes stay 4 or 8 bits wide.

Q4_0: fp16 scale, 16 bytes, ``(q - 8) * d``. Q4_1: fp16 scale, fp16 minimum, 16 bytes, ``q * d + m``. Q8_0: fp16 scale,
32 int8. In the 4-bit types byte ``i`` holds elements ``i`` (low nibble) and ``i + 16``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.canonical import QuantizedTensor
from hal_core.errors import FormatError
from hal_core.schemes import Granularity, WeightScheme, ZeroKind

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BLOCK", "BLOCK_BYTES", "FLOATS", "block_scheme", "pack_blocks", "unpack_blocks"]

BLOCK = 32
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WORDS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


def block_scheme(kind: str) -> WeightScheme:
    """Canonical scheme of a GGUF type."""
    if kind in _WORDS:
        return WeightScheme(_WORDS[kind])
    zero = ZeroKind.MINIMUM if kind == "Q4_1" else ZeroKind.NONE
    return WeightScheme("int8" if kind == "Q8_0" else "int4", Granularity.groups(BLOCK), zero)


def unpack_blocks(data: Tensor, kind: str, shape: tuple[int, int], name: str) -> QuantizedTensor:
    """uint8 ``[N, G * block bytes]`` to a canonical ``[N, K]``.

    Raises:
        FormatError: a scale or minimum is NaN or infinite; ``name`` is the tensor's.
    """
    n, k = shape
    blocks = data.view(n, k // BLOCK, BLOCK_BYTES[kind])
    scales = _halves(blocks, 0, name)
    if kind == "Q8_0":
        return QuantizedTensor(block_scheme(kind), shape, blocks[..., 2:].reshape(n, k).view(torch.int8), scales)
    # Neighbouring elements are neighbouring bytes: as 16-bit words their nibbles pair up in a few whole-word steps.
    words = blocks[..., BLOCK_BYTES[kind] - 16 :].contiguous().view(torch.int16)
    low = (words & 15) | ((words >> 4) & 0xF0)
    high = ((words >> 4) & 15) | ((words >> 8) & 0xF0)
    values = torch.cat([low.to(torch.uint8), high.to(torch.uint8)], dim=-1).view(n, k // 2)
    if kind == "Q4_0":
        return QuantizedTensor(block_scheme(kind), shape, values.bitwise_xor_(0x88), scales)
    return QuantizedTensor(block_scheme(kind), shape, values, scales, mins=_halves(blocks, 2, name))


def _halves(blocks: Tensor, start: int, name: str) -> Tensor:
    found = blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)
    if not bool(torch.isfinite(found).all()):
        raise FormatError(f"tensor {name}", "a block's scale or minimum is NaN or infinite", "the file is damaged: fetch it again")
    return found


def pack_blocks(weight: QuantizedTensor, kind: str) -> Tensor:
    """Inverse of :func:`unpack_blocks`."""
    n = weight.shape[0]
    assert weight.scales is not None  # integer schemes have scales
    heads = [weight.scales] if weight.mins is None else [weight.scales, weight.mins]
    parts = [head.contiguous().unsqueeze(-1).view(torch.uint8) for head in heads]
    if kind == "Q8_0":
        parts.append(weight.values.view(torch.uint8).view(n, -1, BLOCK))
    else:
        pairs = (weight.values ^ 0x88 if kind == "Q4_0" else weight.values).view(n, -1, 16)
        codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
        parts.append(codes[..., :16] | (codes[..., 16:] << 4))
    return torch.cat(parts, dim=-1).view(n, -1)
