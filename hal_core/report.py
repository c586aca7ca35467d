"""What a loaded model is made of: the selection of every op, and its bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal_core.selection import Selection

__all__ = ["LoadReport", "OpReport"]


@dataclass(frozen=True)
class OpReport:
    """One op of a model: where it is, which kernel serves it, bytes of its packed tensors, and what was done to its weights."""

    module: str
    selection: Selection
    nbytes: int
    notes: tuple[str, ...] = ()

    @property
    def kernel(self) -> str:
        return self.selection.kernel


@dataclass(frozen=True)
class LoadReport:
    """``model.hal`` of a loaded model.

    Bytes are those held in memory after loading; notes: parts of the checkpoint that are not used; layers: which decoder layers run in one
    call each, and why others do not.
    """

    path: str
    format: str
    dtype: str
    numerics: str
    policy: str
    ops: tuple[OpReport, ...]
    packed_bytes: int
    unquantized_bytes: int
    notes: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    @property
    def computed(self) -> tuple[str, ...]:
        """What the kernels do, each way once; ``numerics`` is what was asked for."""
        return tuple(sorted({str(op.selection.numerics) for op in self.ops}))

    def kernels(self) -> dict[str, int]:
        """Number of ops by kernel name."""
        return dict(Counter(op.kernel for op in self.ops))

    def __str__(self) -> str:
        used = ", ".join(f"{name} x{count}" for name, count in self.kernels().items()) or "none (nothing is quantized)"
        size = f"{self.packed_bytes / 1e6:.1f} MB packed, {self.unquantized_bytes / 1e6:.1f} MB unquantized"
        computed = " and ".join(self.computed) or "nothing quantized"
        asked = f"{self.dtype}, numerics {self.numerics} (computed: {computed}), policy {self.policy}"
        return "; ".join((f"{self.format} {self.path}: {used}", size, asked, *self.notes))
