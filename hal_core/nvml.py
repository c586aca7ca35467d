"""NVIDIA GPUs by the driver's management library (libnvidia-ml.so.1) through ctypes: no CUDA library, no device context.

Names and numbers are those of NVIDIA's nvml.h. Every call is checked; what a driver does not answer stays unknown.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["LIBRARY", "NvidiaFacts", "NvidiaGpu", "read_nvidia"]

LIBRARY = "libnvidia-ml.so.1"
_PROHIBITED = 2  # NVML_COMPUTEMODE_PROHIBITED
#: fp32 lanes of one SM by (major, minor): NVML counts lanes, kernels are tuned by SMs.
_LANES = {
    (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 7): 128, (8, 9): 128, (9, 0): 128,
    (10, 0): 128, (10, 3): 128, (11, 0): 128, (12, 0): 128, (12, 1): 128,
}  # fmt: skip


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Pci(ctypes.Structure):
    _fields_ = [
        ("bus_id_legacy", ctypes.c_char * 16), ("domain", ctypes.c_uint), ("bus", ctypes.c_uint), ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint), ("subsystem_id", ctypes.c_uint), ("bus_id", ctypes.c_char * 32),
    ]  # fmt: skip


@dataclass(frozen=True)
class NvidiaGpu:
    """One GPU in the order of NVML, that of PCI. Fields that the driver did not answer are None. problem: why it cannot compute."""

    name: str
    uuid: str = ""
    pci: str = ""
    architecture: str | None = None
    units: int | None = None
    memory_bytes: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class NvidiaFacts:
    """problem: why NVML itself gave nothing; then there are no GPUs here, whatever the machine holds.

    computes: the driver's compute library is there, as in containers that were given computing and no management library.
    """

    gpus: tuple[NvidiaGpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    problem: str = ""
    computes: bool = False


class _NvmlError(Exception):
    pass


class _Library:
    """The loaded library with checked calls."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise _NvmlError(f"{name} is not in this driver's {LIBRARY}") from error
        code = function(*arguments)
        if code:
            raise _NvmlError(f"{name}: {self._told(code)}")

    def _told(self, code: int) -> str:
        with contextlib.suppress(AttributeError):
            describe = self._library.nvmlErrorString
            describe.restype = ctypes.c_char_p
            return f"{(describe(code) or b'unknown error').decode(errors='replace')} ({code})"
        return f"error {code}"

    def text(self, name: str, *before: Any) -> str:
        buffer = ctypes.create_string_buffer(96)
        self.call(name, *before, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode(errors="replace")

    def number(self, name: str, *before: Any) -> int:
        value = ctypes.c_uint(0)
        self.call(name, *before, ctypes.byref(value))
        return value.value


def read_nvidia(load: Callable[[str], Any] = ctypes.CDLL) -> NvidiaFacts:
    """The GPUs that the driver shows to this process; never raises. ``load`` opens the library by its name."""
    try:
        library = _Library(load(LIBRARY))
    except OSError as error:
        return NvidiaFacts(problem=f"{LIBRARY} cannot be loaded ({error})", computes=_loads(load, "libcuda.so.1"))
    try:
        with _session(library):
            return _facts(library)
    except _NvmlError as error:
        return NvidiaFacts(problem=str(error))


def _loads(load: Callable[[str], Any], name: str) -> bool:
    """Whether the library opens; it is not initialized."""
    try:
        load(name)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _session(library: _Library) -> Iterator[None]:
    library.call("nvmlInit_v2")
    try:
        yield
    finally:
        with contextlib.suppress(_NvmlError):
            library.call("nvmlShutdown")


def _facts(library: _Library) -> NvidiaFacts:
    count = library.number("nvmlDeviceGetCount_v2")
    gpus = tuple(_gpu(library, index) for index in range(min(count, 1024)))
    cuda = _maybe(lambda: library.number("nvmlSystemGetCudaDriverVersion_v2"))
    return NvidiaFacts(
        gpus=gpus,
        driver=_maybe(lambda: library.text("nvmlSystemGetDriverVersion")),
        cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
    )


def _gpu(library: _Library, index: int) -> NvidiaGpu:
    handle = ctypes.c_void_p()
    try:
        library.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    except _NvmlError as error:
        return NvidiaGpu(f"GPU {index}", problem=str(error))  # e.g. no permission for its device file, or fallen off the bus
    capability = _maybe(lambda: _capability(library, handle))
    lanes = _maybe(lambda: library.number("nvmlDeviceGetNumGpuCores", handle))
    per_unit = _LANES.get(capability) if capability else None
    prohibited = _maybe(lambda: library.number("nvmlDeviceGetComputeMode", handle)) == _PROHIBITED
    return NvidiaGpu(
        name=_maybe(lambda: library.text("nvmlDeviceGetName", handle)) or f"GPU {index}",
        uuid=_maybe(lambda: library.text("nvmlDeviceGetUUID", handle)) or "",
        pci=_maybe(lambda: _pci(library, handle)) or "",
        architecture=None if capability is None else f"sm_{capability[0]}{capability[1]}",
        units=lanes // per_unit if lanes and per_unit else None,
        memory_bytes=_maybe(lambda: _memory(library, handle)),
        problem="its compute mode is prohibited" if prohibited else "",
    )


def _capability(library: _Library, handle: ctypes.c_void_p) -> tuple[int, int]:
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    library.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _memory(library: _Library, handle: ctypes.c_void_p) -> int:
    memory = _Memory()
    library.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return int(memory.total)


def _pci(library: _Library, handle: ctypes.c_void_p) -> str:
    pci = _Pci()
    library.call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
    return bytes(pci.bus_id).decode(errors="replace").lower()


def _maybe(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except _NvmlError:
        return None
