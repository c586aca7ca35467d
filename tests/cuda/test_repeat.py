"""Recorded calls, with kernels that read and write the processor's memory in place of compiled ones."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import ctypes
import threading
import time
import types
import weakref
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from recorded_on_host import CPU, pretend_gpu

from hal_core.triton import launch, relaunch, repeat
from hal_core.triton.repeat import Repeats, called, launched, made, room


@pytest.fixture(autouse=True)
def processor(monkeypatch):
    """As if the processor were the current GPU."""
    pretend_gpu(monkeypatch, lambda index: 7 + index)


class Kernel:
    """``out = source * factor``, of float32; a compiled kernel takes addresses."""

    arg_names = ("out_ptr", "source_ptr", "count", "FACTOR")
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.ran = 0

    def run(self, x, y, z, stream, function, metadata, *rest):
        assert (x, y, z, stream, function, metadata, rest[:3]) == (3, 1, 1, 7, "function", "metadata", (None,) * 3)
        out, source, count, factor = rest[3:]
        out, source = (ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)) for pointer in (out, source))
        for index in range(count):
            out[index] = source[index] * factor
        self.ran += 1

    def launch(self, out, source, factor):
        """As Triton launches it the first time."""
        out.copy_(source * factor)
        values = {"FACTOR": factor, "count": out.numel(), "source_ptr": source, "out_ptr": out}
        launched(self, (3,), values, self)


class DriverKernel(Kernel):
    """As Triton's compiled kernels say what they are; the driver's call finds its parameters in memory."""

    function, packed_metadata, refused = 99, (4, 1, 512), 0
    src = types.SimpleNamespace(signature={"out_ptr": "*fp32", "source_ptr": "*fp32", "count": "i32", "FACTOR": "fp32"})
    plain = types.SimpleNamespace(
        num_ctas=1, global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=False
    )

    def __init__(self, **launcher):
        super().__init__()
        self.by_triton, self.launcher = 0, types.SimpleNamespace(**{**vars(self.plain), **launcher})

    @property
    def run(self):
        return _Launcher(self)

    def driver(self, config, function, parameters, extra):
        config = config._obj
        assert ([*config.grid], [*config.block], config.shared, config.stream) == ([3, 1, 1], [128, 1, 1], 512, 7)
        assert (function.value, len(parameters), extra, config.attributes, config.count) == (99, 6, None, None, 0)
        if self.refused:
            return self.refused
        out, source = (ctypes.cast(ctypes.c_void_p.from_address(where).value, ctypes.POINTER(ctypes.c_float)) for where in parameters[:2])
        count, factor = ctypes.c_int.from_address(parameters[2]).value, ctypes.c_float.from_address(parameters[3]).value
        for index in range(count):
            out[index] = source[index] * factor
        self.ran += 1
        return 0


class _Launcher:
    """Triton's, with what it says of itself."""

    def __init__(self, kernel):
        self.kernel = kernel
        vars(self).update(vars(kernel.launcher))

    def __call__(self, x, y, z, stream, function, metadata, *rest):
        assert (function, metadata) == (99, (4, 1, 512))
        Kernel.run(self.kernel, x, y, z, stream, "function", "metadata", *rest)
        self.kernel.by_triton += 1


class Op:
    """``out = (2 x + bias) * 3``, by two launches and two calls."""

    def __init__(self, shared=True, kernel=None):
        self.kernel, self.repeats, self.slow = kernel or Kernel(), Repeats(), 0
        self.bias, self.size = torch.ones(4), 0 if shared else repeat._SHARED

    def apply(self, x, out):
        self.repeats(x.shape[0], (x, None, out), lambda: self.whole(x, out))

    def whole(self, x, out):
        self.slow += 1
        first, spare = room((x.shape[0] + 1, 4), x.dtype, CPU), room((self.size,), torch.uint8, CPU)
        assert spare.numel() == self.size
        self.kernel.launch(first[1:], x, 2.0)
        total = made(torch.add, first[1:], self.bias)
        self.kernel.launch(out, total, 3.0)
        called(torch.add, out, 0.0, out=out)


def check(op, rows):
    x, out = torch.randn(rows, 4), torch.full((rows, 4), float("nan"))
    op.apply(x, out)
    assert torch.allclose(out, (2 * x + op.bias) * 3)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "made_anew"])
def test_a_call_is_repeated_with_other_tensors(shared):
    op = Op(shared)
    for rows in (2, 5, 2, 5, 2):
        check(op, rows)
    assert (op.slow, op.kernel.ran) == (2, 6)
    op.bias.add_(1.0)  # an update in place
    check(op, 2)
    assert op.slow == 2


@pytest.fixture
def driven(monkeypatch):
    """A kernel that the driver launches."""
    kernel = DriverKernel()
    monkeypatch.setattr(relaunch, "driver_library", lambda: types.SimpleNamespace(cuLaunchKernelEx=kernel.driver))
    return kernel


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "made_anew"])
def test_the_driver_launches_with_the_pointers_of_each_call(driven, shared):
    op = Op(shared, driven)
    for rows in (2, 5, 2, 5, 2):
        check(op, rows)
    assert (op.slow, driven.ran, driven.by_triton) == (2, 6, 0)


def test_threads_take_turns_with_a_launchs_parameters(driven, monkeypatch):
    def late(*args):
        time.sleep(1e-4)
        return driven.driver(*args)

    monkeypatch.setattr(relaunch, "driver_library", lambda: types.SimpleNamespace(cuLaunchKernelEx=late))
    op = Op(shared=False, kernel=driven)
    check(op, 2)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: check(op, 2), range(40)))
    assert op.slow == 1


def test_what_the_driver_refuses_is_launched_by_triton(driven):
    op = Op(kernel=driven)
    driven.refused = 201
    for _ in range(2):
        check(op, 2)
    assert (driven.ran, driven.by_triton) == (2, 2)


@pytest.mark.parametrize(
    "told", [{"num_ctas": 2}, {"launch_pdl": True}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8}, {"gsan_enabled": True}],
    ids=str,
)  # fmt: skip
def test_what_is_no_plain_launch_stays_with_triton(driven, told):
    driven.launcher = types.SimpleNamespace(**{**vars(driven.plain), **told})
    op = Op(kernel=driven)
    for _ in range(2):
        check(op, 2)
    assert driven.by_triton == 2


@pytest.mark.parametrize("told", [{"FACTOR": "bf16"}, {"more": "i32"}], ids=str)
def test_parameters_that_are_not_understood_stay_with_triton(driven, monkeypatch, told):
    launch, moved = relaunch.Launch(driven, (3, 1, 1), (0, 0, 4, 2.0), ()), relaunch.Moved(0, 0)
    assert isinstance(relaunch.relaunched(launch, 7, moved), relaunch.DriverLaunch)
    monkeypatch.setattr(driven, "src", types.SimpleNamespace(signature={**driven.src.signature, **told}))
    assert relaunch.relaunched(launch, 7, moved) is launch


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_who_watches_launches_is_told_by_triton(driven, monkeypatch, hook):
    op = Op(kernel=driven)
    check(op, 2)
    monkeypatch.setattr(relaunch.knobs.runtime, hook, lambda metadata: None)
    check(op, 2)
    assert op.slow == 2


def test_a_recorded_call_holds_none_of_its_tensors():
    op, x, out = Op(shared=False), torch.randn(2, 4), torch.empty(2, 4)
    held = weakref.ref(x), weakref.ref(out)
    op.apply(x, out)
    del x, out
    assert op.repeats.known
    assert [each() for each in held] == [None, None]


def test_calls_of_a_stream_share_memory_and_old_calls_go():
    op, other = Op(), Op()
    for rows in (*range(1, 100), 3, 99):
        check(op, rows)
        check(other, rows)
    (memory,) = repeat._shared.values()
    assert 99 * 16 < memory.numel() <= 4 * 100 * 16
    assert len(op.repeats.known) == 64
    assert op.slow == 100  # 3 had gone


def test_a_call_that_is_used_between_others_stays():
    op = Op()
    for rows in range(2, 100):
        check(op, 1)
        check(op, rows)
    assert op.slow == 99


def test_a_graph_under_capture_has_memory_of_its_own(monkeypatch):
    op = Op()
    check(op, 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    check(op, 2)
    assert not repeat._shared
    assert op.slow == 1


def test_pointers_that_are_not_aligned_are_launched_by_triton():
    op, held = Op(), torch.randn(9)
    check(op, 2)
    x, out = held[1:].view(2, 4), torch.empty(2, 4)
    op.apply(x, out)
    assert op.slow == 2
    assert torch.allclose(out, (2 * x + 1) * 3)


def test_a_call_within_a_call_is_a_step_of_it():
    inner, outer, kernel = Op(), Repeats(), Kernel()

    def whole(x, out):
        between = room(x.shape, x.dtype, CPU)
        inner.apply(x, between)
        kernel.launch(out, between, 2.0)

    for _ in range(2):
        x, out = torch.randn(2, 4), torch.full((2, 4), float("nan"))
        outer(2, (x, out), lambda x=x, out=out: whole(x, out))
        assert torch.allclose(out, (2 * x + inner.bias) * 6)
    assert kernel.ran == 1


def test_a_step_that_repeats_an_op_is_one_step():
    inner, outer, steps = Op(), Repeats(), []

    def step(x, out):
        steps.append(x)
        inner.apply(x, out)

    def whole():
        x, out = torch.randn(2, 4), torch.full((2, 4), float("nan"))
        outer(2, (x, out), lambda: called(step, x, out))
        return torch.allclose(out, (2 * x + inner.bias) * 3)

    check(inner, 2)
    found = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: found.append(whole()), daemon=True)
        thread.start()
        thread.join(20)
    assert found == [True] * 3
    assert (len(steps), inner.slow, inner.kernel.ran) == (3, 4, 0)


class Placed(torch.Tensor):
    """As if it were on a GPU, the one of number ``place``."""

    is_cuda, place = True, 0

    def get_device(self):
        return self.place


class Elsewhere(Placed):
    place = 1


@pytest.fixture
def current(monkeypatch):
    """Numbers of devices, of which the last is the current one."""
    found = [0]

    @contextlib.contextmanager
    def device_of(tensor):
        found.append(tensor.get_device())
        yield
        found.pop()

    repeat.driver.active.get_current_device = lambda: found[-1]
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found[-1])
    return found


@pytest.mark.parametrize("case", ["recorded", "watched", "not_aligned", "not_recordable"])
def test_calls_run_on_the_device_of_their_tensors(current, monkeypatch, case):
    repeats, seen, calls = Repeats(), [], []
    monkeypatch.setattr(repeat, "_recordable", lambda tensors: case != "not_recordable")
    monkeypatch.setattr(repeat, "watched", lambda: case == "watched")

    def step(x, out):
        seen.append(current[-1])
        out.copy_(x)

    def call(x, out):
        calls.append(x)
        called(step, x, out)

    for kind in (Elsewhere, Elsewhere, Placed, Placed, Elsewhere):
        x, out = (torch.randn(9)[case == "not_aligned" :].as_subclass(kind) for _ in range(2))
        repeats(4, (x, out), lambda x=x, out=out: call(x, out))
        assert torch.equal(out, x)
    assert seen == [1, 1, 0, 0, 1]
    assert len(calls) == (2 if case == "recorded" else 5)


def test_a_kernel_is_launched_on_the_device_of_its_tensors(current):
    kernel, seen = mock.MagicMock(), []
    kernel.__getitem__.return_value = lambda **values: seen.append(current[-1])
    for kind in (Elsewhere, Placed):
        launch.run(kernel, (1,), {"count": 3, "x_ptr": torch.randn(3).as_subclass(kind)}, 4, 1)
    assert seen == [1, 0]


def test_copies_record_calls_of_their_own():
    op = Op()
    check(op, 2)
    other = copy.deepcopy(op)
    other.bias.fill_(5.0)
    check(other, 2)
    check(op, 2)
    assert other.slow == 2


@pytest.mark.parametrize("spoil", [lambda kernel, x, out: launched(kernel, (1,), {}, None), lambda kernel, x, out: 1 / 0])
def test_what_cannot_be_repeated_is_not(spoil):
    repeats, kernel, x, out = Repeats(), Kernel(), torch.randn(2, 4), torch.empty(2, 4)

    def call():
        kernel.launch(out, x, 2.0)
        spoil(kernel, x, out)

    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError):
            repeats(2, (x, out), call)
    assert not repeats.known
    assert kernel.ran == 0
    op = Op()
    check(op, 2)
    assert op.repeats.known
