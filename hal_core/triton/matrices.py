"""Weights as the kernels of products read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.op_parts import MatrixView
from hal_core.triton.layout import step_size

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.triton.layout import StepMatrix

__all__ = ["FloatMatrix", "IntegerMatrix"]


@dataclass(frozen=True, eq=False)
class IntegerMatrix(MatrixView):
    """Packed weights as ``integer_gemm`` reads them; group 0: one scale a row."""

    bits: int

    @classmethod
    def of(cls, matrix: StepMatrix, bias: Tensor | None) -> IntegerMatrix:
        own = matrix._buffers  # by attribute torch looks in three places
        return cls(
            own["codes"], own["scales"], own["zeros"], own["mins"], own["perm"], bias,  # type: ignore[arg-type]
            matrix.n, matrix.k, matrix.group if matrix.grouped else 0, matrix.scheme.bits,
        )  # fmt: skip

    @property
    def zero_kind(self) -> str:
        return "integer" if self.zeros is not None else "minimum" if self.mins is not None else "none"

    @property
    def shift(self) -> Tensor:
        """Zeros or minima; anything where there are none."""
        if self.zeros is not None:
            return self.zeros
        return self.scales if self.mins is None else self.mins

    @property
    def scale_group(self) -> int:
        """The kernel adds minima where scales are applied, so that one group of all of K stands for none."""
        step = step_size(self.bits)
        return -(-self.k // step) * step if self.mins is not None and not self.group else self.group


@dataclass(frozen=True, eq=False)
class FloatMatrix:
    """``weight [.., n, k]`` of bfloat16, float16 or e4m3; scales float32 by block or by row."""

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None
    block: tuple[int, int] | None = None

    @property
    def n(self) -> int:
        return int(self.weight.shape[-2])

    @property
    def k(self) -> int:
        return int(self.weight.shape[-1])
