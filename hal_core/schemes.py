"""What a checkpoint says of its numbers: weight and activation schemes, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hal_core.errors import ValueDecodeError

__all__ = ["DTYPES", "FLOAT_DTYPES", "ActivationScheme", "Granularity", "GranularityKind", "WeightScheme", "ZeroKind"]

#: Bits of one stored element.
DTYPES: dict[str, int] = {
    "int2": 2, "int3": 3, "int4": 4, "int5": 5, "int6": 6, "int7": 7, "int8": 8,
    "fp8_e4m3": 8, "fp8_e5m2": 8, "mxfp4": 4, "mxfp8": 8, "nvfp4": 4,
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


@dataclass(frozen=True)
class Granularity:
    """``group`` counts elements along K; ``block`` is (rows of N, columns of K)."""

    kind: GranularityKind
    group: int | None = None
    block: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if (self.kind is GranularityKind.GROUP) != (self.group is not None):
            raise ValueDecodeError(f"granularity {self.kind.value}", f"group is {self.group}", "group goes with kind 'group' only")
        if (self.kind is GranularityKind.BLOCK) != (self.block is not None):
            raise ValueDecodeError(f"granularity {self.kind.value}", f"block is {self.block}", "block goes with kind 'block' only")
        if any(size < 1 for size in (self.group or 1, *(self.block or ()))) or self.group == 0:
            raise ValueDecodeError(f"granularity {self}", "sizes must be positive")

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

    def __str__(self) -> str:
        if self.group is not None:
            return f"g{self.group}"
        if self.block is not None:
            return f"b{self.block[0]}x{self.block[1]}"
        return self.kind.value

    @classmethod
    def parse(cls, text: str) -> Granularity:
        """Inverse of ``str``: ``tensor``, ``channel``, ``token``, ``g128``, ``b128x128``."""
        if text in ("tensor", "channel", "token"):
            return cls(GranularityKind(text))
        head, rest = text[:1], text[1:]
        try:
            if head == "g":
                return cls.groups(int(rest))
            if head == "b":
                rows, columns = rest.split("x")
                return cls.blocks(int(rows), int(columns))
        except ValueError:
            pass  # falls to the one error below, which shows the whole text
        raise ValueDecodeError(f"granularity {text!r}", "not understood", "use tensor, channel, token, g128 or b128x128")


class ZeroKind(str, Enum):
    """How the zero of the code is shifted: not at all, by an integer code, or by a float minimum."""

    NONE = "none"
    INTEGER = "integer"
    MINIMUM = "minimum"


@dataclass(frozen=True)
class WeightScheme:
    """How a weight is stored. ``w = (q - zero) * scale``, or ``w = q * scale + min``; float dtypes have neither."""

    dtype: str
    granularity: Granularity = Granularity(GranularityKind.CHANNEL)
    zero: ZeroKind = ZeroKind.NONE
    act_order: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueDecodeError(f"weight dtype {self.dtype!r}", "unknown", f"known: {', '.join(DTYPES)}")

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
        dtype, *rest = text.split(":")
        zero, act_order, granularity = ZeroKind.NONE, False, Granularity.channel()
        for part in rest:
            if part in ("zero", "min"):
                zero = ZeroKind.INTEGER if part == "zero" else ZeroKind.MINIMUM
            elif part == "act_order":
                act_order = True
            else:
                granularity = Granularity.parse(part)
        return cls(dtype, granularity, zero, act_order)


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
