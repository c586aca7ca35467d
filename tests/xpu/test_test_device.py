"""The processor as a device for tests: chosen by who names it, never by auto."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hal_backend_xpu.ops import Int4Experts, Int4Linear

import hal_core as hal
from hal_core.errors import SettingError, ShapeError
from hal_core.machine import Machine
from hal_core.ops import Routed
from hal_core.stored import load_facts
from hal_core.testing.data import random_weight

pytestmark = pytest.mark.usefixtures("sycl_device")
SCHEME = hal.WeightScheme.parse("int4:g32")
SPEC = hal.LinearSpec(32, 64, SCHEME)


def weights():
    return hal.LinearWeights(random_weight(SCHEME, (32, 64), torch.Generator().manual_seed(1)))


@pytest.mark.skipif(torch.xpu.is_available(), reason="there is an Intel GPU: the processor is not chosen beside it")
def test_a_policy_that_names_it_runs_on_tensors_of_the_host_and_auto_does_not():
    op = hal.prepare(SPEC, weights(), policy="require:xpu")
    assert op.selection.kernel == "xpu.linear_int4"
    assert op.apply(torch.randn(3, 64).bfloat16()).shape == (3, 32)
    auto = hal.select(SPEC)
    assert not auto.kernel.startswith("xpu.")
    told = {c.kernel: [reason.code for reason in c.refusals] for c in auto.candidates}
    assert told["xpu.linear_int4"] == ["policy.unnamed"]


def test_another_word_for_the_device_is_an_error(monkeypatch):
    monkeypatch.setenv("HAL_XPU_DEVICE", "gpu")
    with pytest.raises(SettingError, match="use cpu, or unset it"):
        hal.prepare(SPEC, weights(), policy="require:xpu")


def test_tensors_of_another_vendor_are_an_error():
    from hal_backend_xpu.declared import device_of

    class Elsewhere:
        device = torch.device("cuda", 0)

    with pytest.raises(ShapeError, match="weights on cuda:0"):
        device_of(Elsewhere())


def test_tensors_of_the_host_are_an_error_where_an_intel_gpu_is_listed(monkeypatch):
    """Whether or not this torch could use it."""
    from hal_backend_xpu.declared import device_of

    machine = Machine.detect()
    gpu = load_facts("arc-b580").devices
    monkeypatch.setattr(Machine, "detect", classmethod(lambda cls: replace(machine, devices=(*machine.devices, *gpu))))
    with pytest.raises(ShapeError, match="weights on cpu"):
        device_of(torch.zeros(1))
    monkeypatch.setenv("HAL_XPU_DEVICE", "cpu")
    assert device_of(torch.zeros(1)).type == "cpu"


@pytest.mark.parametrize(("shape", "dtype"), [((3, 32), torch.float64), ((5, 3, 32), torch.bfloat16)], ids=str)
def test_a_result_that_does_not_fit_is_an_error_under_compile_too(shape, dtype):
    op, x = Int4Linear(SPEC, weights()), torch.randn(3, 64).bfloat16()
    routed, many = Routed(torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)), random_weight(SCHEME, (2, 64, 64), torch.Generator())
    block = Int4Experts(hal.MoESpec(2, 1, 64, 64, up=SCHEME, down=SCHEME), hal.MoEWeights(many, many))
    out = torch.empty(shape, dtype=dtype)
    for call in (lambda x, out: op.apply(x, out=out), lambda x, out: block.apply(x, routed, out=out)):
        with pytest.raises(ShapeError, match="output"):
            call(x, out)
        with pytest.raises(ShapeError, match="output"):
            torch.compile(call, backend="eager")(x, out)
