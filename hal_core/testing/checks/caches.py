"""The checks of KV kernels, under the names of those of the other ops."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hal_core.errors import HalError
from hal_core.testing.case import CheckFailedError, Status, Verdict
from hal_core.testing.checks.memory import Guarded
from hal_core.testing.kv_subject import Call, KVSubject
from hal_core.testing.measure import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hal_core.kv.op import KVOp
    from hal_core.testing.bench import Bench

__all__ = ["CACHE_FUNCTIONS"]

#: Vectors of which a code may differ from the canonical one: sums in another order move a number over the edge of its cell.
_FEW = 0.02
#: A part of the attention that matters moves the result at least so far.
_MOVED = 0.02


def _subject(bench: Bench, spec: Any = None) -> KVSubject:
    case = bench.case
    return KVSubject(bench.kernel, case.spec if spec is None else spec, case.seed(bench.seed), bench.device)  # type: ignore[arg-type]


def _stored(subject: KVSubject, op: KVOp, pages: Tensor, tails: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    return [subject.read(op, pages, tails, row, length) for row, length in enumerate(subject.lengths)]


def _near_canonical(found: Tensor, wanted: Tensor, what: str) -> None:
    if found.shape != wanted.shape or found.dtype != torch.float32:
        raise CheckFailedError(f"{what}: {found.dtype} {list(found.shape)}, expected float32 {list(wanted.shape)}")
    size = wanted.abs().amax(-1).clamp(min=1e-6)
    apart = (found - wanted).abs().amax(-1) / size
    wrong = ~(apart <= 1e-3)
    if int(wrong.sum()) > max(1.0, _FEW * wrong.numel()) or not bool(torch.isfinite(found).all()):
        part = float(wrong.float().mean())
        raise CheckFailedError(
            f"{what}: {part:.1%} of the vectors differ from the canonical quantization, the worst by {float(apart.max()):.3g}"
        )


def accuracy(bench: Bench) -> Verdict:
    """What is stored is the canonical quantization, and attention is float64's over what is stored."""
    subject, largest = _subject(bench), 0.0
    op = subject.prepare()
    pages, tails = subject.filled(op)
    stored = _stored(subject, op, pages, tails)
    for row, (k, v) in enumerate(stored):
        wanted = subject.canonical(row)
        _near_canonical(k, wanted[0], f"keys of row {row}")
        _near_canonical(v, wanted[1], f"values of row {row}")
    for index, call in enumerate(subject.calls()):
        out = torch.full((len(call.q), subject.spec.num_heads, subject.spec.v_dim), float("nan"), dtype=call.q.dtype, device=subject.device)
        found = subject.attend(op, pages, tails, call, out if index % 2 else None)
        if index % 2 and found[0].data_ptr() != out.data_ptr():
            raise CheckFailedError("out= was given, and another tensor came back")
        what = f"call {index} ({call.counts} queries over {call.lengths} tokens)"
        largest = max(largest, subject.check(call, found, stored, what))
        if index < 2:
            alone = subject.attend_only(op, pages, tails, call)
            largest = max(largest, subject.check(call, (alone, found[1]), stored, f"{what}, without logarithms"))
            apart = replace(call, q=call.q.transpose(0, 1).contiguous().transpose(0, 1))
            largest = max(largest, subject.check(call, subject.attend(op, pages, tails, apart), stored, f"{what}, heads before tokens"))
    return Verdict(largest, subject.bound)


def effects(bench: Bench) -> Verdict:
    """With and without one part of the attention: both right, and apart."""
    plain = {"window": None, "sink_tokens": 0, "sinks": False, "soft_cap": None}
    without = {"sink_tokens": {"window": bench.case.spec.window}}.get(bench.case.word, {})
    first, second = _subject(bench), _subject(bench, replace(bench.case.spec, **{**plain, **without}))
    op, other = first.prepare(), second.prepare()
    pages, tails = first.filled(op)
    stored = _stored(first, op, pages, tails)
    more = second.filled(other)  # the same tokens: they come from the same seed
    call = first.calls()[0]
    a = first.attend(op, pages, tails, call)
    largest = first.check(call, a, stored, f"with {bench.case.word}")
    b = second.attend(other, *more, call)
    moved = float((a[0].double() - b[0].double()).norm() / b[0].double().norm())
    truth, _ = first.truth(call, stored)
    wanted = float((truth - second.truth(call, stored)[0]).norm() / truth.norm())
    if wanted < _MOVED:
        raise CheckFailedError(f"{bench.case.word}: the case's two settings differ by {wanted:.3g} only; report this")
    if moved < wanted / 2:
        raise CheckFailedError(f"{bench.case.word}: results differ by {moved:.3g}, by definition by {wanted:.3g}: it is not used")
    return Verdict(largest, first.bound)


def layout(bench: Bench) -> Verdict:
    """All tokens at once or one by one, read whole or from anywhere: the same; and pages hold little besides."""
    subject = _subject(bench)
    op = subject.prepare()
    one, whole = subject.pages(op), subject.pages(op)
    subject.fill(op, *one, steps=(1,))
    subject.fill(op, *whole, steps=(1 << 20,))
    for row, length in enumerate(subject.lengths):
        for side, a, b in zip("kv", subject.read(op, *one, row, length), subject.read(op, *whole, row, length), strict=True):
            _near_canonical(a, b, f"{side} of row {row}, appended one by one, against all at once")
        start = length // 2
        for side, a, b in zip("kv", subject.read(op, *whole, row, length), subject.read(op, *whole, row, length, start), strict=True):
            same_bits(b, a[start:], f"{side} of row {row} read from {start}")
    held, due = op.page_bytes, subject.spec.token_bytes * subject.spec.page_size
    if held > 1.25 * due:
        raise CheckFailedError(f"a page has {held} bytes, its tokens need {due:.0f}")
    return Verdict(reason=f"{held} bytes a page, {held / due - 1:+.1%} of what its tokens need")


def update(bench: Bench) -> Verdict:
    """Other static scales in place equal a fresh prepare."""
    subject = _subject(bench)
    if not (subject.spec.keys.scaled or subject.spec.values.scaled):
        return Verdict(status=Status.SKIPPED, reason="this scheme has no static scales")
    op = subject.prepare()
    subject.params = subject.new_params()
    op.update(subject.params)
    fresh = subject.prepare()
    pages, tails = subject.pages(op)
    again, more = pages.clone(), None if tails is None else tails.clone()
    subject.fill(op, pages, tails)
    subject.fill(fresh, again, more)
    same_bits(pages, again, "pages after update, against a fresh prepare")
    return Verdict()


def memory(bench: Bench) -> Verdict:
    """Guard bands; an append touches its own tokens' bytes only, attention and reading touch nothing."""
    subject = _subject(bench)
    op = subject.prepare()
    pages, tails = subject.filled(op)
    guards = [Guarded(pages, "pages")] + ([] if tails is None else [Guarded(tails, "tails")])
    inside, tail_view = guards[0].view, None if tails is None else guards[1].view
    call = subject.calls()[1]
    stored, q = _stored(subject, op, pages, tails), Guarded(call.q, "q")
    shape = (len(call.q), subject.spec.num_heads, subject.spec.v_dim)
    out = Guarded(torch.full(shape, float("nan"), dtype=call.q.dtype, device=subject.device), "out")
    found = subject.attend(op, inside, tail_view, replace(call, q=q.view), out.view)
    out.check(unchanged=False)
    for guard in (q, *guards):
        guard.check()
    largest = subject.check(call, found, stored, "result over NaN")
    _other_rows(subject, op, pages, tails)
    return Verdict(largest, subject.bound)


def _other_rows(subject: KVSubject, op: KVOp, pages: Tensor, tails: Tensor | None) -> None:
    """Row 2 grows by tokens into its own page: no byte of another page or tail changes."""
    before, held = pages.clone(), None if tails is None else tails.clone()
    start, end = subject.lengths[2], min(subject.lengths[2] + 4, subject.spec.page_size)
    k, v = subject.new_tokens(end - start)
    owners = subject.tail_ids[2].expand(end - start) if op.tail_bytes else None
    op.append(pages, k, v, subject.slots(2, start, end), tails, owners)
    keep = torch.ones(len(pages), dtype=torch.bool, device=pages.device)
    keep[int(subject.table[2, 0])] = False
    same_bits(pages[keep], before[keep], "pages of other rows, after an append")
    if tails is not None and held is not None:
        others = torch.arange(len(tails), device=tails.device) != int(subject.tail_ids[2])
        same_bits(tails[others], held[others], "tails of other rows, after an append")


def rows(bench: Bench) -> Verdict:
    """One row holds keys that are NaN, infinite or huge: the others do not notice, and NaN does not vanish."""
    subject, word = _subject(bench), bench.case.word
    op = subject.prepare()
    clean = subject.filled(op)
    call = Call(subject.queries(3), (0, 1, 2), (1, 1, 1), subject.lengths)
    wanted = subject.attend(op, *clean, call)[0]
    k, v = subject.tokens[1]
    at = len(k) - 1
    k[at], v[at] = {"nan": (float("nan"),) * 2, "inf": (float("inf"),) * 2, "huge": (3e4, 3e4)}[word]
    pages, tails = subject.filled(op)
    found = subject.attend(op, pages, tails, call)[0]
    keep = torch.tensor([0, 2], device=subject.device)
    ruler_error = float((found[keep].double() - wanted[keep].double()).norm() / wanted[keep].double().norm())
    if not ruler_error <= subject.bound:
        raise CheckFailedError(f"rows beside one with {word}: changed by {ruler_error:.3g}")
    if word == "huge" and not bool(torch.isfinite(found[1]).all()):
        raise CheckFailedError("a large token makes its row infinite or NaN")
    if word == "nan" and not bool(torch.isnan(found[1]).any()):
        raise CheckFailedError(f"row 1 holds NaN, and its result is {found[1].flatten()[:4].tolist()}..: NaN was swallowed")
    return Verdict(ruler_error, subject.bound)


def determinism(bench: Bench) -> Verdict:
    """The same call again, and on another op."""
    subject = _subject(bench)
    op, other = subject.prepare(), subject.prepare()
    pages, tails = subject.filled(op)
    for call in subject.calls()[:3]:
        first = subject.attend(op, pages, tails, call)
        for what, each in (("second run", op), ("another op", other)):
            for a, b in zip(subject.attend(each, pages, tails, call), first, strict=True):
                same_bits(a, b, f"{what}, though deterministic is declared")
    return Verdict()


def batch_invariance(bench: Bench) -> Verdict:
    """A row alone has the bits that it has beside others."""
    subject = _subject(bench)
    op = subject.prepare()
    pages, tails = subject.filled(op)
    together = Call(subject.queries(3), (0, 1, 2), (1, 1, 1), subject.lengths)
    out, lse = subject.attend(op, pages, tails, together)
    for row in range(3):
        alone = Call(together.q[row : row + 1].clone(), (row,), (1,), (subject.lengths[row],))
        found = subject.attend(op, pages, tails, alone)
        same_bits(found[0][0], out[row], f"row {row} alone, though batch_invariant is declared")
        same_bits(found[1][0], lse[row], f"row {row} alone, though batch_invariant is declared")
    return Verdict()


def threads(bench: Bench) -> Verdict:
    """Two threads share one op and its pages."""
    subject = _subject(bench)
    op = subject.prepare()
    pages, tails = subject.filled(op)
    stored, jobs = _stored(subject, op, pages, tails), subject.calls()[:2]
    results: list[list[Any]] = [[], []]
    start = threading.Barrier(2)

    def work(index: int) -> None:
        start.wait()
        for _ in range(4):
            try:
                results[index].append(subject.attend(op, pages, tails, jobs[index]))
            except Exception as error:  # noqa: BLE001 - a kernel may raise anything, and it is told below
                results[index].append(error)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for index, found in enumerate(results):
        for each in found:
            if isinstance(each, Exception):
                raise CheckFailedError(f"two threads on one op: {type(each).__name__}: {each}") from each
            subject.check(jobs[index], each, stored, "two threads on one op")
    return Verdict()


def module(bench: Bench) -> Verdict:
    """Deep copy and ``.to(dtype)`` of the model around it leave the result as it is."""
    subject = _subject(bench)
    op = subject.prepare()
    pages, tails = subject.filled(op)
    call = subject.calls()[0]
    before = subject.attend(op, pages, tails, call)[0]
    same_bits(subject.attend(copy.deepcopy(op), pages, tails, call)[0], before, "result of a deep copy")
    if subject.spec.keys.kind != "turboquant" and subject.spec.values.kind != "turboquant" and not subject.spec.keys.scaled:
        model: Any = copy.deepcopy(torch.nn.Sequential(op)).to(torch.float64)
        same_bits(subject.attend(model[0], pages, tails, call)[0], before, "result after model.to(torch.float64)")
    return Verdict()


def errors(bench: Bench) -> Verdict:
    """What does not fit is a HalError, and nothing was written."""
    subject = _subject(bench)
    op = subject.prepare()
    pages, tails = subject.filled(op)
    before = pages.clone(), None if tails is None else tails.clone()
    attempts = {**_bad_appends(subject, op, pages, tails), **_bad_attends(subject, op, pages, tails)}
    for what, attempt in attempts.items():
        try:
            attempt()
        except HalError:
            pass
        except Exception as error:
            raise CheckFailedError(f"{what}: {type(error).__name__}, not a HalError: {str(error).splitlines()[:1]}") from error
        else:
            raise CheckFailedError(f"{what}: no error")
        same_bits(pages, before[0], f"pages after {what}")
        if tails is not None and before[1] is not None:
            same_bits(tails, before[1], f"tails after {what}")
    return Verdict(reason=f"{len(attempts)} kinds of bad arguments")


def _bad_appends(subject: KVSubject, op: KVOp, pages: Tensor, tails: Tensor | None) -> dict[str, Callable[[], Any]]:
    k, v = subject.new_tokens(2)
    start = subject.lengths[2]
    good = {"k": k, "v": v, "slots": subject.slots(2, start, start + 2), "pages": pages}
    last = subject.num_pages * subject.spec.page_size

    def append(**changes: Any) -> Callable[[], Any]:
        a = {**good, **changes}
        owners = subject.tail_ids[2].expand(2).contiguous() if op.tail_bytes else None
        return lambda: op.append(a["pages"], a["k"], a["v"], a["slots"], tails, owners)

    slots = good["slots"]
    return {
        "keys one channel short": append(k=k[..., 1:].contiguous()), "values one token short": append(v=v[1:]),
        "keys of float64": append(k=k.double()), "keys of one head more": append(k=torch.cat((k, k[:, :1]), dim=1)),
        "a slot beyond the pages": append(slots=torch.tensor([int(slots[0]), last], device=slots.device)),
        "a slot of -2": append(slots=torch.tensor([-2, int(slots[1])], device=slots.device)),
        "a slot given twice": append(slots=slots[:1].expand(2).contiguous()),
        "pages one byte short": append(pages=pages[:, 1:].contiguous()),
    }  # fmt: skip


def _bad_attends(subject: KVSubject, op: KVOp, pages: Tensor, tails: Tensor | None) -> dict[str, Callable[[], Any]]:
    call = subject.calls()[0]
    many = Call(subject.queries(5), (2,), (5,), (3,))
    table = subject.table

    def over(changed: Tensor, which: Call = call) -> Callable[[], Any]:
        def attempt() -> None:
            subject.table = changed
            try:
                subject.attend(op, pages, tails, which)
            finally:
                subject.table = table

        return attempt

    wild = table.clone()
    wild[0, 0] = subject.num_pages
    long = replace(call, lengths=(table.shape[1] * subject.spec.page_size + 1, *call.lengths[1:]))
    return {
        "queries one channel short": lambda: subject.attend(op, pages, tails, replace(call, q=call.q[..., 1:].contiguous())),
        "queries of float64": lambda: subject.attend(op, pages, tails, replace(call, q=call.q.double())),
        "a length beyond the table": lambda: subject.attend(op, pages, tails, long),
        "a negative length": lambda: subject.attend(op, pages, tails, replace(call, lengths=(-1, *call.lengths[1:]))),
        "more queries than tokens": lambda: subject.attend(op, pages, tails, many), "a page out of range": over(wild),
        "query counts that miss rows": lambda: subject.attend(op, pages, tails, replace(call, counts=(1, 1, 0))),
        "reading beyond the row": lambda: subject.read(op, pages, tails, 0, table.shape[1] * subject.spec.page_size + 1),
    }  # fmt: skip


def compiled(bench: Bench) -> Verdict:
    """One graph of ``attend``, with the result of eager."""
    subject = _subject(bench)
    op = subject.prepare()
    pages, tails = subject.filled(op)
    torch._dynamo.reset()
    try:
        for call in subject.calls()[:2]:
            given = subject.arguments(op, call)

            function = partial(op.attend, scale=call.scale, tails=tails, sinks=subject.sinks)
            try:
                graph = torch.compile(
                    lambda q, t, n, s, owners, f=function: f(q, pages, t, n, s, tail_ids=owners),
                    fullgraph=True,
                    backend="aot_eager",
                )
                found = graph(*given)
            except Exception as error:
                first = str(error).strip().splitlines()[0] if str(error).strip() else ""
                raise CheckFailedError(f"torch.compile of attend: {type(error).__name__}: {first}") from error
            subject.check(call, found, _stored(subject, op, pages, tails), "compiled attend")
    finally:
        torch._dynamo.reset()
    return Verdict()


def opcheck(bench: Bench) -> Verdict:
    """Schema and fake kernel of each torch op that the methods reach."""
    from hal_core.testing.checks.graph import Recorder, check_recorded

    subject = _subject(bench)
    op = subject.prepare()
    with torch.no_grad(), Recorder() as recorder:
        pages, tails = subject.filled(op)
        subject.attend(op, pages, tails, subject.calls()[0])
        subject.read(op, pages, tails, 0, subject.lengths[0])
    return check_recorded(recorder)


#: By the names of ``hal_core.testing.case.CHECKS``; declaration and refusals are those of every kernel.
CACHE_FUNCTIONS: dict[str, Callable[[Bench], Verdict]] = {
    "accuracy": accuracy, "effects": effects, "layout": layout, "update": update, "memory": memory, "rows": rows,
    "determinism": determinism, "batch_invariance": batch_invariance, "threads": threads, "module": module, "errors": errors,
    "compile": compiled, "opcheck": opcheck,
}  # fmt: skip
