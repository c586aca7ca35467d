"""A recorded launch of a compiled kernel, again: by Triton's launcher, or on CUDA by the driver's own call, which costs less than half.

The driver copies a kernel's parameters from where pointers say. They are kept there, and before a launch only those that moved are
written. What is launched so is a plain grid of blocks, with the parameters that Triton's launcher gives; everything else stays with it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.runtime import driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["DriverLaunch", "Launch", "relaunched", "watched"]

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

    def again(self, stream: int, tensors: list[Tensor | None], pointers: list[int]) -> None:
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


class _Config(ctypes.Structure):
    """``CUlaunchConfig``: blocks, threads of each, shared bytes, the stream, attributes."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class DriverLaunch:
    """By the driver. Launches of one must not overlap: values and config are what the driver reads.

    values: parameters, eight bytes each. places: as of a launch, with numbers of parameters.
    """

    launch: Launch
    call: Callable[..., int]
    args: tuple[Any, ...]
    values: Any
    config: _Config
    places: tuple[tuple[int, int, int], ...]

    def again(self, stream: int, tensors: list[Tensor | None], pointers: list[int]) -> None:
        values = self.values
        for at, source, offset in self.places:
            values[at] = pointers[source] + offset
        self.config.stream = stream
        if self.call(*self.args):
            # nothing was launched: Triton's launcher gives a thread its context, and errors their words
            self.launch.again(stream, tensors, pointers)

    def bound(self, first: int, rooms: list[Tensor]) -> Launch | DriverLaunch:
        """As :meth:`Launch.bound`, with parameters of its own."""
        return relaunched(self.launch.bound(first, rooms))


def watched() -> bool:
    """Whether something wants to hear of launches, which only those by Triton's launcher tell."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@functools.cache
def _driver_call() -> Callable[..., int] | None:
    """``cuLaunchKernelEx``; None where the driver is another."""
    if driver.active.get_current_target().backend != "cuda":
        return None
    try:
        return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None


def relaunched(launch: Launch) -> Launch | DriverLaunch:
    """The launch by the driver where all of it is understood, else as it is."""
    used = _parameters(launch)
    call = None if used is None else _driver_call()
    if used is None or call is None:
        return launch
    kernel, number = launch.kernel, {at: index for index, (at, _) in enumerate(used)}
    # two more, of scratch memory that is not used
    values = (ctypes.c_uint64 * (len(used) + 2))()
    for index, (_, value) in enumerate(used):
        values[index] = value
    where = ctypes.addressof(values)
    pointers = (ctypes.c_void_p * len(values))(*(where + 8 * index for index in range(len(values))))
    warps, _, shared = kernel.packed_metadata
    config = _Config(launch.grid, (32 * warps, 1, 1), shared)
    args = (ctypes.byref(config), ctypes.c_void_p(kernel.function), pointers, None)
    places = tuple((number[at], source, offset) for at, source, offset in launch.places if at in number)
    return DriverLaunch(launch, call, args, values, config, places)


def _parameters(launch: Launch) -> list[tuple[int, int]] | None:
    """Arguments that the compiled kernel takes, with their eight bytes as a number; None where not all of it is understood."""
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
