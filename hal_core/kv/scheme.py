"""How a key or a value vector is stored in a cache, as a value with a short text form."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from hal_core.errors import ValueDecodeError

__all__ = ["KV_GROUP", "KV_KINDS", "KV_SCHEMES", "KVScheme", "parse_pair", "positive"]

#: Tokens that share one scale per channel.
KV_GROUP = 32
#: Kinds of storage, each with its granularities (of the scales); the first is what the bare word means.
KV_KINDS: dict[str, tuple[str, ...]] = {
    "bf16": ("none",), "fp16": ("none",), "fp32": ("none",), "fp8": ("tensor", "head"),
    "int8": ("channel", "token"), "int4": ("channel", "token"), "turboquant": ("vector",),
}  # fmt: skip
_BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "fp8": 8, "int8": 8, "int4": 4}
#: Fewest channels with a rotation and a codebook of their own.
_LEAST_SECTION = 4
_VARIANTS = ("", "raw", "unbiased")
_KNOWN = "bf16, fp16, fp32, fp8, fp8:head, int8, int8:token, int4, int4:token, turboquant:BITS, turboquant:BITS:raw or :unbiased"
_NUMBER = r"[0-9]{1,2}(?:\.[0-9]{1,4})?"


@dataclass(frozen=True)
class KVScheme:
    """Storage of one side of a cache.

    fp8: e4m3 with static scales, one a tensor or one a head. int8, int4 per ``channel``: one scale a channel (int4: and a
    minimum) over groups of 32 tokens, the newest tokens unquantized until their group is full; per ``token``: one scale a
    vector (int4: and a minimum). turboquant: a norm, and the rotated unit vector's coordinates as Lloyd-Max codes.

    kind: a key of :data:`KV_KINDS`. granularity: None for the kind's first.
    bits: turboquant only: mean bits of a coordinate, a multiple of a quarter from 1 to 8. Between whole numbers the channels are
        split in two parts, the first of them one bit finer: 2.5 is half the channels at 3 and half at 2 bits.
    variant: turboquant only: ``""`` with norm correction, ``"raw"`` without, ``"unbiased"`` for one bit less and the signs of
        the projected residual (unbiased inner products).
    """

    kind: str
    granularity: str | None = None
    bits: float | None = None
    variant: str = ""

    def __post_init__(self) -> None:
        if _text(self.kind) not in KV_KINDS:
            raise ValueDecodeError(f"KV scheme {self.kind!r}", "unknown", f"use one of {_KNOWN}")
        if self.granularity is None:
            object.__setattr__(self, "granularity", KV_KINDS[self.kind][0])
        elif self.granularity not in KV_KINDS[self.kind]:
            fix = f"{self.kind} takes {', '.join(KV_KINDS[self.kind])}"
            raise ValueDecodeError(f"KV scheme {self.kind}", f"scales per {self.granularity!r}", fix)
        if self.variant not in _VARIANTS or (self.variant and self.kind != "turboquant"):
            raise ValueDecodeError(f"KV scheme {self.kind}", f"variant {self.variant!r}", "raw and unbiased are variants of turboquant")
        if (self.bits is not None) != (self.kind == "turboquant"):
            raise ValueDecodeError(f"KV scheme {self.kind}", f"bits {self.bits}", "turboquant takes bits, the others do not")
        if self.bits is not None:
            self._check_bits(self.bits)

    def _check_bits(self, bits: float) -> None:
        if not positive(bits) or not 1 <= bits <= 8 or bits * 4 != int(bits * 4):
            raise ValueDecodeError("KV scheme turboquant", f"{bits!r:.40} bits", "give 1 to 8 in steps of a quarter")
        if self.variant == "unbiased" and bits != int(bits):
            raise ValueDecodeError("KV scheme turboquant", f"{bits} bits, unbiased", "the unbiased variant takes whole bits")
        object.__setattr__(self, "bits", float(bits))

    @property
    def quantized(self) -> bool:
        return self.granularity != "none"

    @property
    def grouped(self) -> bool:
        """Whether scales hold over groups of tokens, so that the newest tokens wait in a sequence's tail."""
        return self.granularity == "channel"

    @property
    def scaled(self) -> bool:
        """Whether static scales are needed, which are measured beforehand or come with the checkpoint."""
        return self.kind == "fp8"

    @property
    def element_bits(self) -> float:
        """Bits of a coordinate, metadata not counted."""
        return self.bits if self.bits is not None else float(_BITS[self.kind])

    def sections(self, dim: int) -> tuple[tuple[int, int], ...]:
        """turboquant: parts of a vector of ``dim`` channels as (channels, bits of a code), finest first.

        The unbiased variant spends one of its bits on the residual, so its codes have one less, and may have none.
        """
        if self.bits is None:
            raise ValueDecodeError(f"KV scheme {self}", "has no sections", "only turboquant splits channels")
        if dim < _LEAST_SECTION:
            raise ValueDecodeError(f"KV scheme {self} of {dim} channels", "too few to rotate", f"give {_LEAST_SECTION} or more")
        low = int(self.bits)
        if self.variant == "unbiased":
            return ((dim, low - 1),)
        if low == self.bits:
            return ((dim, low),)
        fine = dim * (self.bits - low)
        if fine != int(fine):
            raise ValueDecodeError(f"KV scheme {self} of {dim} channels", f"{fine:g} channels at {low + 1} bits", "use whole bits")
        if min(fine, dim - fine) < _LEAST_SECTION:
            found = f"a part of {min(fine, dim - fine):g} channels"
            raise ValueDecodeError(f"KV scheme {self} of {dim} channels", found, f"parts have {_LEAST_SECTION} channels or more")
        return ((int(fine), low + 1), (dim - int(fine), low))

    def vector_bytes(self, dim: int) -> float:
        """Bytes of one stored vector of ``dim`` channels with its share of the scales; static scales are not counted."""
        if self.kind == "turboquant":
            codes = sum(-(-channels * bits // 8) for channels, bits in self.sections(dim))
            return codes + (-(-dim // 8) + 4 if self.variant == "unbiased" else 2 * len(self.sections(dim)))
        codes = -(-dim * _BITS[self.kind] // 8)
        each = {"int8": 2, "int4": 4}.get(self.kind, 0)
        return codes + (each * dim / KV_GROUP if self.grouped else each)

    def for_values(self) -> KVScheme:
        """The scheme that the same word means for values: integers per token instead of per channel."""
        return replace(self, granularity="token") if self.grouped else self

    def __str__(self) -> str:
        if self.bits is not None:
            return f"turboquant:{self.bits:g}{':' if self.variant else ''}{self.variant}"
        return self.kind if self.granularity == KV_KINDS[self.kind][0] else f"{self.kind}:{self.granularity}"

    @classmethod
    def parse(cls, text: str) -> KVScheme:
        """Inverse of ``str``: ``bf16``, ``fp8:head``, ``int8``, ``int4:token``, ``turboquant:4``, ``turboquant:3:unbiased``.

        Raises:
            ValueDecodeError: not such a text.
        """
        kind, *rest = _text(text).split(":")
        if kind == "turboquant" and 1 <= len(rest) <= 2 and re.fullmatch(_NUMBER, rest[0]) and rest[1:] != [""]:
            return cls(kind, bits=float(rest[0]), variant=rest[1] if rest[1:] else "")
        if kind == "turboquant" or kind not in KV_KINDS or len(rest) > 1:
            raise ValueDecodeError(f"KV scheme {text[:60]!r}", "not understood", f"use one of {_KNOWN}")
        return cls(kind, rest[0] if rest else None)

    @staticmethod
    def pair(text: str) -> tuple[KVScheme, KVScheme]:
        """Schemes of keys and values from one text; see :func:`parse_pair`."""
        return parse_pair(text)


def positive(value: object) -> bool:
    """Whether this is a positive, finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise ValueDecodeError(f"KV scheme of type {type(given).__name__}", "not a text", f"use one of {_KNOWN}")
    return given


def parse_pair(text: str) -> tuple[KVScheme, KVScheme]:
    """Schemes of keys and values: one for both (``turboquant:4``), ``k4v3`` for turboquant bits, or ``k=int8,v=turboquant:4``.

    Integers are per channel for keys and per token for values.

    Raises:
        ValueDecodeError: not such a text.
    """
    text = _text(text).strip()
    if found := re.fullmatch(f"k({_NUMBER})v({_NUMBER})", text):
        return KVScheme("turboquant", bits=float(found[1])), KVScheme("turboquant", bits=float(found[2]))
    if "=" not in text:
        scheme = KVScheme.parse(text)
        return scheme, scheme.for_values()
    sides = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
    if set(sides) != {"k", "v"} or len(text.split(",")) != 2:
        raise ValueDecodeError(f"KV schemes {text[:60]!r}", "not understood", "use SCHEME, k4v3 or k=SCHEME,v=SCHEME")
    return KVScheme.parse(sides["k"]), KVScheme.parse(sides["v"]).for_values()


#: One scheme of every form, for tests, documentation and the validation of what kernels declare.
KV_SCHEMES: tuple[KVScheme, ...] = tuple(
    KVScheme.parse(text)
    for text in (
        "bf16", "fp16", "fp32", "fp8", "fp8:head", "int8", "int8:token", "int4", "int4:token",
        *(f"turboquant:{bits}{variant}" for bits in (1, 2, 3, 4, 5, 6, 7, 8) for variant in ("", ":raw", ":unbiased")),
        *(f"turboquant:{low + part:g}{raw}" for low in range(1, 8) for part in (0.25, 0.5, 0.75) for raw in ("", ":raw")),
    )
)  # fmt: skip
