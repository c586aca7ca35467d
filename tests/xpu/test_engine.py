"""The way of multiplying follows from what a device reports; what probe says beforehand agrees with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hal_backend_xpu.engine import Engine, choose, expected
from hal_backend_xpu.native import DeviceFacts, Matrix
from hal_backend_xpu.session import session

from hal_core.errors import SettingError
from hal_core.machine import Device, Machine

NONE = DeviceFacts("a device", "platform", "1", False, "other", 8, 1 << 16, (16, 32), True, ())


def with_units(n: int, *, exact: bool = True, sub_groups: tuple[int, ...] = (8, 16)) -> DeviceFacts:
    """Products of 8 rows and ``n`` columns; or, as processors report AMX, of anything up to 16 by 16."""
    sizes = [(8, n, 32, 0, 0, 0), (8, n, 16, 0, 0, 0)] if exact else [(0, 0, 0, 16, 16, 64), (0, 0, 0, 16, 16, 32)]
    return replace(NONE, sub_groups=sub_groups, matrices=(Matrix("s8", "s8", "s32", *sizes[0]), Matrix("bf16", "bf16", "fp32", *sizes[1])))


@pytest.mark.parametrize(
    ("facts", "engine"),
    [
        (with_units(16), Engine("joint_matrix", 16, 8, 32)), (with_units(8), Engine("joint_matrix", 8, 8, 32)),
        (with_units(0, exact=False), Engine("joint_matrix", 16, 16, 64)), (NONE, Engine("emulation", 16)),
        (with_units(8, sub_groups=(16, 32)), Engine("emulation", 16)), (replace(NONE, sub_groups=(8,)), Engine("emulation", 8)),
    ],
)  # fmt: skip
def test_the_engine_is_that_of_the_units(facts, engine):
    assert choose(facts, "int8") == choose(facts, "bf16") == engine
    assert choose(facts, "fp16").name == "emulation"  # no such product was reported
    assert choose(facts, "int8", "emulation").name == "emulation"


def test_an_engine_that_is_not_there_is_an_error():
    with pytest.raises(SettingError, match="has no matrix unit"):
        choose(NONE, "int8", "joint_matrix")
    with pytest.raises(SettingError, match="unknown"):
        choose(NONE, "int8", "tensor_cores")


def test_what_probe_says_of_this_processor_is_what_is_chosen():
    machine = Machine.detect()
    told = expected(next(device for device in machine.devices if device.kind == "cpu"), machine)
    assert str(session(torch.device("cpu")).engine("int8")) in told
    assert "tiles of 8x8" in expected(Device("xpu", "intel", "dg2", "Arc A770"), machine)
