"""What a call touches: poisoned outputs, guard bands, strides, the caller's own tensors; and which rows a bad value reaches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hal_core.canonical import QuantizedTensor
from hal_core.errors import HalError
from hal_core.testing.case import CheckFailedError, Verdict
from hal_core.testing.measure import same_bits
from hal_core.testing.subjects import ExpertsSubject

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.testing.bench import Bench
    from hal_core.testing.subject import Inputs, Subject

__all__ = ["Guarded", "memory", "rows"]

_BAND = 4096
#: As a float of any kind this byte repeated is NaN, as an expert id it is -1.
_POISON = 0xFF


class Guarded:
    """A copy of a tensor inside a larger buffer full of poison."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        size = tensor.numel() * tensor.element_size()
        self._name, self._size = name, size
        self._raw = torch.full((size + 2 * _BAND,), _POISON, dtype=torch.uint8, device=tensor.device)
        self.view = self._raw[_BAND : _BAND + size].view(tensor.dtype).view(tensor.shape)
        self.view.copy_(tensor)
        self._before = self.view.clone()

    def check(self, *, unchanged: bool = True) -> None:
        """Raise where a byte around the tensor was written, or the tensor itself."""
        around = torch.cat([self._raw[:_BAND], self._raw[_BAND + self._size :]])
        wrong = (around != _POISON).nonzero()
        if len(wrong):
            at = int(wrong[0])
            where = f"{_BAND - at} bytes before" if at < _BAND else f"{at - _BAND + 1} bytes after"
            raise CheckFailedError(f"{self._name}: wrote outside, {where} it ({len(wrong)} bytes in all)")
        if unchanged:
            same_bits(self.view, self._before, f"{self._name}, which the op must not change")


def memory(bench: Bench) -> Verdict:
    """Guard bands around everything; then strided inputs and outputs."""
    subject = bench.subject()
    guards: list[Guarded] = []

    def guard(tensor: Tensor, name: str) -> Tensor:
        guards.append(Guarded(tensor, name))
        return guards[-1].view

    op = bench.kernel.prepare(subject.spec, _guarded_weights(subject.weights, guard))
    inputs = subject.inputs(max(subject.rows, min(33, bench.kernel.m_range[1] or 33)))
    ruler = subject.ruler(inputs)
    inputs = replace(inputs, **{name: guard(tensor, name) for name, tensor in inputs.tensors().items()})
    out = Guarded(subject.poisoned(len(inputs)), "out")
    y = subject.call(op, inputs, out.view) if subject.takes_out and subject.spec_routed else subject.call(op, inputs)
    out.check(unchanged=False)
    for each in guards:
        each.check()
    ruler.check(y, what="result over NaN")
    if isinstance(subject, ExpertsSubject) and subject.spec_routed:
        ruler.check(_with_workspace(subject, op, inputs), what="result with a workspace")
    _strided(subject, op, inputs, ruler.check)
    return Verdict(ruler.largest, ruler.bound)


def _guarded_weights(weights: Any, guard: Any) -> Any:
    parts: dict[str, Any] = {}
    for name in type(weights).__dataclass_fields__:
        value = getattr(weights, name)
        if isinstance(value, QuantizedTensor):
            inner = {key: guard(tensor, f"{name}.{key}") for key, tensor in value.tensors().items()}
            value = QuantizedTensor(value.scheme, value.shape, **inner)
        elif value is not None:
            value = guard(value, name)
        parts[name] = value
    return type(weights)(**parts)


def _with_workspace(subject: ExpertsSubject, op: Any, inputs: Inputs) -> Tensor:
    from hal_core.ops import Routed

    sizes = [op.workspace_size(m) for m in (1, len(inputs), 2 * len(inputs))]
    if not all(isinstance(size, int) and size >= 0 for size in sizes) or sizes != sorted(sizes):
        raise CheckFailedError(f"workspace_size of 1, {len(inputs)} and {2 * len(inputs)} rows is {sizes}: bytes that never shrink are due")
    space = Guarded(torch.zeros(max(64, sizes[1]), dtype=torch.uint8, device=subject.device), "workspace")
    more = {} if inputs.expert_map is None else {"expert_map": inputs.expert_map}
    y = op.apply(inputs.x, Routed(inputs.ids, inputs.scores), workspace=space.view, **more)  # type: ignore[arg-type]
    space.check(unchanged=False)
    return y  # type: ignore[no-any-return]


def _strided(subject: Subject, op: Any, inputs: Inputs, check: Any) -> None:
    """A view with gaps works or is an error, and its gaps stay as they are."""
    if subject.float_input:
        wide = torch.full((len(inputs), inputs.x.shape[1] + 3), float("nan"), dtype=inputs.x.dtype, device=subject.device)
        wide[:, : inputs.x.shape[1]] = inputs.x
        for name, x in (("x with gaps", wide[:, : inputs.x.shape[1]]), ("x transposed", inputs.x.T.contiguous().T)):
            try:
                check(subject.call(op, replace(inputs, x=x)), what=name)
            except HalError:
                continue
    if not (subject.takes_out and subject.spec_routed):
        return
    n = subject.out_shape(1)[-1]
    wide = torch.full((len(inputs), n + 3), float("nan"), dtype=subject.poisoned(0).dtype, device=subject.device)
    try:
        check(subject.call(op, inputs, wide[:, :n]), what="out with gaps")
    except HalError:
        return
    check(wide[:, :n], what="out with gaps, read from where it was asked for")
    if not bool(torch.isnan(wide[:, n:]).all()):
        raise CheckFailedError("out with gaps: wrote into the gaps")


def rows(bench: Bench) -> Verdict:
    """One row holds NaN, infinity or a huge value; the others must not notice, and NaN must not vanish."""
    subject = bench.subject()
    m = min(33, bench.kernel.m_range[1] or 33)
    inputs = subject.inputs(max(m, subject.rows))
    at, keep = len(inputs) // 2, torch.arange(len(inputs)) != len(inputs) // 2
    if inputs.ids is not None:
        inputs.ids[at] = torch.arange(inputs.ids.shape[1], dtype=inputs.ids.dtype)
        if inputs.expert_map is not None:
            inputs.expert_map[:] = torch.arange(len(inputs.expert_map), dtype=torch.int32) % subject.spec.local
    if isinstance(subject, ExpertsSubject):
        inputs = subject.tamed(inputs)
    ruler = subject.ruler(inputs)
    op, bad = subject.prepare(), _spoilt(bench.case.word, inputs, at)
    y = subject.call(op, bad)
    ruler.check(y[keep], keep, f"rows beside one with {bench.case.word}")
    row = y[at].float()
    gone = not bool(torch.isnan(row).all()) if subject.outliers else bool(torch.isfinite(row).all())
    if bench.case.word.startswith("nan") and gone:
        raise CheckFailedError(f"row {at} holds NaN, and its result is {row.flatten()[:4].tolist()}..: NaN was swallowed")
    return Verdict(ruler.largest, ruler.bound)


def _spoilt(word: str, inputs: Inputs, at: int) -> Inputs:
    x = inputs.x.clone()
    if word == "nan_score":
        assert inputs.scores is not None  # experts have them
        scores = inputs.scores.clone()
        scores[at, 0] = float("nan")
        return replace(inputs, scores=scores)
    if word == "huge":
        x[at] *= 100.0
    else:
        x[at, x.shape[1] // 3] = float("nan" if word == "nan" else "inf")
    return replace(inputs, x=x)
