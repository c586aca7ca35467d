"""What the kernels take of an op's weights, as values that also cross a registered torch op: lists of tensors and of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hal_backend_xpu.layout import FLOATS
from hal_core.op_parts import MatrixView
from hal_core.spec import ACTIVATIONS

if TYPE_CHECKING:
    from torch import Tensor

    from hal_backend_xpu.layout import WordMatrix

__all__ = ["ACTIVATION_NUMBERS", "NO_GATE", "Block", "Int4View"]

#: As csrc/kernels/common.hpp numbers them; 0 is a plain product.
ACTIVATION_NUMBERS = {"none": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "swiglu_oai": 4, "relu2": 5}
assert set(ACTIVATIONS) <= set(ACTIVATION_NUMBERS)


@dataclass(frozen=True, eq=False)
class Int4View(MatrixView):
    """One packed matrix of every expert. perm: of a single matrix."""

    @classmethod
    def of(cls, matrix: WordMatrix, bias: Tensor | None) -> Int4View:
        own = matrix._buffers
        codes, scales = own["codes"], own["scales"]
        assert codes is not None
        assert scales is not None
        return cls(codes, scales, own["zeros"], own["mins"], own["perm"], bias, matrix.n, matrix.k, matrix.group)

    @property
    def tensors(self) -> list[Tensor | None]:
        return [self.codes, self.scales, self.zeros, self.mins, self.perm, self.bias]

    @property
    def numbers(self) -> list[int]:
        return [self.n, self.k, self.group]

    def arguments(self) -> tuple[Any, ...]:
        """As kernels take a matrix: codes, scales, zeros, minima, type of the scales, bias."""
        return self.codes, self.scales, self.zeros, self.mins, FLOATS[self.scales.dtype], self.bias


#: In the place of a gate that is not there.
NO_GATE: tuple[Any, ...] = (None, None, None, None, 0, None)


@dataclass(frozen=True, eq=False)
class Block:
    """A block of experts. activation: its number. limit: infinity for none. rescaled: long inputs by int8 weights of one scale a row."""

    up: Int4View
    down: Int4View
    gate: Int4View | None
    activation: int
    alpha: float
    limit: float
    num_experts: int
    local: int
    scaling: float
    router_on_input: bool
    rescaled: bool

    @property
    def matrices(self) -> tuple[Int4View, ...]:
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """What int8 weights are made from."""
        held = (tensor for m in self.matrices for tensor in (m.codes, m.scales, m.zeros))
        return tuple(tensor for tensor in held if tensor is not None)

    @property
    def gate_arguments(self) -> tuple[Any, ...]:
        return NO_GATE if self.gate is None else self.gate.arguments()
