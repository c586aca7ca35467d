"""How far a result is from the truth, and how far it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hal_core.kernel import MoEKernel
from hal_core.spec import MoESpec
from hal_core.testing.case import CheckFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hal_core.kernel import Kernel
    from hal_core.spec import Spec

__all__ = ["USUAL", "RoundedRuler", "Ruler", "allowed", "allowed_rounded", "quantized", "same_bits", "usual"]

#: Largest relative L2 error of a kernel that rounds to this type and is otherwise exact. Int8 activations of one scale a token
#: cost about 1e-2 where they have no outliers, and more where they have: a kernel that quantizes in silence is over each of these.
_EXACT = {"fp32": 3e-5, "tf32": 2e-3, "fp16": 2e-3, "bf16": 6e-3}
_COARSENESS = ("fp32", "tf32", "fp16", "bf16")
#: Of a row that the truth quantizes as the kernel does: a value near the middle of two codes may take either, and costs one step.
_ONE_STEP = 2e-2
#: e4m3 steps are up to an eighth of a value. Where the operand of a second product was rounded to bf16 before, one in thirty takes the
#: other of two neighbours.
_FP8_STEPS = 2.5e-2
#: A bound that allows for the worst of weights says little of what is usual: that is not more than this.
USUAL = 3e-2
#: So many rows have a middle that says something.
_MOST = 16
#: One row has fewer numbers to average over than the whole.
_ROW = 4.0


def allowed(kernel: Kernel[Any], spec: Spec) -> float:
    """The kernel's own bound; for one that claims to be exact, no more than rounding explains."""
    n = kernel.computes(spec)
    if n.activations or n.weights != "as_stored":
        return kernel.error_bound
    return min(kernel.error_bound, _roundings(kernel, spec) * _EXACT[_coarsest(kernel, spec)])


def _roundings(kernel: Kernel[Any], spec: Spec) -> int:
    """How often a row is rounded: a declared operand is before each product, and experts have two in a row."""
    if not isinstance(kernel, MoEKernel) or not isinstance(spec, MoESpec):
        return 1
    return 1 + (kernel.computes(spec).operand != "own") + 2 * kernel.rounds_products  # gate's and up's


def allowed_rounded(kernel: Kernel[Any], spec: Spec) -> float:
    """The bound of most rows against a truth that quantizes activations as the kernel says it does."""
    coarse = any(a.dtype.startswith("fp8") for a in kernel.numerics.activations)
    return max(quantized(kernel, spec) * _EXACT[_coarsest(kernel, spec)], _FP8_STEPS if coarse else 0.0)


def usual(kernel: Kernel[Any], spec: Spec) -> float:
    """The bound of most rows. Roundings of a few terms may add up in one of them; to quantize in silence moves them all."""
    n = kernel.computes(spec)
    exact = not n.activations and n.weights == "as_stored"
    return min(allowed(kernel, spec), 2 * _EXACT[_coarsest(kernel, spec)]) if exact else allowed(kernel, spec)


def quantized(kernel: Kernel[Any], spec: Spec) -> int:
    """How often a row's activations are rounded to codes: before each product."""
    return min(2, _roundings(kernel, spec))


def _coarsest(kernel: Kernel[Any], spec: Spec) -> str:
    n = kernel.computes(spec)
    operand = spec.dtype if n.operand == "own" else n.operand
    return max((operand, n.accumulation, spec.output), key=_COARSENESS.index)


class Ruler:
    """Measures results for rows of one truth, float64 ``[M, ..]``.

    Rounding of operands scales with what is summed, not with the sum: a row that cancels is measured against the median row.

    middle: bound of half of many rows. rounded: the truth with activations quantized as the kernel declares, where that is known. Of one
    token whose terms cancel this rounding alone may pass the bound; a result is right that is as near to it.
    """

    def __init__(
        self, truth: Tensor, bound: float, middle: float | None = None, rounded: Callable[[], Tensor | None] = lambda: None
    ) -> None:
        self.truth, self.bound, self.largest, self._rounded = truth, bound, 0.0, rounded
        self._middle = bound if middle is None else middle
        norms = truth.reshape(len(truth), -1).norm(dim=1) if truth.numel() else truth.new_zeros(1)
        if not bool(torch.isfinite(norms).all()):
            raise CheckFailedError("the kit's own truth is not finite: report this")
        self._floor = float(norms[norms > 0].median()) if bool((norms > 0).any()) else 1.0

    def check(self, y: Tensor, rows: slice | Tensor = slice(None), what: str = "result") -> None:
        """Raise unless ``y`` is the truth's ``rows`` within the bound, as a whole and row by row."""
        truth = self.truth[rows]
        if tuple(y.shape) != tuple(truth.shape):
            raise CheckFailedError(f"{what}: shape {list(y.shape)}, expected {list(truth.shape)}")
        if not y.numel():
            return
        wide = y.to(torch.float64)
        if not bool(torch.isfinite(wide).all()):
            at = (~torch.isfinite(wide)).nonzero()
            raise CheckFailedError(f"{what}: {len(at)} of {y.numel()} elements are not finite, the first at {at[0].tolist()}")
        self._compare(wide.reshape(len(y), -1), truth.reshape(len(y), -1), what, rows)

    def _off(self, y: Tensor, truth: Tensor) -> tuple[float, Tensor]:
        """Relative L2 error of the whole and of each row."""
        off = (y - truth).norm(dim=1)
        return float(off.norm() / truth.norm().clamp(min=self._floor * len(y) ** 0.5)), off / truth.norm(dim=1).clamp(min=self._floor)

    def _compare(self, y: Tensor, truth: Tensor, what: str, rows: slice | Tensor) -> None:
        whole, row = self._off(y, truth)
        self.largest = max(self.largest, whole)
        problem = self._problem(whole, row)
        rounded = self._rounded() if problem else None
        if rounded is not None:
            problem = self._problem(*self._off(y, rounded[rows].reshape(len(y), -1)))
        if problem:
            raise CheckFailedError(f"{what}: {problem}")

    def _problem(self, whole: float, row: Tensor) -> str:
        """What passes a bound; empty where nothing does."""
        worst = int(row.argmax())
        if whole > self.bound:
            return f"relative L2 error {whole:.3g}, allowed {self.bound:.3g} (worst row {worst} of {len(row)})"
        if float(row[worst]) > _ROW * self.bound:
            found = f"row {worst} of {len(row)} is off by {float(row[worst]):.3g}"
            return f"{found}, allowed {_ROW * self.bound:.3g}; all rows together {whole:.3g}"
        middle = float(row.median())
        if len(row) >= _MOST and middle > self._middle:
            return f"half of {len(row)} rows are off by {middle:.3g} or more, allowed {self._middle:.3g}"
        return ""


class RoundedRuler(Ruler):
    """Against a truth that quantizes activations: most rows are within the bound, and the others within a step of a code.

    times: how often a row is rounded.
    """

    def __init__(self, truth: Tensor, bound: float, times: int = 1) -> None:
        super().__init__(truth, bound)
        self._most = _ROW * _ONE_STEP * times

    def _compare(self, y: Tensor, truth: Tensor, what: str, rows: slice | Tensor) -> None:
        _, row = self._off(y, truth)
        middle, worst = float(row.median()), int(row.argmax())
        if float(row[worst]) > self._most:
            found = f"row {worst} of {len(y)} is off by {float(row[worst]):.3g}"
            raise CheckFailedError(f"{what}: {found}, allowed {self._most:.3g}")
        if len(y) >= _MOST and middle > self.bound:
            raise CheckFailedError(f"{what}: half of {len(y)} rows are off by {middle:.3g} or more, allowed {self.bound:.3g}")


def same_bits(a: Tensor, b: Tensor, what: str) -> None:
    """Raise unless two tensors are equal bit for bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise CheckFailedError(f"{what}: {a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}")
    left, right = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    if not torch.equal(left, right):
        count = int((left != right).sum())
        raise CheckFailedError(f"{what}: {count} of {left.numel()} bytes differ")
