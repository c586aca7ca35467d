"""A device to launch kernels on: its queue, its programs, and how they are found, compiled and kept.

    s = session(tensor.device)
    s.launch(s.kernel("rows.hpp", "sum_slots"), groups=(1, rows, 4), local=(1, 1, 64), arguments=(y, places, None, columns, ...))
    s.finish()

Kernels are free functions of csrc/kernels, found by header and name. On an XPU everything goes into torch's current stream; on the
host's OpenCL device, which reads CPU tensors where they are, ``finish`` waits, so that an op has run when it returns.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hal_backend_xpu import native, store
from hal_backend_xpu.engine import Engine, choose

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KERNELS", "Session", "session"]

#: The headers, as they are installed beside this file.
KERNELS = Path(__file__).with_name("kernels")
_log = logging.getLogger("hal_backend_xpu")


@functools.cache
def _sources() -> bytes:
    """All headers: one that another includes changes what is made from it."""
    return b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in sorted(KERNELS.glob("*.hpp")))


class Session:
    """One device. engine: a name of ``ENGINES`` for all its products, instead of what fits the device."""

    def __init__(self, device: torch.device, engine: str | None = None) -> None:
        self.device, self._asked = device, engine
        if not self.on_host:
            self._check_runtime()
        self.facts = native.describe(self.queue)
        self._programs: dict[tuple[str, Engine, tuple[str, ...]], native.Program] = {}
        self._lock = threading.Lock()

    @property
    def on_host(self) -> bool:
        """Whether this is the host's own processor, with CPU tensors."""
        return self.device.type == "cpu"

    @property
    def queue(self) -> int:
        """Address of the ``sycl::queue``."""
        if self.on_host:
            return native.cpu_queue()
        return int(torch.xpu.current_stream(self.device).sycl_queue)

    @staticmethod
    def _check_runtime() -> None:
        """Before torch's queue crosses: both sides have loaded what they use."""
        torch.xpu.init()
        native.library()
        native.one_runtime(Path("/proc/self/maps").read_text(errors="replace"))

    def engine(self, element: str) -> Engine:
        """How products of ``element`` are made here."""
        return _engine(self.facts, element, self._asked)

    def kernel(self, header: str, name: str, element: str | None = None, defines: tuple[str, ...] = ()) -> int:
        """A kernel of a header, compiled if need be. element: of the products in it; None where it has none."""
        engine = self.engine(element) if element else Engine("emulation", self.engine("int8").sub_group)
        return self.program(header, engine, defines).kernel(name)

    def program(self, header: str, engine: Engine, defines: tuple[str, ...] = ()) -> native.Program:
        """The program of a header."""
        key = (header, engine, defines)
        found = self._programs.get(key)
        if found is None:
            with self._lock:
                found = self._programs.get(key)
                if found is None:
                    found = self._programs[key] = self._made(header, engine, defines)
        return found

    def _made(self, header: str, engine: Engine, defines: tuple[str, ...]) -> native.Program:
        options = (f"-I{KERNELS}", *engine.defines, *defines)
        facts = self.facts
        portable = store.digest(_sources(), header, *options[1:], native.runtime_version())
        own = store.digest(portable, facts.name, facts.platform, facts.driver)
        for name, binary in ((f"{own}.bin", True), (f"{portable}.spv", False)):
            images = store.read(name)
            if images is None:
                continue
            try:
                program = native.Program.loaded(self.queue, images, binary=binary)
            except native.NativeError as error:
                _log.warning("a kept program of %s is not taken (%s); it is made anew", header, error)
                continue
            self._keep(program, portable, own)
            return program
        start = time.perf_counter()
        _log.warning("compiling %s for %s (%s), once; kept in %s", header, facts.name, engine, store.folder())
        program = native.Program.compiled(self.queue, f'#include "{header}"\n', options)
        self._keep(program, portable, own)
        _log.info("compiled %s in %.1f s", header, time.perf_counter() - start)
        return program

    def _keep(self, program: native.Program, portable: str, own: str) -> None:
        for name, binary in ((f"{portable}.spv", False), (f"{own}.bin", True)):
            if store.read(name) is None and (images := program.images(binary=binary)):
                store.write(name, images)

    def launch(self, kernel: int, groups: tuple[int, int, int], local: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        """Enqueue. ``groups`` work-groups of ``local`` work-items, the last dimension fastest; arguments: tensors, None, ints, floats."""
        if all(groups):
            native.launch(self.queue, kernel, groups, local, arguments)

    def finish(self) -> None:
        """The end of an op."""
        if self.on_host:
            native.wait(self.queue)

    def scratch(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory whose content does not matter."""
        return torch.empty(shape, dtype=dtype, device=self.device)


@functools.cache
def _engine(facts: native.DeviceFacts, element: str, asked: str | None) -> Engine:
    return choose(facts, element, asked)


@functools.cache
def _session(device: torch.device, engine: str | None) -> Session:
    return Session(device, engine)


def session(device: torch.device, engine: str | None = None) -> Session:
    """The session of a device, made once. ``xpu`` without an index is the current one; ``cpu`` is the host's OpenCL device."""
    if device.type == "xpu" and device.index is None:
        device = torch.device("xpu", torch.xpu.current_device())
    return _session(device, engine)
