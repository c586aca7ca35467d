"""What an asker tolerates and what a kernel does, in the same words; a mismatch is a refusal, never a silent change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.errors import ValueDecodeError
from hal_core.refusal import Refusal
from hal_core.schemes import ActivationScheme, Granularity

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ActivationQuant", "Numerics", "combined", "numerics_from_word", "outside"]

#: Significand bits including the hidden one: the coarseness of rounding an operand or a sum.
_SIGNIFICAND = {"fp32": 24, "tf32": 11, "fp16": 11, "bf16": 8}
#: An fp16 operand in bf16 loses digits, a bf16 operand in fp16 loses range: neither contains the other.
_CONTAINS = {"fp32": ("fp32", "tf32", "fp16", "bf16"), "tf32": ("tf32", "fp16", "bf16"), "fp16": ("fp16",), "bf16": ("bf16",)}


@dataclass(frozen=True, order=True)
class ActivationQuant:
    """One way of quantizing activations: an element dtype and over what one scale holds (``str`` of a Granularity).

    dynamic: scales are found in the call. symmetric: there is no zero point.
    """

    dtype: str
    granularity: str
    dynamic: bool = True
    symmetric: bool = True

    @classmethod
    def of(cls, scheme: ActivationScheme) -> ActivationQuant:
        """What a checkpoint's scheme says."""
        return cls(scheme.dtype, str(scheme.granularity), scheme.dynamic, scheme.symmetric)

    def __post_init__(self) -> None:
        Granularity.parse(self.granularity)

    def __str__(self) -> str:
        return f"{self.dtype}:{self.granularity}" + ("" if self.dynamic else ":static") + ("" if self.symmetric else ":asym")


@dataclass(frozen=True)
class Numerics:
    """As a request: what is tolerated. As a kernel's declaration: what it does, at every batch size.

    activations: ways of quantizing activations; empty means exact.
    weights: ``"as_stored"``, or ``"rescaled"`` when group scales may be folded into coarser ones.
    operand: coarsest rounding of an unquantized operand (``"fp32"``, ``"bf16"``, ...); ``"own"`` is the operand's own dtype.
    accumulation: type of the running sum.
    deterministic: two runs give the same bits.
    batch_invariant: a row's result does not depend on the other rows.
    """

    activations: tuple[ActivationQuant, ...] = ()
    weights: str = "as_stored"
    operand: str = "own"
    accumulation: str = "fp32"
    deterministic: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if tuple(sorted(set(self.activations))) != self.activations:
            raise ValueDecodeError("numerics.activations", "not sorted and unique", "sort them, so that equal sets are equal values")
        if self.weights not in ("as_stored", "rescaled"):
            raise ValueDecodeError(f"numerics.weights {self.weights!r}", "unknown", "use as_stored or rescaled")
        if self.operand != "own" and self.operand not in _SIGNIFICAND:
            raise ValueDecodeError(f"numerics.operand {self.operand!r}", "unknown", f"use own or one of {', '.join(_SIGNIFICAND)}")
        if self.accumulation not in _SIGNIFICAND:
            raise ValueDecodeError(f"numerics.accumulation {self.accumulation!r}", "unknown", f"use one of {', '.join(_SIGNIFICAND)}")

    @property
    def exact(self) -> bool:
        return not self.activations

    def __str__(self) -> str:
        parts = ["+".join(str(a) for a in self.activations) or "exact"]
        if self.weights != "as_stored":
            parts.append(self.weights)
        if self.operand != "own":
            parts.append(f"operand={self.operand}")
        if self.accumulation != "fp32":
            parts.append(f"accumulate={self.accumulation}")
        parts += ["deterministic"] * self.deterministic + ["batch-invariant"] * self.batch_invariant
        return ",".join(parts)


def outside(request: Numerics, does: Numerics, dtype: str) -> tuple[Refusal, ...]:
    """Every way in which a kernel that ``does`` this is outside ``request``, for activations of ``dtype``."""
    refusals = []
    extra = [a for a in does.activations if a not in request.activations]
    if extra:
        asked = ", ".join(map(str, request.activations)) or "exact activations"
        found = "activations quantized to " + ", ".join(map(str, extra))
        fix = "tolerate it with --numerics int8 (or the like), or use another kernel"
        refusals.append(Refusal("numerics.activations", asked, found, fix))
    if does.weights == "rescaled" and request.weights != "rescaled":
        refusals.append(Refusal("numerics.weights", "weights as stored", "weights rescaled", "tolerate it with --numerics int8:rescaled"))
    operand = dtype if does.operand == "own" else does.operand
    tolerated = {dtype} if request.operand == "own" else {dtype, request.operand}
    allowed = tuple(t for t in _SIGNIFICAND if tolerated & set(_CONTAINS[t]))
    if operand not in allowed:
        refusals.append(
            Refusal("numerics.operand", f"operands no coarser than {request.operand if request.operand != 'own' else dtype}",
                    f"operands rounded to {operand}", f"give {operand} activations, or tolerate operand={operand}")
        )  # fmt: skip
    if _SIGNIFICAND[does.accumulation] < _SIGNIFICAND[request.accumulation]:
        refusals.append(
            Refusal("numerics.accumulation", f"{request.accumulation} sums", f"{does.accumulation} sums", "ask for a narrower accumulation")
        )
    if request.deterministic and not does.deterministic:
        refusals.append(Refusal("numerics.deterministic", "run-to-run equal results", "no such promise", "drop deterministic"))
    if request.batch_invariant and not does.batch_invariant:
        refusals.append(Refusal("numerics.batch_invariant", "batch-invariant results", "no such promise", "drop batch_invariant"))
    return tuple(refusals)


def combined(parts: Sequence[Numerics]) -> Numerics:
    """What is done where different kernels serve different batch sizes: the loosest of each; never batch-invariant together."""
    if len(parts) == 1:
        return parts[0]
    operands = {part.operand for part in parts}
    coarsest = min(operands - {"own"}, key=lambda name: _SIGNIFICAND[name], default="own")
    return Numerics(
        activations=tuple(sorted({a for part in parts for a in part.activations})),
        weights="rescaled" if any(part.weights == "rescaled" for part in parts) else "as_stored",
        operand=coarsest,
        accumulation=min((part.accumulation for part in parts), key=lambda name: _SIGNIFICAND[name]),
        deterministic=all(part.deterministic for part in parts),
        batch_invariant=False,
    )


_INT8 = (ActivationQuant("int8", "token"),)
_WORDS: dict[str, Numerics] = {
    "exact": Numerics(),
    "bf16": Numerics(operand="bf16"),
    "int8": Numerics(activations=_INT8),
    "int8:token": Numerics(activations=_INT8),
    "int8:group": Numerics(activations=_INT8),
    "int8:rescaled": Numerics(activations=_INT8, weights="rescaled"),
    "fp8": Numerics(activations=(ActivationQuant("fp8_e4m3", "token"),)),
}


def numerics_from_word(word: str, checkpoint: ActivationScheme | None = None, group: int | None = None) -> Numerics:
    """The request that a word of the command line stands for.

    Args:
        word: ``exact``, ``bf16`` (operands rounded to it), ``checkpoint``,
            ``int8``, ``int8:token``, ``int8:group``, ``int8:rescaled``, ``fp8``.
        checkpoint: the checkpoint's own activation scheme, used by ``checkpoint``.
        group: weight group size; ``int8`` also tolerates finer activation groups of 128 and of this size, ``int8:group`` these alone.
    """
    if word == "checkpoint":
        if checkpoint is None:
            return _WORDS["exact"]
        return Numerics(activations=(ActivationQuant.of(checkpoint),))
    if word not in _WORDS:
        raise ValueDecodeError(f"numerics {word!r}", "unknown", f"use checkpoint, {', '.join(_WORDS)}")
    request = _WORDS[word]
    if request.exact or word == "int8:token":
        return request
    dtype = request.activations[0].dtype
    if word == "int8:group":
        request = Numerics()
    finer = {ActivationQuant(dtype, f"g{size}") for size in (128, group) if size}
    return Numerics(activations=tuple(sorted({*request.activations, *finer})), weights=request.weights)
