"""Results against the truth: over batch sizes, and attribute by attribute."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hal_core.testing.case import CheckFailedError, Verdict
from hal_core.testing.subjects import ExpertsSubject, LinearSubject

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.testing.bench import Bench
    from hal_core.testing.subject import Inputs, Subject

__all__ = ["accuracy", "effects", "into"]

#: An attribute that matters moves the result at least so far, in multiples of the error bound and absolutely.
_MOVED, _LEAST = 10.0, 1e-2


def into(subject: Subject, op: Any, inputs: Inputs) -> Tensor:
    """The result written over NaN; raises where ``out`` is not what comes back."""
    out = subject.poisoned(len(inputs))
    y = subject.call(op, inputs, out)
    if y.data_ptr() != out.data_ptr() or y.shape != out.shape:
        raise CheckFailedError("out= was given, and another tensor came back")
    return out


def accuracy(bench: Bench) -> Verdict:
    """Every batch size, fresh and into ``out``, against the float64 truth; and, where activations are quantized, one that does it too."""
    subject = bench.subject()
    sizes = subject.batch_sizes()
    full = subject.inputs(sizes[-1])
    ruler, closer = subject.ruler(full), subject.rounded_ruler(full)
    if not bool(ruler.truth.any()):
        raise CheckFailedError("the truth is all zero: the case proves nothing; report this")
    op = subject.prepare()
    for index, m in enumerate(sizes):
        part = full.rows(slice(0, m))
        given = subject.takes_out and index % 2 == 1 and subject.spec_routed
        y = into(subject, op, part) if given else subject.call(op, part)
        _check_form(subject, y, m)
        ruler.check(y, slice(0, m), f"M={m}")
        if closer is not None:
            closer.check(y, slice(0, m), f"M={m}, against the same quantized activations")
    _other_forms(subject, op, full)
    return Verdict(ruler.largest, ruler.bound)


def _check_form(subject: Subject, y: Tensor, m: int) -> None:
    expected = subject.poisoned(0)
    if y.dtype != expected.dtype or y.device.type != expected.device.type:
        raise CheckFailedError(f"M={m}: {y.dtype} on {y.device}, expected {expected.dtype} on {expected.device}")


def _other_forms(subject: Subject, op: Any, full: Inputs) -> None:
    """Leading dims of a linear, unreduced slots of experts."""
    m = min(6, len(full))
    part = full.rows(slice(0, m))
    if isinstance(subject, ExpertsSubject) and subject.spec_routed:
        subject.reduce = False
        subject.ruler(part).check(into(subject, op, part), what=f"M={m}, reduce=False")
        subject.reduce = True
    elif isinstance(subject, LinearSubject) and m % 2 == 0:
        folded = replace(part, x=part.x.reshape(2, m // 2, *part.x.shape[1:]))
        y = subject.call(op, folded)
        if tuple(y.shape[:2]) != (2, m // 2):
            raise CheckFailedError(f"x {list(folded.x.shape)} gives {list(y.shape)}: leading dims are lost")
        subject.ruler(part).check(y.reshape(m, -1), what=f"x {list(folded.x.shape)}")


def effects(bench: Bench) -> Verdict:
    """Two settings of one attribute: both right, and apart."""
    first, second = _SETTINGS[bench.case.word](bench)
    results, largest = [], 0.0
    for name, (subject, inputs) in (("first", first), ("second", second)):
        ruler = subject.ruler(inputs)
        y = subject.call(subject.prepare(), inputs)
        ruler.check(y, what=f"{bench.case.word}, {name} setting")
        largest = max(largest, ruler.largest)
        results.append((y.double(), ruler.truth))
    (a, truth), (b, other) = results
    bound = first[0].bound
    least = max(_LEAST, _MOVED * first[0].closest_bound)
    wanted = float((truth - other).norm() / truth.norm())
    moved = float((a - b).norm() / a.norm())
    if wanted < least:
        raise CheckFailedError(f"{bench.case.word}: the case's two settings differ by {wanted:.3g} only; report this")
    if moved < wanted / 2:
        raise CheckFailedError(f"{bench.case.word}: two settings differ by {moved:.3g}, by definition by {wanted:.3g}: it is not used")
    return Verdict(largest, bound)


_Setting = tuple["Subject", "Inputs"]


def _specs(bench: Bench, a: Any, b: Any) -> tuple[_Setting, _Setting]:
    """Two specs, one set of weights and inputs."""
    first, second = bench.subject(a), bench.subject(b)
    second.weights = first.weights
    inputs = first.inputs(max(first.rows, min(33, first.kernel.m_range[1] or 33)))
    return (first, inputs), (second, inputs)


def _activation(name: str, a: float, b: float) -> Any:
    def settings(bench: Bench) -> tuple[_Setting, _Setting]:
        spec = bench.case.spec
        return _specs(bench, *(replace(spec, activation=replace(spec.activation, **{name: value})) for value in (a, b)))

    return settings


def _field(name: str, a: Any, b: Any) -> Any:
    return lambda bench: _specs(bench, *(replace(bench.case.spec, **{name: value}) for value in (a, b)))


def _bias(bench: Bench) -> tuple[_Setting, _Setting]:
    (first, inputs), (second, _) = _specs(bench, bench.case.spec, bench.case.spec)
    parts = {name: getattr(first.weights, name) for name in type(first.weights).__dataclass_fields__}
    other = {name: -t for name, t in parts.items() if name.endswith("bias") and t is not None}
    second.weights = replace(first.weights, **other)
    return (first, inputs), (second, inputs)


def _router_weight(bench: Bench) -> tuple[_Setting, _Setting]:
    (first, inputs), (second, _) = _specs(bench, bench.case.spec, bench.case.spec)
    assert inputs.scores is not None  # experts have them
    return (first, inputs), (second, replace(inputs, scores=inputs.scores * 0.5))


def _router_weight_on_input(bench: Bench) -> tuple[_Setting, _Setting]:
    """Small weights: near 1 it makes little difference where they are applied."""
    (first, inputs), (second, _) = _field("router_weight_on_input", False, True)(bench)
    assert inputs.scores is not None  # experts have them
    small = replace(inputs, scores=inputs.scores * 0.4)
    return (first, small), (second, small)


def _expert_map(bench: Bench) -> tuple[_Setting, _Setting]:
    (first, inputs), (second, _) = _specs(bench, bench.case.spec, bench.case.spec)
    assert inputs.expert_map is not None  # the plan asks for it
    return (first, inputs), (second, replace(inputs, expert_map=inputs.expert_map.roll(1)))


_SETTINGS: dict[str, Any] = {
    "limit": _activation("limit", 1.0, 100.0),
    "alpha": _activation("alpha", 0.05, 3.0),
    "routed_scaling": _field("routed_scaling", 1.0, 2.5),
    "router_weight_on_input": _router_weight_on_input,
    "bias": _bias,
    "router_weight": _router_weight,
    "expert_map": _expert_map,
}
