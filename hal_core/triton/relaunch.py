"""A recorded launch of a compiled kernel, again: by Triton's launcher, or on CUDA by the driver's own call, which costs a quarter less.

The driver copies a kernel's parameters from where pointers say. They are kept there, and before a launch only those that moved are
written. What is launched so is a plain grid of blocks, with the parameters that Triton's launcher gives; everything else stays with it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from triton import knobs
from triton.runtime import driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["WORD", "Call", "DriverLaunch", "Launch", "LaunchConfig", "Moved", "Step", "driven", "driver_library", "relaunched", "watched"]

#: Bytes of a parameter: of the widest.
WORD = 8
#: Triton's words for the types of parameters: how each lies in its eight bytes.
_FORMATS = {
    "i1": "<b", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q", "fp32": "<f",
    "fp64": "<d",
}  # fmt: skip
#: What Triton's launcher says of itself, and what of it a plain launch has.
_PLAIN = {"num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False, "launch_pdl": False}
#: Bytes of a block's shared memory up to which no release of Triton asks for more than a size.
_MOST_SHARED = 228 << 10


@dataclass(frozen=True, eq=False)
class Launch:
    """By Triton's launcher. places: (argument, which tensor of the call, bytes from its beginning)."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    places: tuple[tuple[int, int, int], ...]

    def again(self, stream: int, tensors: Any, pointers: list[int]) -> None:
        args, kernel = list(self.args), self.kernel
        for at, source, offset in self.places:
            args[at] = pointers[source] + offset
        kernel.run(*self.grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *args)

    def bound(self, first: int, rooms: list[Tensor]) -> Launch:
        """With the tensors from number ``first`` on in their places."""
        args, places = list(self.args), []
        for at, source, offset in self.places:
            if first <= source < first + len(rooms):
                args[at] = rooms[source - first].data_ptr() + offset
            else:
                places.append((at, source, offset))
        return replace(self, args=tuple(args), places=tuple(places))


@dataclass(frozen=True, eq=False)
class Call:
    """By the function that was called.

    places: (argument, which tensor of the call; shape, strides and offset in elements where it is a view of that).
    kernel: all that it does is the launch of one.
    """

    function: Any
    args: tuple[Any, ...]
    named: dict[str, Any]
    places: tuple[tuple[int | str, int, tuple[Any, ...] | None], ...]
    makes: bool
    kernel: bool

    def again(self, stream: int, tensors: Any, pointers: list[int]) -> None:
        args, named = [*self.args], {**self.named}
        for at, source, view in self.places:
            target: Any = args if type(at) is int else named
            target[at] = tensors[source] if view is None else _viewed(tensors[source], view)
        result = self.function(*args, **named)
        if self.makes:
            tensors.append(result)
            pointers.append(result.data_ptr())

    def bound(self, first: int, rooms: list[Tensor]) -> Call:
        """With the tensors from number ``first`` on in their places."""
        args, named, places = [*self.args], {**self.named}, []
        for at, source, view in self.places:
            if first <= source < first + len(rooms):
                target: Any = args if type(at) is int else named
                target[at] = rooms[source - first] if view is None else _viewed(rooms[source - first], view)
            else:
                places.append((at, source, view))
        return replace(self, args=tuple(args), named=named, places=tuple(places))


def _viewed(tensor: Tensor | None, view: tuple[Any, ...]) -> Tensor:
    assert tensor is not None  # it had an address
    shape, strides, offset = view
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``: blocks, threads of each, shared bytes, the stream, attributes."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class Moved:
    """Addresses that each repetition has anew, in memory where the driver finds them: one word for all launches that take it.

    known: how many tensors have addresses before the first launch; those of others, which steps make, launches write themselves.
    """

    def __init__(self, places: int, known: int) -> None:
        self.known = known
        self.values = (ctypes.c_uint64 * places)()
        self.places: dict[tuple[int, int], int] = {}

    def where(self, source: int, offset: int) -> int:
        """The word of an address: of a tensor of the call, and bytes from its beginning."""
        return ctypes.addressof(self.values) + WORD * self.places.setdefault((source, offset), len(self.places))

    def write(self, pointers: list[int]) -> None:
        values = self.values
        for (source, offset), at in self.places.items():
            values[at] = pointers[source] + offset


class Step(Protocol):
    """A step of a recorded call."""

    def again(self, stream: int, tensors: Any, pointers: list[int]) -> None: ...


@dataclass(frozen=True, eq=False)
class DriverLaunch:
    """By the driver. Repetitions must not overlap: what the driver reads is one for all.

    otherwise: the same by the library that launched it first. kept: what ``args`` point to. places: words of addresses that ``moved`` does
    not have, with the tensor and bytes from its beginning. maps: descriptors of tensors, each with the word of its tensor's address, and
    the driver's function that puts one into the other.
    """

    otherwise: Step
    call: Callable[..., int]
    args: tuple[Any, ...]
    kept: tuple[Any, ...]
    places: tuple[tuple[ctypes.c_uint64, int, int], ...]
    maps: tuple[tuple[Callable[..., int], ctypes.c_void_p, ctypes.c_uint64], ...]

    def again(self, stream: int, tensors: Any, pointers: list[int]) -> None:
        for word, source, offset in self.places:
            word.value = pointers[source] + offset
        failed = 0
        for replaced, descriptor, word in self.maps:
            failed |= replaced(descriptor, word)
        if failed or self.call(*self.args):
            # nothing was launched: a launcher of the runtime's gives a thread its context, and errors their words
            self.otherwise.again(stream, tensors, pointers)


def driven(
    otherwise: Step, function: int, config: LaunchConfig, where: list[int], kept: tuple[Any, ...],
    places: tuple[tuple[ctypes.c_uint64, int, int], ...] = (), maps: dict[int, int] | None = None,
) -> DriverLaunch:  # fmt: skip
    """A launch of parameters at the addresses ``where``. maps: of parameters that are descriptors, where the addresses in them are kept."""
    library = driver_library()
    assert library is not None  # or there would be no launch
    args = (ctypes.byref(config), ctypes.c_void_p(function), (ctypes.c_void_p * len(where))(*where), None)
    pairs = ((ctypes.c_void_p(where[at]), ctypes.c_uint64.from_address(word)) for at, word in (maps or {}).items())
    found = tuple((library.cuTensorMapReplaceAddress, *pair) for pair in pairs)
    return DriverLaunch(otherwise, library.cuLaunchKernelEx, args, kept, places, found)


def watched() -> bool:
    """Whether something wants to hear of launches, which only those by Triton's launcher tell."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@functools.cache
def driver_library() -> Any:
    """CUDA's driver; None where it is another."""
    if driver.active.get_current_target().backend != "cuda":
        return None
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def relaunched(launch: Launch, stream: int, moved: Moved) -> Launch | DriverLaunch:
    """The launch on a stream by the driver where all of it is understood, else as it is."""
    used = _parameters(launch)
    if used is None or driver_library() is None:
        return launch
    # two more, of scratch memory that is not used
    values = (ctypes.c_uint64 * (len(used) + 2))(*(value for _, value in used))
    where = [ctypes.addressof(values) + WORD * index for index in range(len(values))]
    number, places = {at: index for index, (at, _) in enumerate(used)}, []
    for at, source, offset in launch.places:
        if at in number and source < moved.known:
            where[number[at]] = moved.where(source, offset)
        elif at in number:
            places.append((ctypes.c_uint64.from_address(where[number[at]]), source, offset))
    warps, _, shared = launch.kernel.packed_metadata
    config = LaunchConfig(launch.grid, (32 * warps, 1, 1), shared, stream)
    return driven(launch, launch.kernel.function, config, where, (values, moved), tuple(places))


def _parameters(launch: Launch) -> list[tuple[int, int]] | None:
    """Arguments that the compiled kernel takes, with their words as numbers; None where not all of it is understood."""
    kernel = launch.kernel
    launcher, signature = kernel.run, getattr(getattr(kernel, "src", None), "signature", None)
    if signature is None or any(getattr(launcher, name, None) != value for name, value in _PLAIN.items()):
        return None
    if getattr(launcher, "gsan_enabled", False) or kernel.packed_metadata[2] > _MOST_SHARED or len(signature) != len(launch.args):
        return None
    found = []
    for at, (kind, value) in enumerate(zip(signature.values(), launch.args, strict=True)):
        if kind == "constexpr":
            continue
        form = "<Q" if kind[0] == "*" else _FORMATS.get(kind)
        if form is None or value is None:
            return None
        found.append((at, int.from_bytes(struct.pack(form, value), "little")))
    return found
