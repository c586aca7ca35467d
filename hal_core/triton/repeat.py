"""Calls of an op, repeated: what the first call of some shapes launched is launched again with the pointers of later calls.

Triton looks at every argument of every launch and at what the kernel was compiled for, and ops look up tiles, sizes and weights. All of
that depends on shapes alone and costs tens of microseconds a kernel. A recorded call is its launches as Triton's compiled kernels take
them: numbers as they were, and pointers, of which those into the op's inputs and into memory made during the call are filled in.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

__all__ = ["Repeats", "called", "launched", "made", "room"]

#: Bytes of one call, and of all calls of an op, up to which memory made during a call is kept for the next instead of asked for again.
_KEPT, _KEPT_IN_ALL = 1 << 19, 1 << 20
#: Recorded calls of an op; with other shapes the oldest that keeps no memory goes.
_MOST = 64
#: What pointers are multiples of, or a kernel is compiled anew.
_ALIGNED = 16


class _Recorder:
    """What happens during one call, with its tensors, which live until the end: no address may stand for two."""

    def __init__(self) -> None:
        self.rooms: list[Tensor] = []
        self.events: list[_Event] = []
        self.whole = True


@dataclass(frozen=True, eq=False)
class _Event:
    """A launch by a compiled kernel (``target``), or a call; result: of a call that makes a tensor."""

    target: Any
    args: tuple[Any, ...]
    grid: tuple[int, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()
    result: Tensor | None = None

    @property
    def handed(self) -> tuple[Any, ...]:
        """All arguments in order, those by name last."""
        return (*self.args, *(value for _, value in self.named))


_local = threading.local()


def _recorder() -> _Recorder | None:
    # while torch.compile looks at a call, nothing is launched
    return None if torch.compiler.is_compiling() else getattr(_local, "recorder", None)


def room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory for what lies between the steps of an op."""
    recorder = _recorder()
    if recorder is None:
        return torch.empty(shape, dtype=dtype, device=device)
    with torch.inference_mode(False):  # kept for calls in any mode
        recorder.rooms.append(torch.empty(shape, dtype=dtype, device=device))
    return recorder.rooms[-1]


def launched(kernel: Any, grid: tuple[int, ...], values: dict[str, Any], compiled: Any) -> None:
    """Tell of a launch; compiled: what Triton gave for it, None in its interpreter."""
    recorder = _recorder()
    if recorder is None:
        return
    if compiled is None or not hasattr(compiled, "packed_metadata"):
        recorder.whole = False
        return
    recorder.events.append(_Event(compiled, tuple(values[name] for name in kernel.arg_names), (*grid, 1, 1)[:3]))


def called(function: Callable[..., Any], *args: Any, **named: Any) -> None:
    """Call what writes into tensors that it is given, as a step of an op."""
    function(*args, **named)
    recorder = _recorder()
    if recorder is not None:
        recorder.events.append(_Event(function, args, named=tuple(named.items())))


def made(function: Callable[..., Tensor], *args: Any, **named: Any) -> Tensor:
    """Call what gives a new tensor, as a step of an op."""
    result = function(*args, **named)
    recorder = _recorder()
    if recorder is not None:
        recorder.events.append(_Event(function, args, named=tuple(named.items()), result=result))
    return result


@dataclass(frozen=True, eq=False)
class _Launch:
    """places: (argument, which tensor of the call, bytes from its beginning)."""

    run: Any
    head: tuple[int, ...]
    function: Any
    metadata: Any
    args: tuple[Any, ...]
    places: tuple[tuple[int, int, int], ...]

    def again(self, stream: int, tensors: list[Tensor | None], pointers: list[int]) -> None:
        args = list(self.args)
        for at, source, offset in self.places:
            args[at] = pointers[source] + offset
        self.run(*self.head, stream, self.function, self.metadata, None, None, None, *args)


@dataclass(frozen=True, eq=False)
class _Call:
    """places: (argument, which tensor of the call; shape, strides and offset in elements where it is a view of that)."""

    function: Any
    args: tuple[Any, ...]
    names: tuple[str, ...]
    places: tuple[tuple[int, int, tuple[Any, ...] | None], ...]
    makes: bool

    def again(self, stream: int, tensors: list[Tensor | None], pointers: list[int]) -> None:
        args = list(self.args)
        for at, source, view in self.places:
            tensor = tensors[source]
            if view is not None and tensor is not None:
                shape, strides, offset = view
                tensor = tensor.as_strided(shape, strides, tensor.storage_offset() + offset)
            args[at] = tensor
        first = len(args) - len(self.names)
        result = self.function(*args[:first], **dict(zip(self.names, args[first:], strict=True))) if self.names else self.function(*args)
        if self.makes:
            tensors.append(result)
            pointers.append(result.data_ptr())


@dataclass(frozen=True, eq=False)
class _Recorded:
    """steps of a call. rooms: shape, dtype and device of memory to make; kept: memory that is there, for one call at a time.

    constants: tensors whose addresses launches hold.
    """

    steps: tuple[_Launch | _Call, ...]
    rooms: tuple[tuple[Any, ...], ...]
    kept: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    stream: Callable[[int], int]
    device: int

    def again(self, tensors: list[Tensor | None], pointers: list[int]) -> None:
        for shape, dtype, device in self.rooms:
            tensors.append(torch.empty(shape, dtype=dtype, device=device))
            pointers.append(tensors[-1].data_ptr())  # type: ignore[union-attr]
        stream = self.stream(self.device)
        for step in self.steps:
            step.again(stream, tensors, pointers)


class Repeats:
    """The recorded calls of one op. As with the op itself, calls on several streams must not overlap; threads may share it."""

    def __init__(self) -> None:
        self.known: dict[Hashable, _Recorded] = {}
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> Repeats:
        return Repeats()

    def __reduce__(self) -> tuple[Any, ...]:
        return Repeats, ()

    def __call__(self, key: Hashable, tensors: tuple[Tensor | None, ...], call: Callable[[], object]) -> None:
        """``call()``, or its launches again.

        Args:
            key: all that the launches depend on besides the op: shapes and dtypes.
            tensors: contiguous tensors that the call reads and writes, other than the op's own.
            call: the call itself; what it does is told to :func:`launched`, :func:`called` and :func:`made`, its memory by :func:`room`.
        """
        pointers, bits = [], 0
        for tensor in tensors:
            pointers.append(0 if tensor is None else tensor.data_ptr())
            bits |= pointers[-1]
        found = self.known.get(key)
        if found is not None and not bits % _ALIGNED and driver.active.get_current_device() == found.device:
            if found.kept:
                with self.lock:
                    found.again([*tensors], pointers)
            else:
                found.again([*tensors], pointers)
        elif found is None and not bits % _ALIGNED and _recordable(tensors):
            self._record(key, tensors, call)
        else:
            call()

    def _record(self, key: Hashable, tensors: tuple[Tensor | None, ...], call: Callable[[], object]) -> None:
        _local.recorder = recorder = _Recorder()
        try:
            call()
        finally:
            _local.recorder = None
        if not recorder.whole or not recorder.events or not _understood(recorder, tensors):
            return
        with self.lock:
            size = sum(each.nbytes for each in recorder.rooms)
            had = sum(each.nbytes for other in self.known.values() for each in other.kept)
            keeps = size <= _KEPT and had + size <= _KEPT_IN_ALL
            if len(self.known) >= _MOST:
                gone = next((other for other, recorded in self.known.items() if not recorded.kept), None)
                self.known.pop(gone, None)
            if len(self.known) < _MOST:
                self.known[key] = _recorded(recorder, tensors, keeps)


def _understood(recorder: _Recorder, tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether all that a call handed on can be found again: results in one piece, and no views of other dtypes."""
    if any(event.result is not None and not event.result.is_contiguous() for event in recorder.events):
        return False
    whole = [*(t for t in tensors if t is not None), *recorder.rooms]
    kinds = {t.untyped_storage().data_ptr(): t.dtype for t in whole}
    handed = (value for event in recorder.events if not event.grid for value in event.handed if isinstance(value, torch.Tensor))
    return all(kinds.get(value.untyped_storage().data_ptr(), value.dtype) == value.dtype for value in handed)


def _recordable(tensors: tuple[Tensor | None, ...]) -> bool:
    """On one GPU, the current one; apart from each other; and not under capture, whose memory is the graph's."""
    given = [tensor for tensor in tensors if tensor is not None]
    if any(not tensor.is_cuda or not tensor.is_contiguous() for tensor in given) or torch.cuda.is_current_stream_capturing():
        return False
    if any(tensor.device.index != driver.active.get_current_device() for tensor in given):
        return False
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in given)
    return all(one[1] <= two[0] for one, two in itertools.pairwise(spans))


def _recorded(recorder: _Recorder, tensors: tuple[Tensor | None, ...], keeps: bool) -> _Recorded:
    """What happened, with the places of what another call has elsewhere."""
    results = [event.result for event in recorder.events if event.result is not None]
    moving = [*tensors, *([] if keeps else recorder.rooms), *results]
    spans = [(0, 0) if t is None else (t.data_ptr(), t.data_ptr() + t.nbytes) for t in moving]

    def source(tensor: Tensor) -> int | None:
        pointer = tensor.data_ptr()
        return next((index for index, (begin, end) in enumerate(spans) if begin <= pointer < end), None)

    steps = tuple((_launch if event.grid else _call)(event, moving, source) for event in recorder.events)
    rooms = () if keeps else tuple((tuple(t.shape), t.dtype, t.device) for t in recorder.rooms)
    given = (value for event in recorder.events for value in event.handed if isinstance(value, torch.Tensor))
    constants = tuple({value.data_ptr(): value for value in given if source(value) is None}.values())
    kept, active = tuple(recorder.rooms) if keeps else (), driver.active
    return _Recorded(steps, rooms, kept, constants, active.get_current_stream, active.get_current_device())


def _launch(event: _Event, moving: list[Tensor | None], source: Callable[[Tensor], int | None]) -> _Launch:
    args, places = list(event.args), []
    for at, value in enumerate(event.args):
        if isinstance(value, torch.Tensor):
            args[at] = value.data_ptr()
            index = source(value)
            if index is not None:
                places.append((at, index, args[at] - moving[index].data_ptr()))  # type: ignore[union-attr]
    kernel = event.target
    return _Launch(kernel.run, event.grid, kernel.function, kernel.packed_metadata, tuple(args), tuple(places))


def _call(event: _Event, moving: list[Tensor | None], source: Callable[[Tensor], int | None]) -> _Call:
    args, places = list(event.handed), []
    for at, value in enumerate(args):
        index = source(value) if isinstance(value, torch.Tensor) else None
        if index is not None:
            whole = moving[index]
            assert whole is not None  # it has an address
            offset = (value.data_ptr() - whole.data_ptr()) // value.itemsize
            same = (value.shape, value.stride(), offset) == (whole.shape, whole.stride(), 0)
            places.append((at, index, None if same else (tuple(value.shape), value.stride(), offset)))
            args[at] = None  # or its memory would stay
    names = tuple(name for name, _ in event.named)
    return _Call(event.target, tuple(args), names, tuple(places), event.result is not None)
