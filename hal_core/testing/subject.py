"""One kernel with one spec, and how to feed it: what lets a check be written once for every kind of op."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hal_core.dtypes import torch_dtype
from hal_core.testing.measure import USUAL, RoundedRuler, Ruler, allowed, allowed_rounded, quantized, usual
from hal_core.testing.rounding import rounding_of

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.kernel import Kernel

__all__ = ["ROWS", "Inputs", "Subject"]

#: Batch sizes to try: none, one, few, and both sides of where kernels change their way.
ROWS = (0, 1, 2, 31, 33, 65)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Arguments of one call. ``x`` holds ids for a look-up; ``ids``, ``scores`` and ``expert_map`` are for experts."""

    x: Tensor
    ids: Tensor | None = None
    scores: Tensor | None = None
    expert_map: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, index: slice | Tensor) -> Inputs:
        """Some of the rows, copied."""
        parts = {name: getattr(self, name)[index].clone() for name in ("x", "ids", "scores") if getattr(self, name) is not None}
        return replace(self, **parts)

    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        return {name: t for name in ("x", "ids", "scores", "expert_map") if (t := getattr(self, name)) is not None}


class Subject(ABC):
    """Weights, inputs, calls and truth of one kernel and spec. All random numbers come from ``seed``."""

    #: Whether ``call`` can be given an ``out``.
    takes_out = True
    #: Whether ``x`` holds floats, so that NaN can be tried.
    float_input = True

    def __init__(self, kernel: Kernel[Any], spec: Any, seed: int, device: torch.device, scales: str = "fp16") -> None:
        self.kernel, self.spec, self.device, self.scales = kernel, spec, device, scales
        self.rng = torch.Generator().manual_seed(seed)
        self.weights = self.new_weights()

    @abstractmethod
    def new_weights(self) -> Any:
        """Fresh random weights for ``kernel.prepare``."""

    @abstractmethod
    def inputs(self, rows: int) -> Inputs:
        """Fresh random arguments."""

    @abstractmethod
    def call(self, op: Any, inputs: Inputs, out: Tensor | None = None) -> Tensor:
        """The op's hot path."""

    @abstractmethod
    def truth(self, inputs: Inputs, weights: Any = None) -> Tensor:
        """float64 result; of ``self.weights`` when ``weights`` is not given."""

    @abstractmethod
    def roles(self, weights: Any) -> dict[str, QuantizedTensor]:
        """The canonical tensors by the names that ops use for them."""

    @abstractmethod
    def out_shape(self, rows: int) -> tuple[int, ...]:
        """Shape of a result."""

    @property
    def outliers(self) -> bool:
        """A kernel that may quantize activations is bound only where they have no outliers."""
        return self.kernel.numerics.exact

    @property
    def spec_routed(self) -> bool:
        """Whether ``call`` takes the kit's rows as they are: no sorted or padded form of routing is asked for."""
        return getattr(self.spec, "routing", "routed") == "routed"

    @property
    def bound(self) -> float:
        return allowed(self.kernel, self.spec)

    @property
    def closest_bound(self) -> float:
        """Against the truth that computes most like the kernel."""
        return allowed_rounded(self.kernel, self.spec) if rounding_of(self.kernel, self.spec) else min(self.bound, USUAL)

    def ruler(self, inputs: Inputs, weights: Any = None) -> Ruler:
        """Measures results for ``inputs``."""
        middle = usual(self.kernel, self.spec)
        return Ruler(self.truth(inputs, weights), self.bound, middle, lambda: self.rounded_truth(inputs) if weights is None else None)

    def rounded_truth(self, inputs: Inputs) -> Tensor | None:
        """float64 result of activations quantized as the kernel declares; None where it quantizes none, or in a way not known here."""
        return None

    def rounded_ruler(self, inputs: Inputs) -> Ruler | None:
        """Measures closely what quantizes activations."""
        truth = self.rounded_truth(inputs)
        return None if truth is None else RoundedRuler(truth, allowed_rounded(self.kernel, self.spec), quantized(self.kernel, self.spec))

    def prepare(self, weights: Any = None) -> Any:
        """A fresh op; of ``self.weights`` when ``weights`` is not given. The op gets copies that it may keep."""
        return self.kernel.prepare(self.spec, self.copied(self.weights if weights is None else weights))

    @abstractmethod
    def copied(self, weights: Any) -> Any:
        """The same weights in memory of their own, on the device."""

    def poisoned(self, rows: int) -> Tensor:
        """An output full of NaN."""
        return torch.full(self.out_shape(rows), float("nan"), dtype=torch_dtype(self.spec.output), device=self.device)

    def batch_sizes(self) -> tuple[int, ...]:
        """Those of :data:`ROWS` that the kernel declares, with the ends of its own range; an empty batch goes with one row."""
        least, most = self.kernel.m_range
        ends = (least, *(() if most is None else (most,)))
        top = ROWS[-1] if most is None else min(most, 4 * ROWS[-1])
        wanted = {m for m in (*ROWS, *ends) if least <= m <= top} | ({0} if least <= 1 else set())
        return tuple(sorted(wanted))

    @property
    def rows(self) -> int:
        """A handy batch size inside the kernel's range."""
        least, most = self.kernel.m_range
        return max(least, min(5, most or 5))
