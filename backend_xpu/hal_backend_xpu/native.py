"""The host library through ctypes: programs, kernels and launches over a SYCL queue. See csrc/host.h for the C side."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hal_core.errors import HalError, MissingDependencyError

__all__ = ["DeviceFacts", "Matrix", "NativeError", "Program", "cpu_queue", "describe", "library", "one_runtime", "runtime_version"]

_LIBRARY = Path(__file__).with_name("_hal_backend_xpu.so")
_INSTALL = 'pip install "hal-backend-xpu[runtime]"'


#: A mapped file of the runtime: its path, and the version of its binary interface.
_RUNTIME = re.compile(r"(/\S*/libsycl\.so\.(\d+)\S*)$", re.MULTILINE)


class NativeError(HalError):
    """The SYCL runtime refused something; the message is its own."""


class Argument(ctypes.Structure):
    """``hal_xpu_arg``: a kind and eight bytes."""

    class Value(ctypes.Union):
        _fields_ = (("p", ctypes.c_void_p), ("i", ctypes.c_int32), ("l", ctypes.c_int64), ("f", ctypes.c_float))

    _anonymous_ = ("value",)
    _fields_ = (("kind", ctypes.c_char), ("value", Value))


_POINTER, _TEXT, _LONG, _INT = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int32
#: Result and arguments of each function of csrc/host.h.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "hal_xpu_error": (_TEXT, ()),
    "hal_xpu_ahead_of_time": (_INT, ()),
    "hal_xpu_cpu_queue": (_POINTER, ()),
    "hal_xpu_describe": (_LONG, (_POINTER, _TEXT, _LONG)),
    "hal_xpu_compile": (_POINTER, (_POINTER, _TEXT, ctypes.POINTER(_TEXT), _INT)),
    "hal_xpu_load": (_POINTER, (_POINTER, _INT, _TEXT, ctypes.POINTER(_LONG), _INT)),
    "hal_xpu_image": (_LONG, (_POINTER, _INT, _INT, _TEXT, _LONG)),
    "hal_xpu_kernel": (_POINTER, (_POINTER, _TEXT)),
    "hal_xpu_release": (None, (_POINTER,)),
    "hal_xpu_launch": (_INT, (_POINTER, _POINTER, ctypes.POINTER(Argument), _INT, ctypes.POINTER(_LONG), ctypes.POINTER(_LONG))),
    "hal_xpu_wait": (_INT, (_POINTER,)),
}


def _file_of(distribution: str, name: str) -> str | None:
    """Where a wheel installed one of its files."""
    try:
        files = metadata.files(distribution) or ()
    except metadata.PackageNotFoundError:
        return None
    return next((str(Path(str(file.locate())).resolve()) for file in files if file.name == name), None)


def runtime_version() -> str:
    """Of the SYCL runtime's wheel; the programs that it compiled are kept under it. Another way of installing it is one version."""
    try:
        return metadata.version("intel-sycl-rt")
    except metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def library() -> ctypes.CDLL:
    """The library, with its signatures.

    Raises:
        MissingDependencyError: it does not load; the SYCL runtime is not installed.
    """
    # The OpenCL loader of the wheels looks for its driver where the wheel was made; it has to be told before the first SYCL call.
    driver = _file_of("intel-opencl-rt", "libintelocl.so")
    if driver is not None:
        os.environ.setdefault("OCL_ICD_FILENAMES", driver)
    try:
        found = ctypes.CDLL(str(_LIBRARY))
    except OSError as error:
        raise MissingDependencyError("the SYCL kernels of hal-backend-xpu", str(error), _INSTALL) from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def one_runtime(mapped: str) -> None:
    """Raise where torch and this library came to use different SYCL runtimes: a queue of one is not an object of the other.

    Args:
        mapped: what ``/proc/self/maps`` says after both have loaded theirs.

    Raises:
        MissingDependencyError: runtimes of several binary interfaces are loaded.
    """
    found = {version: path for path, version in _RUNTIME.findall(mapped)}
    if len(found) > 1:
        fix = "install a torch for XPU that is built for the SYCL runtime of 2026, as 2.14 is, beside this wheel's [runtime]"
        raise MissingDependencyError("torch's queue in the SYCL runtime of hal-backend-xpu", " and ".join(sorted(found.values())), fix)


def _failed(asked: str) -> NativeError:
    return NativeError(asked, (library().hal_xpu_error() or b"no reason given").decode(errors="replace"))


@functools.cache
def cpu_queue() -> int:
    """The in-order queue of the host's OpenCL device.

    Raises:
        MissingDependencyError: no runtime offers one.
    """
    queue = library().hal_xpu_cpu_queue()
    if not queue:
        found = library().hal_xpu_error().decode(errors="replace")
        raise MissingDependencyError("a SYCL device on this processor", found, _INSTALL)
    return int(queue)


@dataclass(frozen=True)
class Matrix:
    """A matrix product that a device has; sizes of 0 with ``max_*`` mean anything up to that."""

    a: str
    b: str
    c: str
    m: int
    n: int
    k: int
    max_m: int
    max_n: int
    max_k: int


@dataclass(frozen=True)
class DeviceFacts:
    """What the runtime says of a queue's device. local_memory: bytes. can_compile: whether it takes SYCL source at run time."""

    name: str
    platform: str
    driver: str
    cpu: bool
    backend: str
    units: int
    local_memory: int
    sub_groups: tuple[int, ...]
    can_compile: bool
    matrices: tuple[Matrix, ...]


@functools.cache
def describe(queue: int) -> DeviceFacts:
    """The facts of a queue's device."""
    size = library().hal_xpu_describe(queue, None, 0)
    text = ctypes.create_string_buffer(max(size, 1))
    if size < 0 or library().hal_xpu_describe(queue, text, size) < 0:
        raise _failed("facts of a SYCL device")
    data = json.loads(text.value.decode(errors="replace"))
    matrices = tuple(Matrix(**found) for found in data.pop("matrices"))
    return DeviceFacts(**{**data, "sub_groups": tuple(data["sub_groups"]), "matrices": matrices})


class Program:
    """A compiled program; its kernels are looked up by name. Kept as long as a kernel of it may run."""

    def __init__(self, handle: int) -> None:
        self._handle, self._kernels = handle, dict[str, int]()

    @classmethod
    def compiled(cls, queue: int, source: str, options: tuple[str, ...]) -> Program:
        """From SYCL source. Takes seconds."""
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        handle = library().hal_xpu_compile(queue, source.encode(), words, len(options))
        if not handle:
            raise _failed(f"compile {source.strip().splitlines()[-1]} with {' '.join(options)}")
        return cls(handle)

    @classmethod
    def loaded(cls, queue: int, images: tuple[bytes, ...], *, binary: bool) -> Program:
        """From what ``images`` gave: SPIR-V, which is compiled for the device now, or what that gave for this very device and driver."""
        sizes = (ctypes.c_int64 * len(images))(*map(len, images))
        handle = library().hal_xpu_load(queue, int(binary), b"".join(images), sizes, len(images))
        if not handle:
            raise _failed("load a program")
        return cls(handle)

    def images(self, *, binary: bool) -> tuple[bytes, ...]:
        """The device's binaries, or the SPIR-V that they were made from; none where the runtime does not give them."""
        found = list[bytes]()
        while (size := library().hal_xpu_image(self._handle, int(binary), len(found), None, 0)) > 0:
            data = ctypes.create_string_buffer(size)
            if library().hal_xpu_image(self._handle, int(binary), len(found), data, size) != size:
                break
            found.append(data.raw)
        if size < 0:
            raise _failed("the images of a program")
        return tuple(found)

    def kernel(self, name: str) -> int:
        """A kernel to launch.

        Raises:
            NativeError: the device's compiler dropped it, or it is not in the source.
        """
        found = self._kernels.get(name)
        if found is None:
            found = library().hal_xpu_kernel(self._handle, name.encode())
            if not found:
                raise _failed(f"kernel {name}")
            self._kernels[name] = found
        return found

    def __del__(self) -> None:
        # at the interpreter's end the runtime may be gone already
        if not sys.is_finalizing():
            library().hal_xpu_release(self._handle)


def launch(queue: int, kernel: int, groups: tuple[int, int, int], local: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
    """Enqueue a kernel. Arguments: tensors or None as addresses, integers of 32 bits, floats.

    Raises:
        NativeError: the runtime refuses it, or an integer does not fit.
    """
    packed = (Argument * len(arguments))()
    for at, value in enumerate(arguments):
        if isinstance(value, float):
            packed[at].kind, packed[at].f = b"f", value
        elif isinstance(value, int):
            if not -(1 << 31) <= value < 1 << 31:
                raise NativeError("launch a kernel", f"argument {at} is {value}, which 32 bits do not hold", "give fewer rows at once")
            packed[at].kind, packed[at].i = b"i", value
        else:
            packed[at].kind, packed[at].p = b"p", None if value is None else value.data_ptr()
    ranges = [(ctypes.c_int64 * 3)(*sizes) for sizes in (groups, local)]
    if library().hal_xpu_launch(queue, kernel, packed, len(arguments), *ranges):
        raise _failed("launch a kernel")


def wait(queue: int) -> None:
    """Until everything in the queue has run."""
    if library().hal_xpu_wait(queue):
        raise _failed("wait for a queue")
