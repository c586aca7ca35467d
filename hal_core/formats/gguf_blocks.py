"""GGUF's quantized types to canonical tensors and back; codes keep their width and their scales.

A type is a sequence of blocks along K, each with its own scales. Blocks of 32 are here, superblocks of 256 in
``gguf_superblocks``. In the 4-bit types byte ``i`` of a block's codes holds elements ``i`` (low nibble) and ``i + 16``; in the
5-bit ones a word of 32 bits has the fifth bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.canonical import QuantizedTensor
from hal_core.errors import FormatError
from hal_core.fields import split_last
from hal_core.formats.gguf_bits import Parts, from_planes, halves, nibble_halves, nibble_pairs, planes, raw
from hal_core.formats.gguf_superblocks import SUPERBLOCK_TYPES
from hal_core.schemes import WeightScheme

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["FLOATS", "QUANTIZED", "SERVED", "block_scheme", "block_size", "pack_blocks", "unpack_blocks"]

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WORDS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


def _unpack_4(blocks: Tensor, kind: str) -> Parts:
    values = nibble_pairs(blocks[..., -16:], 16)
    if kind == "MXFP4":
        return {"values": values, "scales": blocks[..., :1].contiguous()}
    if kind == "Q4_0":
        values.bitwise_xor_(0x88)
    mins = {"mins": halves(blocks, 2)} if kind == "Q4_1" else {}
    return {"values": values, "scales": halves(blocks, 0), **mins}


def _pack_4(parts: Parts, kind: str) -> list[Tensor]:
    values = parts["values"] ^ 0x88 if kind == "Q4_0" else parts["values"]
    heads = [raw(parts[name]) for name in ("scales", "mins") if name in parts]
    return [*heads, nibble_halves(values, 16)]


def _unpack_5(blocks: Tensor, kind: str) -> Parts:
    fifth = planes(blocks[..., -20:-16].unsqueeze(-1), 1, 1).flatten(-2)
    codes = planes(blocks[..., -16:], 16, 4) | (fifth << 4)
    if kind == "Q5_0":
        return {"values": codes.view(torch.int8).sub_(16), "scales": halves(blocks, 0)}
    return {"values": codes, "scales": halves(blocks, 0), "mins": halves(blocks, 2)}


def _pack_5(parts: Parts, kind: str) -> list[Tensor]:
    codes = (parts["values"] + 16).view(torch.uint8) if kind == "Q5_0" else parts["values"]
    heads = [raw(parts[name]) for name in ("scales", "mins") if name in parts]
    fifth = from_planes(split_last(codes >> 4, 4, 8), 1, 1).flatten(-2)
    return [*heads, fifth, from_planes(codes & 15, 16, 4)]


def _unpack_8(blocks: Tensor, kind: str) -> Parts:
    return {"values": blocks[..., 2:].contiguous().view(torch.int8), "scales": halves(blocks, 0)}


def _pack_8(parts: Parts, kind: str) -> list[Tensor]:
    return [raw(parts["scales"]), parts["values"].view(torch.uint8)]


_Codec = tuple[str, int, int, "Callable[[Tensor, str], Parts]", "Callable[[Parts, str], list[Tensor]]"]
#: Type: canonical scheme, elements and bytes of a block, and the two directions.
_TYPES: dict[str, _Codec] = {
    "Q4_0": ("int4:g32", 32, 18, _unpack_4, _pack_4),
    "Q4_1": ("int4:g32:min", 32, 20, _unpack_4, _pack_4),
    "Q5_0": ("int5:g32", 32, 22, _unpack_5, _pack_5),
    "Q5_1": ("int5:g32:min", 32, 24, _unpack_5, _pack_5),
    "Q8_0": ("int8:g32", 32, 34, _unpack_8, _pack_8),
    "IQ4_NL": ("iq4_nl:g32", 32, 18, _unpack_4, _pack_4),
    "MXFP4": ("mxfp4:g32", 32, 17, _unpack_4, _pack_4),
    **SUPERBLOCK_TYPES,
}
QUANTIZED = tuple(_TYPES)
#: Types that are read; the others are refused by name.
SERVED = (*FLOATS, *QUANTIZED)


def block_scheme(kind: str) -> WeightScheme:
    """Canonical scheme of a GGUF type."""
    return WeightScheme(_WORDS[kind]) if kind in _WORDS else WeightScheme.parse(_TYPES[kind][0])


def block_size(kind: str) -> int:
    """Elements of one block of a quantized type."""
    return _TYPES[kind][1]


def unpack_blocks(data: Tensor, kind: str, shape: tuple[int, int], name: str) -> QuantizedTensor:
    """uint8 ``[N, G * block bytes]`` to a canonical ``[N, K]``.

    Raises:
        FormatError: a scale or minimum is NaN or infinite; ``name`` is the tensor's.
    """
    n, k = shape
    _, size, nbytes, unpack, _ = _TYPES[kind]
    parts = {field: tensor.reshape(n, -1) for field, tensor in unpack(data.view(n, k // size, nbytes), kind).items()}
    for field in ("scales", "mins"):
        found = parts.get(field)
        # scales in bytes are E8M0, where 255 is NaN
        if found is not None and not bool((torch.isfinite(found) if found.is_floating_point() else found != 255).all()):
            raise FormatError(f"tensor {name}", "a block's scale or minimum is NaN or infinite", "the file is damaged: fetch it again")
    return QuantizedTensor(block_scheme(kind), shape, **parts)


def pack_blocks(weight: QuantizedTensor, kind: str) -> Tensor:
    """Inverse of :func:`unpack_blocks`."""
    n, k = weight.shape
    _, size, _, _, pack = _TYPES[kind]
    parts = {field: tensor.reshape(n, k // size, -1) for field, tensor in weight.tensors().items()}
    return torch.cat(pack(parts, kind), dim=-1).view(n, -1)
