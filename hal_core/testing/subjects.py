"""The subjects: linear, embedding look-up, tied head, experts."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from hal_core.dtypes import torch_dtype
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.ops import Batched, Grouped, Routed
from hal_core.spec import EmbeddingSpec, MoESpec
from hal_core.testing import truth
from hal_core.testing.data import random_input, random_weight, to_device
from hal_core.testing.rounding import Rounding, rounding_of
from hal_core.testing.subject import Inputs, Subject

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.kernel import Kernel
    from hal_core.testing.case import Case

__all__ = ["ExpertsSubject", "HeadSubject", "LinearSubject", "LookupSubject", "subject_of"]

#: Far enough below 65504 for what the checks change afterwards.
_FP16_SAFE = 4e3


def subject_of(kernel: Kernel[Any], case: Case, run_seed: int, device: torch.device) -> Subject:
    """The subject of a case."""
    arguments = (kernel, case.spec, case.seed(run_seed), device, case.scales)
    if isinstance(case.spec, MoESpec):
        return ExpertsSubject(*arguments)
    if isinstance(case.spec, EmbeddingSpec):
        return LookupSubject(*arguments) if case.word == "lookup" else HeadSubject(*arguments)
    return LinearSubject(*arguments)


class LinearSubject(Subject):
    """``x [M, K]`` to ``[M, N]``."""

    @property
    def size(self) -> tuple[int, int]:
        """(N, K)."""
        return self.spec.n, self.spec.k

    @property
    def has_bias(self) -> bool:
        return bool(self.spec.bias)

    def new_weights(self) -> LinearWeights:
        weight = random_weight(self.spec.weights, self.size, self.rng, self.scales)
        bias = torch.randn(self.size[0], generator=self.rng).to(torch_dtype(self.spec.dtype)) if self.has_bias else None
        return self.copied(LinearWeights(weight, bias))

    def copied(self, weights: LinearWeights) -> LinearWeights:
        bias = None if weights.bias is None else weights.bias.to(self.device, copy=True)
        return LinearWeights(to_device(weights.weight, self.device), bias)

    def inputs(self, rows: int) -> Inputs:
        return Inputs(random_input((rows, self.size[1]), self.rng, self.spec.dtype, outliers=self.outliers).to(self.device))

    def call(self, op: Any, inputs: Inputs, out: Tensor | None = None) -> Tensor:
        return op.apply(inputs.x) if out is None else op.apply(inputs.x, out=out)  # type: ignore[no-any-return]

    def truth(self, inputs: Inputs, weights: Any = None) -> Tensor:
        return truth.linear(self.weights if weights is None else weights, inputs.x)

    def rounded_truth(self, inputs: Inputs) -> Tensor | None:
        rounding = rounding_of(self.kernel, self.spec)
        return None if rounding is None else truth.linear(self.weights, inputs.x, rounding)

    def roles(self, weights: LinearWeights) -> dict[str, QuantizedTensor]:
        return {"weight": weights.weight}

    def out_shape(self, rows: int) -> tuple[int, ...]:
        return rows, self.size[0]


class HeadSubject(LinearSubject):
    """The output head that shares an embedding's weights."""

    has_bias = False

    @property
    def size(self) -> tuple[int, int]:
        return self.spec.rows, self.spec.dim


class LookupSubject(HeadSubject):
    """Ids to rows of the table."""

    takes_out = False
    float_input = False

    def inputs(self, rows: int) -> Inputs:
        ids = torch.randint(0, self.spec.rows, (rows,), generator=self.rng)
        ids[-2:] = torch.tensor([0, self.spec.rows - 1])[: len(ids[-2:])]
        return Inputs(ids.to(self.device))

    def call(self, op: Any, inputs: Inputs, out: Tensor | None = None) -> Tensor:
        assert out is None  # a look-up takes none
        return op.lookup(inputs.x)  # type: ignore[no-any-return]

    def rounded_truth(self, inputs: Inputs) -> Tensor | None:
        return None  # nothing is multiplied

    def truth(self, inputs: Inputs, weights: Any = None) -> Tensor:
        return truth.weight_matrix((self.weights if weights is None else weights).weight)[inputs.x]

    def out_shape(self, rows: int) -> tuple[int, ...]:
        return rows, self.spec.dim


class ExpertsSubject(Subject):
    """``x [T, H]`` with routing to ``[T, H]``; ``reduce`` False gives ``[T, k, H]``."""

    reduce = True

    def new_weights(self) -> MoEWeights:
        s = self.spec
        wide, tall = (s.local, s.intermediate, s.hidden), (s.local, s.hidden, s.intermediate)
        parts: dict[str, Any] = {
            name: random_weight(scheme, tall if name == "down" else wide, self.rng, self.scales)
            for name, scheme in (("gate", s.gate), ("up", s.up), ("down", s.down))
            if scheme is not None
        }
        if s.bias:
            for name in list(parts):
                bias = torch.randn(s.local, s.hidden if name == "down" else s.intermediate, generator=self.rng)
                parts[f"{name}_bias"] = bias.to(torch_dtype(s.dtype))
        return self.copied(MoEWeights(**parts))

    def copied(self, weights: MoEWeights) -> MoEWeights:
        parts: dict[str, Any] = {}
        for field in fields(weights):
            value = getattr(weights, field.name)
            if value is not None:
                moved = value.to(self.device, copy=True) if isinstance(value, torch.Tensor) else to_device(value, self.device)
                parts[field.name] = moved
        return MoEWeights(**parts)

    def inputs(self, rows: int) -> Inputs:
        s = self.spec
        x = random_input((rows, s.hidden), self.rng, s.dtype, outliers=self.outliers)
        ids = torch.randint(0, s.num_experts, (rows, s.top_k), generator=self.rng).to(torch.int32)
        ids[torch.rand(ids.shape, generator=self.rng) < 0.05] = -1
        scores = torch.rand(rows, s.top_k, generator=self.rng) + 0.05
        made = Inputs(x, ids, scores, self._new_map() if s.expert_map else None)
        return self.tamed(Inputs(**{name: t.to(self.device) for name, t in made.tensors().items()}))

    def tamed(self, inputs: Inputs) -> Inputs:
        """Inputs made smaller until fp16 holds the result: a product of outliers may leave its range, which is no fault of a kernel."""
        for _ in range(16):
            if self.spec.output != "fp16" or not len(inputs) or float(self.truth(inputs).abs().nan_to_num().max()) < _FP16_SAFE:
                break
            inputs = replace(inputs, x=inputs.x / 2)
        return inputs

    def _new_map(self) -> Tensor:
        """Local ids in random order over random global ids, -1 elsewhere."""
        s = self.spec
        mapping = torch.full((s.num_experts,), -1, dtype=torch.int32)
        mapping[torch.randperm(s.num_experts, generator=self.rng)[: s.local]] = torch.arange(s.local, dtype=torch.int32)
        return mapping

    def call(self, op: Any, inputs: Inputs, out: Tensor | None = None) -> Tensor:
        if self.spec.routing != "routed":
            return self._call_sorted(op, inputs)
        routing = Routed(inputs.ids, inputs.scores)  # type: ignore[arg-type]
        more = {} if out is None else {"out": out}
        if inputs.expert_map is not None:
            more["expert_map"] = inputs.expert_map
        return op.apply(inputs.x, routing, reduce=self.reduce, **more)  # type: ignore[no-any-return]

    def _call_sorted(self, op: Any, inputs: Inputs) -> Tensor:
        """Rows grouped by expert, as the first slot's ids say; the result is put back into the order of ``inputs``."""
        ids = self._first(inputs)
        counts, order = torch.bincount(ids, minlength=self.spec.local).to(torch.int32), torch.argsort(ids, stable=True)
        if self.spec.routing == "grouped":
            return _reordered(op.apply(inputs.x[order], Grouped(counts)), order)
        place = torch.cat([torch.arange(int(c), device=ids.device) for c in counts])
        padded = torch.zeros(self.spec.local, max(1, int(counts.max())), self.spec.hidden, dtype=inputs.x.dtype, device=ids.device)
        padded[ids[order], place] = inputs.x[order]
        return _reordered(op.apply(padded, Batched(counts))[ids[order], place], order)

    def _first(self, inputs: Inputs) -> Tensor:
        assert inputs.ids is not None  # made by inputs()
        return inputs.ids[:, 0].long().clamp(min=0) % int(self.spec.local)

    def truth(self, inputs: Inputs, weights: Any = None) -> Tensor:
        return self._truth(inputs, self.weights if weights is None else weights, None)

    def rounded_truth(self, inputs: Inputs) -> Tensor | None:
        rounding = rounding_of(self.kernel, self.spec)
        return None if rounding is None else self._truth(inputs, self.weights, rounding)

    def _truth(self, inputs: Inputs, weights: MoEWeights, rounding: Rounding | None) -> Tensor:
        if self.spec.routing != "routed":
            ids = self._first(inputs)[:, None]
            plain = replace(self.spec, routed_scaling=1.0)
            ones = torch.ones_like(ids, dtype=torch.float64)
            return truth.experts(plain, weights, inputs.x, ids, ones, None, rounding).squeeze(1)
        assert inputs.ids is not None  # made by inputs()
        assert inputs.scores is not None
        slots = truth.experts(self.spec, weights, inputs.x, inputs.ids, inputs.scores, inputs.expert_map, rounding)
        slots = slots * float(self.spec.routed_scaling)
        return slots.sum(dim=1) if self.reduce else slots

    def roles(self, weights: MoEWeights) -> dict[str, QuantizedTensor]:
        named = (("gate", weights.gate), ("up", weights.up), ("down", weights.down))
        return {name: weight for name, weight in named if weight is not None}

    def out_shape(self, rows: int) -> tuple[int, ...]:
        if self.spec.routing != "routed" or self.reduce:
            return rows, self.spec.hidden
        return rows, self.spec.top_k, self.spec.hidden


def _reordered(y: Tensor, order: Tensor) -> Tensor:
    """Undo the sorting of rows."""
    return y[torch.argsort(order)]
