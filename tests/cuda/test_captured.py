"""Another library's launches, read from captures, by a driver that works in the processor's memory."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import types
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from recorded_on_host import CPU, pretend_gpu

from hal_core.triton import captured, relaunch
from hal_core.triton.repeat import Repeats, called, room

SIDE, HERE, FUNCTION = 81, 7, 99


class Driver:
    """CUDA's, with one kernel: ``out = source * factor`` of ``count`` floats, and a descriptor that it does not look at."""

    sizes = (8, 8, 4, 4, 128)

    def __init__(self):
        self.nodes, self.capturing, self.kind, self.attributes, self.launches, self.refused, self.graphs = [], False, 0, {}, 0, 0, 0

    def cuStreamBeginCapture_v2(self, stream, mode):
        assert (stream.value, mode, self.capturing) == (SIDE, 1, False)
        self.nodes, self.capturing = [], True
        return 0

    def cuStreamEndCapture(self, stream, graph):
        self.capturing, graph._obj.value, self.graphs = False, 5, self.graphs + 1
        return 0

    def cuGraphGetNodes(self, graph, nodes, count):
        room, count._obj.value = count._obj.value, min(count._obj.value, len(self.nodes))
        for index in range(min(room, len(self.nodes))):
            nodes[index] = 1 + index
        return 0

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = self.kind
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, found):
        self.held = [ctypes.create_string_buffer(value, len(value)) for value in self.nodes[node.value - 1]]
        self.where = (ctypes.c_void_p * len(self.held))(*map(ctypes.addressof, self.held))
        found._obj.function, found._obj.shared, found._obj.parameters = FUNCTION, 512, self.where
        found._obj.grid[:], found._obj.block[:] = (3, 1, 1), (128, 1, 1)
        return 0

    def cuGraphKernelNodeGetAttribute(self, node, attribute, found):
        found[0] = self.attributes.get(attribute, 0)
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def cuGraphDestroy(self, graph):
        assert graph.value == 5
        self.graphs -= 1
        return 0

    def cuTensorMapReplaceAddress(self, descriptor, address):
        """A descriptor here is an address 15 times, and what kind of thing it is."""
        kind = ctypes.string_at(descriptor.value + 120, 8)
        ctypes.memmove(descriptor.value, address.value.to_bytes(8, "little") * 15 + kind, 128)
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        config = config._obj
        assert ([*config.grid], [*config.block], config.shared, config.stream) == ([3, 1, 1], [128, 1, 1], 512, HERE)
        assert (function.value, len(parameters), extra, parameters[4] % 64) == (FUNCTION, 5, None, 0)
        if any(described := ctypes.string_at(parameters[4], 120)):
            assert described == ctypes.string_at(parameters[1], 8) * 15
        if self.refused:
            return self.refused
        out, source, count, factor = (ctypes.string_at(where, size) for where, size in zip(parameters[:4], self.sizes, strict=False))
        compute(*(struct.unpack(form, value)[0] for form, value in zip("QQif", (out, source, count, factor), strict=True)))
        self.launches += 1
        return 0


def compute(out, source, count, factor):
    out, source = (ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)) for pointer in (out, source))
    for index in range(count):
        out[index] = source[index] * factor


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    pretend_gpu(monkeypatch, lambda index: HERE)
    monkeypatch.setattr(relaunch, "driver_library", lambda: found)
    monkeypatch.setattr(captured, "_stream", lambda device: types.SimpleNamespace(cuda_stream=SIDE))
    monkeypatch.setattr(captured, "_allocations", lambda device: library.allocations)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    library = Library(found)
    found.library = library
    return found


class Library:
    """Launches the kernel; ``spoil`` makes something else of it."""

    def __init__(self, driver):
        self.driver, self.calls, self.allocations, self.spoil = driver, 0, 0, lambda parameters: [parameters]

    def multiply(self, out, source, factor):
        if self.driver.capturing:
            values = [out.data_ptr(), source.data_ptr(), source.numel(), factor]
            self.driver.nodes += self.spoil([*(struct.pack(form, value) for form, value in zip("QQif", values, strict=True)), bytes(128)])
            return
        compute(out.data_ptr(), source.data_ptr(), source.numel(), factor)
        self.calls += 1


def run(library, repeats, rows=3):
    """``out[1:] = x * 6``, by two launches over a room."""
    x, out = torch.randn(rows, 4), torch.full((rows + 1, 4), float("nan"))

    def whole():
        between = room(x.shape, x.dtype, CPU)
        called(library.multiply, between, x, 2.0, kernel=True)
        called(library.multiply, out[1:], between, 3.0, kernel=True)

    repeats(rows, (x, out), whole)
    assert torch.allclose(out[1:], x * 6)
    assert out[0].isnan().all()


def test_repetitions_are_the_kernels_alone_over_the_tensors_of_each(driver):
    repeats = Repeats()
    for rows in (3, 5, 3, 5, 3):
        run(driver.library, repeats, rows)
    assert (driver.library.calls, driver.launches) == (4, 6)


def test_a_call_without_memory_of_its_own_is_read_too(driver):
    repeats = Repeats()
    for _ in range(3):
        x, out = torch.randn(4), torch.empty(4)
        repeats(4, (x, out), lambda x=x, out=out: called(driver.library.multiply, out, x, 2.0, kernel=True))
        assert torch.equal(out, 2 * x)
    assert (driver.library.calls, driver.launches) == (1, 2)


def test_a_graph_under_capture_has_the_librarys_calls(driver, monkeypatch):
    repeats = Repeats()
    run(driver.library, repeats)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run(driver.library, repeats)
    assert (driver.library.calls, driver.launches) == (4, 0)


def test_a_refused_launch_is_the_librarys_call(driver):
    repeats, driver.refused = Repeats(), 201
    for _ in range(2):
        run(driver.library, repeats)
    assert (driver.library.calls, driver.launches) == (4, 0)


def _raises(parameters):
    raise RuntimeError("not under capture")


SPOILT = {
    "two_kernels": (lambda parameters: [parameters, parameters], 0),
    "none": (lambda parameters: [], 0),
    "an_error": (_raises, 0),
    # of the room between both launches, whose address stays, it may hold what it wants
    "something_else_holds_an_address": (lambda parameters: [[*parameters[:4], parameters[1] * 16]], 2),
    "a_descriptor_holds_one": (lambda parameters: [[*parameters[:4], parameters[1] * 15 + bytes(8)]], 4),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_depends_on_more_than_addresses_is_called(driver, name):
    repeats, (driver.library.spoil, launches) = Repeats(), SPOILT[name]
    for _ in range(3):
        run(driver.library, repeats)
    assert (driver.library.calls, driver.launches) == (6 - launches, launches)


@pytest.mark.parametrize("told", [{"kind": 1}, {"attributes": {2: 1}}, {"attributes": {4: 2}}], ids=str)
def test_what_is_no_plain_kernel_is_called(driver, told):
    vars(driver).update(told)
    repeats = Repeats()
    for _ in range(3):
        run(driver.library, repeats)
    assert (driver.library.calls, driver.launches) == (6, 0)


def test_memory_that_a_call_asks_for_is_not_kept(driver):
    def asks(parameters):
        driver.library.allocations += 1
        return [parameters]

    repeats, driver.library.spoil = Repeats(), asks
    for _ in range(3):
        run(driver.library, repeats)
    assert (driver.library.calls, driver.launches) == (6, 0)


@pytest.mark.parametrize("case", ["no_memory", "more_than_is_copied"])
def test_tensors_that_are_not_copied_are_the_librarys(driver, monkeypatch, case):
    def full(tensor):
        raise torch.OutOfMemoryError("none left" if case == "no_memory" else "not asked for")

    asked = mock.Mock(side_effect=full)
    if case == "more_than_is_copied":
        monkeypatch.setattr(captured, "_COPIED", 4 * 4 * 2)
    monkeypatch.setattr(torch, "empty_like", asked)
    repeats = Repeats()
    for _ in range(3):
        run(driver.library, repeats)
    assert (driver.library.calls, driver.launches) == (6, 0)
    assert asked.called == (case == "no_memory")


def test_errors_of_all_kinds_leave_no_graph(driver):
    def stops(parameters):
        raise KeyboardInterrupt

    repeats, spoil = Repeats(), driver.library.spoil
    run(driver.library, repeats)
    driver.library.spoil = stops
    with pytest.raises(KeyboardInterrupt):
        run(driver.library, repeats)
    assert (driver.graphs, driver.capturing) == (0, False)
    driver.library.spoil = spoil
    run(driver.library, repeats)
    assert (driver.library.calls, driver.launches, driver.graphs) == (2, 2, 0)
