"""torch.compile and the registration of torch ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hal_core.ops import Routed
from hal_core.testing.case import CheckFailedError, Status, Verdict
from hal_core.testing.measure import same_bits
from hal_core.testing.subjects import ExpertsSubject, LookupSubject

if TYPE_CHECKING:
    from collections.abc import Callable

    from hal_core.testing.bench import Bench
    from hal_core.testing.subject import Inputs, Subject

__all__ = ["Recorder", "check_recorded", "compiled", "opcheck"]

#: Ops that torch itself answers for.
_TORCH = ("aten", "prim", "prims", "profiler", "quantized", "_c10d_functional", "c10d", "inductor", "higher_order")


def _function(subject: Subject, op: Any) -> Callable[[Inputs], Any]:
    """A plain function of tensors, as a model would have it."""
    if isinstance(subject, ExpertsSubject):
        if subject.spec.expert_map:
            mapped = lambda x, ids, scores, mapping: op.apply(x, Routed(ids, scores), expert_map=mapping)  # noqa: E731
            graph = torch.compile(mapped, fullgraph=True, backend="aot_eager")
            return lambda i: graph(i.x, i.ids, i.scores, i.expert_map)
        routed = torch.compile(lambda x, ids, scores: op.apply(x, Routed(ids, scores)), fullgraph=True, backend="aot_eager")
        return lambda i: routed(i.x, i.ids, i.scores)
    call: Callable[[Any], Any] = op.lookup if isinstance(subject, LookupSubject) else op.apply
    plain = torch.compile(call, fullgraph=True, backend="aot_eager")
    return lambda i: plain(i.x)


def compiled(bench: Bench) -> Verdict:
    """One graph, at two batch sizes, with the result of eager."""
    subject = bench.subject()
    if not subject.spec_routed:
        return Verdict(status=Status.SKIPPED, reason="the kit sorts rows outside the op, in a way that no graph holds")
    op = subject.prepare()
    torch._dynamo.reset()
    function = _function(subject, op)
    try:
        for m in dict.fromkeys((subject.rows, subject.batch_sizes()[-1])):
            inputs = subject.inputs(m)
            eager = subject.call(op, inputs)
            try:
                y = function(inputs)
            except Exception as error:
                first = str(error).strip().splitlines()[0] if str(error).strip() else ""
                raise CheckFailedError(f"torch.compile, M={m}: {type(error).__name__}: {first}") from error
            if bench.kernel.numerics.deterministic:
                same_bits(y, eager, f"compiled against eager, M={m}")
            else:
                subject.ruler(inputs).check(y, what=f"compiled, M={m}")
    finally:
        torch._dynamo.reset()
    return Verdict()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the first call of each op that is not torch's own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in _TORCH:
            self.calls.setdefault(str(func), (func, args, kwargs))
        return func(*args, **kwargs)


def opcheck(bench: Bench) -> Verdict:
    """Torch's own check of schema and fake kernel, on the ops that a call reaches, with the arguments of that call."""
    subject = bench.subject()
    op, inputs = subject.prepare(), subject.inputs(subject.rows)
    with torch.no_grad(), Recorder() as recorder:
        subject.call(op, inputs)
        if subject.takes_out and subject.spec_routed:
            subject.call(op, inputs, subject.poisoned(len(inputs)))
    return check_recorded(recorder)


def check_recorded(recorder: Recorder) -> Verdict:
    """Torch's check of every call that was recorded."""
    if not recorder.calls:
        return Verdict(status=Status.SKIPPED, reason="the call reaches no torch op of the backend's own")
    for name, (func, args, kwargs) in recorder.calls.items():
        try:
            torch.library.opcheck(func, args, kwargs, test_utils=("test_schema", "test_faketensor"))
        except Exception as error:
            first = " ".join(str(error).split())[:300]
            raise CheckFailedError(f"opcheck of {name}: {first}") from error
    return Verdict(reason=f"checked {', '.join(sorted(recorder.calls))}")
