"""Packed integer codes to the floats that matrix units multiply, without shuffles and without conversion instructions.

A word holds its codes in pairs: one code of a pair lies in the low half, its neighbour along K in the high half, at the same bit. One
shift and one mask therefore give two neighbours at once, already where a pair of 16-bit floats has its mantissas, and an exponent
laid over them makes both numbers: ``0x4300`` is 128 in bfloat16, whose last place then counts ones, and ``0x6400`` is 1024 in
float16. What was added so is subtracted exactly afterwards.
"""

import triton
import triton.language as tl

__all__ = ["centred", "unpacked"]


@triton.jit
def _halves(pairs, FLOAT: tl.constexpr):
    """Bits of pairs, int32 ``[n, 16]``, to ``FLOAT [n, 32]``: the low halves are the even columns."""
    low = pairs.to(tl.int16).to(FLOAT, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(FLOAT, bitcast=True)
    return tl.reshape(tl.join(low, high), (pairs.shape[0], 2 * pairs.shape[1]))


@triton.jit
def _plane(words, J: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """Plane ``J``: int32 ``[n, 16]`` to ``FLOAT [n, 32]``; 4-bit codes come with 128 or 1024 added, 8-bit ones as they are."""
    codes = words >> (BITS * J)
    if BITS == 4:
        if FLOAT == tl.bfloat16:
            made = _halves((codes & 0x000F000F) | 0x43004300, FLOAT)
        else:
            made = _halves((codes & 0x000F000F) | 0x64006400, FLOAT)
    elif FLOAT == tl.bfloat16:
        # its mantissa has 7 bits: the weight of the sign becomes a number of its own, 128 or 256
        made = _halves((codes & 0x007F007F) | 0x43004300, FLOAT) - _halves((codes & 0x00800080) | 0x43004300, FLOAT)
    else:
        made = _halves((codes & 0x00FF00FF) ^ 0x64806480, FLOAT) - 1152.0
    return made.to(FLOAT)


@triton.jit
def _beside(left, right):
    """Two ``[n, k]`` to ``[n, 2 k]``, the second after the first; no element leaves its thread."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def unpacked(words, BITS: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, FLOAT: tl.constexpr):
    """``COUNT`` (1, 2 or 4) planes from ``FIRST`` on, side by side: int32 ``[n, 16]`` to ``FLOAT [n, 32 * COUNT]``."""
    if COUNT == 1:
        made = _plane(words, FIRST, BITS, FLOAT)
    elif COUNT == 2:
        made = _beside(_plane(words, FIRST, BITS, FLOAT), _plane(words, FIRST + 1, BITS, FLOAT))
    else:
        made = _beside(
            _beside(_plane(words, FIRST, BITS, FLOAT), _plane(words, FIRST + 1, BITS, FLOAT)),
            _beside(_plane(words, FIRST + 2, BITS, FLOAT), _plane(words, FIRST + 3, BITS, FLOAT)),
        )
    return made


@triton.jit
def centred(codes, zero, BITS: tl.constexpr, ZERO: tl.constexpr):
    """Codes of ``unpacked`` less their zero point, exact: ``zero [n]`` where ZERO is "integer", else the middle ("none") or 0.

    4-bit codes are stored as 0..15, 8-bit ones as the code less 128 (two's complement).
    """
    base: tl.constexpr = 128.0 if codes.dtype == tl.bfloat16 else 1024.0
    if ZERO == "integer":
        shift = zero.to(tl.float32) + (base if BITS == 4 else -128.0)
        made = codes - shift.to(codes.dtype)[:, None]
    elif ZERO == "minimum":
        made = codes - (base if BITS == 4 else -128.0)
    elif BITS == 4:
        made = codes - (base + 8.0)
    else:
        made = codes
    return made.to(codes.dtype)
