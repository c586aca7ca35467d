"""Calls of an op, repeated: what the first call of some shapes launched is launched again with the pointers of later calls.

Triton looks at every argument of every launch and at what the kernel was compiled for, and ops look up tiles, sizes and weights. All of
that depends on shapes alone and costs tens of microseconds a kernel. A recorded call is its launches as Triton's compiled kernels take
them: numbers as they were, and pointers, of which those into the op's inputs and into memory made during the call are filled in.
"""

from __future__ import annotations

import itertools
import operator
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime import driver

from hal_core.triton.captured import captured
from hal_core.triton.relaunch import Call, Launch, Moved, relaunched, watched

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor, nn

    from hal_core.triton.relaunch import Step

__all__ = ["Repeats", "buffers_of", "called", "launched", "made", "room"]

#: Bytes between the steps of a call up to which it takes them from the memory that its stream's calls share, which saves asking for them.
_SHARED = 1 << 25
#: Bytes that rooms in it begin at multiples of.
_APART = 256
#: Recorded calls of an op; the oldest goes that was not used since it was the oldest.
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
    """A launch by a compiled kernel (``target``), or a call; result: of a call that makes a tensor; kernel: it launches just one."""

    target: Any
    args: tuple[Any, ...]
    grid: tuple[int, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()
    result: Tensor | None = None
    kernel: bool = False

    @property
    def handed(self) -> tuple[Any, ...]:
        """All arguments in order, those by name last."""
        return (*self.args, *(value for _, value in self.named))


class _Local(threading.local):
    recorder: _Recorder | None = None


_local = _Local()
#: In place of a recorder within what is a step already: what that repeats is called, and nothing is told.
_QUIET = _Recorder()


def _recorder() -> _Recorder | None:
    # while torch.compile looks at a call, nothing is launched
    found = None if torch.compiler.is_compiling() else _local.recorder
    return None if found is _QUIET else found


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


def called(function: Callable[..., Any], *args: Any, kernel: bool = False, **named: Any) -> None:
    """Call what writes into tensors that it is given, as a step of an op.

    kernel: it launches a kernel and does nothing else, so that repetitions may launch that.
    """
    _step(function, args, named, kernel=kernel)


def made(function: Callable[..., Tensor], *args: Any, **named: Any) -> Tensor:
    """Call what gives a new tensor, as a step of an op."""
    result: Tensor = _step(function, args, named, makes=True)
    return result


def _step(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], makes: bool = False, kernel: bool = False) -> Any:
    recorder = _recorder()
    if recorder is None:
        return function(*args, **named)
    _local.recorder = _QUIET
    try:
        result = function(*args, **named)
    finally:
        _local.recorder = recorder
    recorder.events.append(_Event(function, args, named=tuple(named.items()), result=result if makes else None, kernel=kernel))
    return result


_Step = Launch | Call

#: Memory of the calls on a stream, which follow one another; by device and the stream's handle.
_shared: dict[tuple[int, int], Tensor] = {}
#: The launches of a call go together, whatever other threads do: they share that memory, and a launch's parameters with other calls.
_turn = threading.Lock()


def _memory(device: int, stream: int, size: int) -> Tensor:
    found = _shared.get((device, stream))
    if found is None or found.numel() < size:
        with torch.inference_mode(False):  # for calls in any mode
            found = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, device=_device(device))
        _shared[device, stream] = found
    return found


def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


@dataclass(frozen=True, eq=False)
class _Plan:
    """A call's steps on one stream. memory, rooms: what lies between them, where it is that of the stream."""

    steps: tuple[Step, ...]
    moved: Moved
    memory: Tensor | None
    rooms: tuple[Tensor, ...]


@dataclass(eq=False)
class _Recorded:
    """steps of a call. rooms: shape, dtype, first byte and bytes of memory between them; size: bytes of all.

    inputs: number of tensors before the rooms. constants: tensors whose addresses launches hold. plans: by stream, and whether a graph
    captures it. used: since it was last the oldest.
    """

    steps: tuple[_Step, ...]
    inputs: int
    rooms: tuple[tuple[Any, ...], ...]
    size: int
    constants: tuple[Tensor, ...]
    device: int
    makes: bool
    plans: dict[tuple[int, bool], _Plan] = field(default_factory=dict)
    used: bool = False

    @property
    def shares(self) -> bool:
        """Whether what lies between the steps is in the memory of the stream, unless a graph captures them."""
        return 0 < self.size <= _SHARED

    def again(self, given: Sequence[Tensor | None], pointers: list[int]) -> None:
        """The steps with other tensors and their addresses."""
        stream = driver.active.get_current_stream(self.device)
        # the default stream has the handle 0 and cannot be captured
        capturing = stream != 0 and torch.cuda.is_current_stream_capturing()
        alone = capturing or not self.shares
        if alone:
            rooms = [torch.empty(shape, dtype=dtype, device=_device(self.device)) for shape, dtype, _, _ in self.rooms]
            given = [*given, *rooms]
            pointers += [room.data_ptr() for room in rooms]
        with _turn:
            _local.recorder = _QUIET  # a step that repeats an op would wait for this turn's end
            try:
                plan = self.plans.get((stream, capturing))
                if plan is None or plan.memory is not (None if alone else _shared.get((self.device, stream))):
                    plan = self.plans[stream, capturing] = self._planned(stream, capturing, given)
                if self.makes and not alone:  # what is made counts from after the rooms
                    given = [*given, *plan.rooms]
                    pointers += [0] * len(plan.rooms)
                plan.moved.write(pointers)
                for step in plan.steps:
                    step.again(stream, given, pointers)
            finally:
                _local.recorder = None

    def _planned(self, stream: int, capturing: bool, given: Sequence[Tensor | None]) -> _Plan:
        if len(self.plans) >= _MOST:
            self.plans.clear()
        memory, rooms, steps = None, [], self.steps
        if self.shares and not capturing:
            memory = _memory(self.device, stream, self.size)
            with torch.inference_mode(False):
                rooms = [memory[first : first + size].view(dtype).view(shape) for shape, dtype, first, size in self.rooms]
                steps = tuple(step.bound(self.inputs, rooms) for step in self.steps)
        moved = Moved(sum(len(step.places) for step in steps), self.inputs + len(self.rooms))

        def fastest(step: _Step) -> Step:
            if isinstance(step, Launch):
                return relaunched(step, stream, moved)
            # no capture during one, nor for what takes long anyway
            looked = step.kernel and not capturing and self.size <= _SHARED
            found = captured(step, given, stream, self.device, moved) if looked else None
            return step if found is None else found

        return _Plan(tuple(fastest(step) for step in steps), moved, memory, tuple(rooms))


class Repeats:
    """The recorded calls of one op. Threads may share it, as the op. owned: the op's tensors."""

    def __init__(self, owned: list[Tensor | None] | None = None) -> None:
        self.known: dict[Hashable, _Recorded] = {}
        self.lock = threading.Lock()
        self.owned = owned

    def __deepcopy__(self, memo: object) -> Repeats:
        return Repeats()

    def __reduce__(self) -> tuple[Any, ...]:
        return Repeats, ()

    def of(self, op: nn.Module) -> bool:
        """Whether the op's tensors are those of before: recorded calls hold their addresses, and an op's buffers can be replaced."""
        now, owned = buffers_of(op), self.owned
        if owned is None:
            self.owned = now
            return True
        return len(now) == len(owned) and all(map(operator.is_, now, owned))

    def __call__(self, key: Hashable, tensors: tuple[Tensor | None, ...], call: Callable[[], object]) -> None:
        """``call()``, or its launches again, on the device of the tensors.

        Args:
            key: all that the launches depend on besides the op: shapes and dtypes.
            tensors: contiguous tensors that the call reads and writes, other than the op's own; the first is never None.
            call: the call itself; what it does is told to :func:`launched`, :func:`called` and :func:`made`, its memory by :func:`room`.
        """
        if _local.recorder is not None:  # a step of another op's call, which records it
            call()
            return
        pointers, bits = [], 0
        for tensor in tensors:
            pointer = 0 if tensor is None else tensor.data_ptr()
            pointers.append(pointer)
            bits |= pointer
        first = tensors[0]
        assert first is not None  # as said above
        key = first.get_device(), key
        found, plain = self.known.get(key), not (bits % _ALIGNED or watched())
        if plain and found is not None and driver.active.get_current_device() == found.device:
            found.used = True
            found.again(tensors, pointers)
            return
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]  # launches go to the current one
            if not plain:
                call()
            elif found is None:
                self._record(key, tensors, call)
            else:
                found.again(tensors, pointers)

    def _record(self, key: Hashable, tensors: tuple[Tensor | None, ...], call: Callable[[], object]) -> None:
        if not _recordable(tensors):
            call()
            return
        _local.recorder = recorder = _Recorder()
        try:
            call()
        finally:
            _local.recorder = None
        if not recorder.whole or not recorder.events or not _understood(recorder, tensors):
            return
        with self.lock:
            while len(self.known) >= _MOST:
                oldest = next(iter(self.known))
                gone = self.known.pop(oldest)
                if gone.used:
                    gone.used, self.known[oldest] = False, gone
            self.known[key] = _recorded(recorder, tensors)


def buffers_of(op: nn.Module) -> list[Tensor | None]:
    """The buffers of an op and of the matrices in it."""
    found: list[Tensor | None] = [*op._buffers.values()]
    for part in op._modules.values():
        if part is not None:
            found += part._buffers.values()
    return found


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


def _recorded(recorder: _Recorder, tensors: tuple[Tensor | None, ...]) -> _Recorded:
    """What happened, with the places of what another call has elsewhere."""
    results = [event.result for event in recorder.events if event.result is not None]
    moving = [*tensors, *recorder.rooms, *results]
    spans = [(0, 0) if t is None else (t.data_ptr(), t.data_ptr() + t.nbytes) for t in moving]

    def source(tensor: Tensor) -> int | None:
        pointer = tensor.data_ptr()
        return next((index for index, (begin, end) in enumerate(spans) if begin <= pointer < end), None)

    steps = tuple((_launch if event.grid else _call)(event, moving, source) for event in recorder.events)
    rooms, size = [], 0
    for each in recorder.rooms:
        rooms.append((tuple(each.shape), each.dtype, size, each.nbytes))
        size += -(-each.nbytes // _APART) * _APART
    given = (value for event in recorder.events for value in event.handed if isinstance(value, torch.Tensor))
    constants = tuple({value.data_ptr(): value for value in given if source(value) is None}.values())
    return _Recorded(steps, len(tensors), tuple(rooms), size, constants, driver.active.get_current_device(), bool(results))


def _launch(event: _Event, moving: list[Tensor | None], source: Callable[[Tensor], int | None]) -> Launch:
    args, places = list(event.args), []
    for at, value in enumerate(event.args):
        if isinstance(value, torch.Tensor):
            args[at] = value.data_ptr()
            index = source(value)
            if index is not None:
                places.append((at, index, args[at] - moving[index].data_ptr()))  # type: ignore[union-attr]
    return Launch(event.target, event.grid, tuple(args), tuple(places))


def _call(event: _Event, moving: list[Tensor | None], source: Callable[[Tensor], int | None]) -> Call:
    args, named, places = list(event.args), dict(event.named), []
    handed: list[tuple[int | str, Any]] = [*enumerate(event.args), *event.named]
    for at, value in handed:
        index = source(value) if isinstance(value, torch.Tensor) else None
        if index is not None:
            whole = moving[index]
            assert whole is not None  # it has an address
            offset = (value.data_ptr() - whole.data_ptr()) // value.itemsize
            same = (value.shape, value.stride(), offset) == (whole.shape, whole.stride(), 0)
            places.append((at, index, None if same else (tuple(value.shape), value.stride(), offset)))
            target: Any = args if isinstance(at, int) else named
            target[at] = None  # or its memory would stay
    return Call(event.target, tuple(args), named, tuple(places), event.result is not None, event.kernel)
