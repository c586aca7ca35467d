"""The one kernel that another library's call launches, read from captures of the call, so that repetitions launch it without the call.

A capture runs nothing: the driver notes what would be launched, with its parameters. Two captures, over other tensors in the places of
those that later calls have elsewhere, show which parameters are their addresses, or descriptors with them. All else has to be the same
in both.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hal_core.triton import relaunch
from hal_core.triton.relaunch import WORD, LaunchConfig, driven

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from hal_core.triton.relaunch import DriverLaunch, Moved, Step

__all__ = ["captured"]

#: What the driver calls: captures that concern this thread alone; streams that wait for no other; nodes that are kernels.
_THREAD_LOCAL, _NON_BLOCKING, _KERNEL = 1, 1, 0
#: Attributes of a launch that would have to be handed on: cooperative, and the size of clusters.
_COOPERATIVE, _CLUSTER = 2, 4
#: What the driver answers when it is asked for a parameter beyond the last.
_NO_SUCH = 1
#: More parameters than kernels have.
_MOST = 256
#: Bytes of a call's tensors up to which others like them are made: a launch of more takes longer than the call around it.
_COPIED = 1 << 25
#: Bytes of a tensor's descriptor, and what its address is a multiple of.
_DESCRIPTOR, _ALIGNED = 128, 64


class _Node(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS``, second version."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)), ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )  # fmt: skip


@dataclass(frozen=True)
class _Kernel:
    """A launch as it was captured; parameters: their bytes."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    parameters: tuple[bytes, ...]


class _RefusedError(Exception):
    """The driver says no; or there is something that a plain launch of one kernel does not have."""


def _checked(code: int) -> None:
    if code:
        raise _RefusedError(code)


@functools.cache
def _stream(device: int) -> Any:
    """One that nothing else runs on, as those of torch's pool may."""
    made, library = ctypes.c_void_p(), relaunch.driver_library()
    assert library is not None  # or nothing is captured
    _checked(library.cuStreamCreate(ctypes.byref(made), _NON_BLOCKING))
    return torch.cuda.ExternalStream(made.value, device=device)  # type: ignore[no-untyped-call]


def _captured(library: Any, stream: Any, call: Callable[[], object]) -> _Kernel:
    handle, graph = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p()
    _checked(library.cuStreamBeginCapture_v2(handle, _THREAD_LOCAL))
    try:
        try:
            with torch.cuda.stream(stream):
                call()
        finally:
            code = library.cuStreamEndCapture(handle, ctypes.byref(graph))
        _checked(code)
        return _only_kernel(library, graph)
    except RuntimeError as error:  # what the call does cannot be captured
        raise _RefusedError from error
    finally:
        if graph.value:
            library.cuGraphDestroy(graph)


def _only_kernel(library: Any, graph: ctypes.c_void_p) -> _Kernel:
    count, nodes, kind, node = ctypes.c_size_t(2), (ctypes.c_void_p * 2)(), ctypes.c_int(-1), _Node()
    _checked(library.cuGraphGetNodes(graph, nodes, ctypes.byref(count)))
    if count.value != 1:
        raise _RefusedError(f"{count.value} nodes")
    first = ctypes.c_void_p(nodes[0])
    _checked(library.cuGraphNodeGetType(first, ctypes.byref(kind)))
    if kind.value != _KERNEL:
        raise _RefusedError(f"a node of kind {kind.value}")
    _checked(library.cuGraphKernelNodeGetParams_v2(first, ctypes.byref(node)))
    for attribute in (_COOPERATIVE, _CLUSTER):
        found = (ctypes.c_uint * 16)()
        _checked(library.cuGraphKernelNodeGetAttribute(first, attribute, found))
        if max(found[:3]) > (attribute == _CLUSTER):
            raise _RefusedError(f"attribute {attribute}")
    if not node.function or node.extra:
        raise _RefusedError("parameters in another form")
    return _Kernel(node.function, (*node.grid,), (*node.block,), node.shared, _parameters(library, node))


def _parameters(library: Any, node: _Node) -> tuple[bytes, ...]:
    found: list[bytes] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for index in range(_MOST):
        asked = ctypes.c_void_p(node.function), ctypes.c_size_t(index)
        code = library.cuFuncGetParamInfo(*asked, ctypes.byref(offset), ctypes.byref(size))
        if code == _NO_SUCH:
            return tuple(found)
        _checked(code)
        found.append(ctypes.string_at(node.parameters[index], size.value))
    raise _RefusedError("more parameters than kernels have")


def _allocations(device: int) -> int:
    try:
        return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])
    except (RuntimeError, KeyError) as error:  # an allocator that does not count
        raise _RefusedError from error


def captured(step: Any, given: Sequence[Tensor | None], stream: int, device: int, moved: Moved) -> DriverLaunch | None:
    """The launch of a recorded call's step on a stream, wherever its tensors are; None where it is no single plain launch.

    given: tensors of the call, which are not written.
    """
    library = relaunch.driver_library()
    if library is None or not hasattr(library, "cuFuncGetParamInfo"):  # since CUDA 12.4
        return None
    if any(source >= len(given) for _, source, _ in step.places):  # what another step will make
        return None
    moving: dict[int, Any] = {source: given[source] for _, source, _ in step.places}
    if sum(one.nbytes for one in moving.values()) > _COPIED:
        return None
    try:
        copies = {source: torch.empty_like(one) for source, one in moving.items()}
        others, addresses = [copies.get(source, one) for source, one in enumerate(given)], {}
        for _, source, view in step.places:
            one, two = moving[source], copies[source]
            offset = 0 if view is None else view[2] * one.itemsize
            addresses[one.data_ptr() + offset, two.data_ptr() + offset] = source, offset
        before, side = _allocations(device), _stream(device)
        calls = [functools.partial(step.again, side.cuda_stream, tensors, []) for tensors in (given, others)]
        kernel, other = (_captured(library, side, call) for call in calls)
        places = _places(library, kernel, other, addresses)
        if before != _allocations(device):
            raise _RefusedError("memory that is given to others afterwards")
    except (_RefusedError, torch.OutOfMemoryError):
        return None
    return _relaunched(step, kernel, places, stream, moved)


def _places(library: Any, one: _Kernel, two: _Kernel, addresses: dict[tuple[int, int], tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Parameters that are addresses of the call's tensors, or descriptors that hold one; raises where anything else differs."""
    same = (one.function, one.grid, one.block, one.shared, len(one.parameters))
    if same != (two.function, two.grid, two.block, two.shared, len(two.parameters)):
        raise _RefusedError("another launch")
    places = {}
    for at, pair in enumerate(zip(one.parameters, two.parameters, strict=True)):
        if pair[0] == pair[1]:
            continue
        if len(pair[0]) == WORD:
            values = int.from_bytes(pair[0], "little"), int.from_bytes(pair[1], "little")
        else:
            values = next((found for found in addresses if _with_address(library, pair[0], found[1]) == pair[1]), (0, 0))
        if values not in addresses:
            raise _RefusedError(f"parameter {at}")
        places[at] = addresses[values]
    return places


def _with_address(library: Any, descriptor: bytes, address: int) -> bytes | None:
    """A tensor's descriptor with another address; None where it is none."""
    if len(descriptor) != _DESCRIPTOR:
        return None
    memory, where = _aligned(_DESCRIPTOR)
    ctypes.memmove(where, descriptor, _DESCRIPTOR)
    refused = library.cuTensorMapReplaceAddress(ctypes.c_void_p(where), ctypes.c_uint64(address))
    found = ctypes.string_at(where, _DESCRIPTOR)
    del memory
    return None if refused else found


def _aligned(size: int) -> tuple[Any, int]:
    """Memory, and the first address in it that descriptors may have."""
    memory = (ctypes.c_char * (size + _ALIGNED))()
    return memory, -(-ctypes.addressof(memory) // _ALIGNED) * _ALIGNED


def _relaunched(step: Step, kernel: _Kernel, places: dict[int, tuple[int, int]], stream: int, moved: Moved) -> DriverLaunch:
    sizes = [-(-len(value) // _ALIGNED) * _ALIGNED for value in kernel.parameters]
    values, at = _aligned(sum(sizes))
    where, maps = [], {}
    for index, (value, size) in enumerate(zip(kernel.parameters, sizes, strict=True)):
        ctypes.memmove(at, value, len(value))
        word = moved.where(*places[index]) if index in places else at
        if index in places and len(value) == _DESCRIPTOR:
            maps[index], word = word, at
        where.append(word)
        at += size
    config = LaunchConfig(kernel.grid, kernel.block, kernel.shared, stream)
    return driven(step, kernel.function, config, where, (values, moved), maps=maps)
