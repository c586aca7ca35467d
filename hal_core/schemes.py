"""What a checkpoint says of its numbers: weight and activation schemes, as values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from hal_core.errors import ValueDecodeError

__all__ = ["DTYPES", "FLOAT_DTYPES", "ActivationScheme", "Granularity", "GranularityKind", "WeightScheme", "ZeroKind"]

#: Bits of one stored element.
DTYPES: dict[str, int] = {
    "int2": 2, "int3": 3, "int4": 4, "int5": 5, "int6": 6, "int7": 7, "int8": 8,
    "fp8_e4m3": 8, "fp8_e4m3fnuz": 8, "fp8_e5m2": 8, "mxfp4": 4, "mxfp8": 8, "nvfp4": 4, "iq4_nl": 4,
    "bf16": 16, "fp16": 16, "fp32": 32,
}  # fmt: skip
FLOAT_DTYPES = ("bf16", "fp16", "fp32")


class GranularityKind(str, Enum):
    """Over which elements one scale holds."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    TOKEN = "token"
    GROUP = "group"
    BLOCK = "block"
    SUPERBLOCK = "superblock"


@dataclass(frozen=True)
class Granularity:
    """``group`` counts elements along K; ``block`` is (rows of N, columns of K).

    superblock: elements along K that share one float scale, when each group in it has a small integer factor of its own.
    """

    kind: GranularityKind
    group: int | None = None
    block: tuple[int, int] | None = None
    superblock: int | None = None

    def __post_init__(self) -> None:
        if (self.kind in (GranularityKind.GROUP, GranularityKind.SUPERBLOCK)) != (self.group is not None):
            fix = "group goes with kinds 'group' and 'superblock' only"
            raise ValueDecodeError(f"granularity {self.kind.value}", f"group is {self.group}", fix)
        if (self.kind is GranularityKind.BLOCK) != (self.block is not None):
            raise ValueDecodeError(f"granularity {self.kind.value}", f"block is {self.block}", "block goes with kind 'block' only")
        if (self.kind is GranularityKind.SUPERBLOCK) != (self.superblock is not None):
            fix = "superblock goes with kind 'superblock' only"
            raise ValueDecodeError(f"granularity {self.kind.value}", f"superblock is {self.superblock}", fix)
        sizes = (*(size for size in (self.group, self.superblock) if size is not None), *(self.block or ()))
        if not all(1 <= size < 1 << 31 for size in sizes):
            raise ValueDecodeError(f"granularity {self}", f"sizes must be between 1 and {(1 << 31) - 1}")
        if self.group is not None and self.superblock is not None and self.superblock % self.group:
            raise ValueDecodeError(f"granularity {self}", "a superblock holds whole groups", "give a multiple of the group size")

    @classmethod
    def tensor(cls) -> Granularity:
        return cls(GranularityKind.TENSOR)

    @classmethod
    def channel(cls) -> Granularity:
        return cls(GranularityKind.CHANNEL)

    @classmethod
    def token(cls) -> Granularity:
        return cls(GranularityKind.TOKEN)

    @classmethod
    def groups(cls, size: int) -> Granularity:
        return cls(GranularityKind.GROUP, group=size)

    @classmethod
    def blocks(cls, n: int, k: int) -> Granularity:
        return cls(GranularityKind.BLOCK, block=(n, k))

    @classmethod
    def superblocks(cls, group: int, size: int) -> Granularity:
        return cls(GranularityKind.SUPERBLOCK, group=group, superblock=size)

    def __str__(self) -> str:
        if self.group is not None:
            return f"g{self.group}" if self.superblock is None else f"g{self.group}/{self.superblock}"
        if self.block is not None:
            return f"b{self.block[0]}x{self.block[1]}"
        return self.kind.value

    @classmethod
    def parse(cls, text: str) -> Granularity:
        """Inverse of ``str``: ``tensor``, ``channel``, ``token``, ``g128``, ``b128x128``, ``g32/256``."""
        if text in ("tensor", "channel", "token"):
            return cls(GranularityKind(text))
        # Written as str() writes it: no sign, no leading zero, digits that int() surely takes.
        size = "([1-9][0-9]{0,9})"
        if found := re.fullmatch(f"g{size}", text):
            return cls.groups(int(found[1]))
        if found := re.fullmatch(f"g{size}/{size}", text):
            return cls.superblocks(int(found[1]), int(found[2]))
        if found := re.fullmatch(f"b{size}x{size}", text):
            return cls.blocks(int(found[1]), int(found[2]))
        raise ValueDecodeError(f"granularity {text!r}", "not understood", "use tensor, channel, token, g128, b128x128 or g32/256")


class ZeroKind(str, Enum):
    """How the zero of the code is shifted: not at all, by an integer code, or by a float minimum."""

    NONE = "none"
    INTEGER = "integer"
    MINIMUM = "minimum"


@dataclass(frozen=True)
class WeightScheme:
    """How a weight is stored. ``w = (q - zero) * scale``, or ``w = q * scale + min``; float dtypes have neither.

    ``iq4_nl`` codes index a table of 16 integers. With superblocks, scale and minimum are each a float times an integer.
    """

    dtype: str
    granularity: Granularity = Granularity(GranularityKind.CHANNEL)
    zero: ZeroKind = ZeroKind.NONE
    act_order: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueDecodeError(f"weight dtype {self.dtype!r}", "unknown", f"known: {', '.join(DTYPES)}")
        plain = self.granularity.kind is GranularityKind.CHANNEL and self.zero is ZeroKind.NONE and not self.act_order
        if not self.quantized and not plain:
            raise ValueDecodeError(f"weight dtype {self.dtype}", "given a granularity, zero or act-order", "an unquantized weight has none")
        if self.granularity.kind is GranularityKind.TOKEN:
            raise ValueDecodeError("weight granularity 'token'", "weights have no tokens", "use tensor, channel, g128 or b128x128")
        levels = self.granularity.kind is GranularityKind.SUPERBLOCK
        if levels and (self.zero is ZeroKind.INTEGER or not self.dtype.startswith(("int", "iq"))):
            raise ValueDecodeError(f"superblocks of {self.dtype}", f"zero {self.zero.value}", "they hold integers without zero points")
        if self.act_order and self.granularity.kind is not GranularityKind.GROUP:
            raise ValueDecodeError(f"weight act-order with granularity {self.granularity}", "it orders groups", "give a group size")

    @property
    def bits(self) -> int:
        """Bits of one element, scales not counted."""
        return DTYPES[self.dtype]

    @property
    def quantized(self) -> bool:
        return self.dtype not in FLOAT_DTYPES

    def __str__(self) -> str:
        if not self.quantized:
            return self.dtype
        zero = {ZeroKind.NONE: "", ZeroKind.INTEGER: ":zero", ZeroKind.MINIMUM: ":min"}[self.zero]
        return f"{self.dtype}:{self.granularity}{zero}{':act_order' if self.act_order else ''}"

    @classmethod
    def parse(cls, text: str) -> WeightScheme:
        """Inverse of ``str``, e.g. ``int4:g128``, ``int4:g32:zero``, ``int8:channel``, ``bf16``."""
        if not isinstance(text, str):
            raise ValueDecodeError(f"weight scheme of type {type(text).__name__}", "not a text", "give one such as int4:g128")
        dtype, *rest = text.split(":")
        act_order = rest[-1:] == ["act_order"]
        rest = rest[: len(rest) - act_order]
        zero = {"zero": ZeroKind.INTEGER, "min": ZeroKind.MINIMUM}.get(rest[-1], ZeroKind.NONE) if rest else ZeroKind.NONE
        rest = rest[: len(rest) - (zero is not ZeroKind.NONE)]
        if len(rest) > 1:
            raise ValueDecodeError(f"weight scheme {text!r}", "too many parts", "use dtype:granularity[:zero|:min][:act_order]")
        return cls(dtype, Granularity.parse(rest[0]) if rest else Granularity.channel(), zero, act_order)


@dataclass(frozen=True)
class ActivationScheme:
    """What the *checkpoint* says of activations. Static scales and zero points travel with the weights."""

    dtype: str
    granularity: Granularity
    dynamic: bool = True
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueDecodeError(f"activation dtype {self.dtype!r}", "unknown", f"known: {', '.join(DTYPES)}")

    def __str__(self) -> str:
        tail = ("" if self.dynamic else ":static") + ("" if self.symmetric else ":asym")
        return f"{self.dtype}:{self.granularity}{tail}"
