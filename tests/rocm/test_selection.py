"""Which of this backend's own kernels serve what, and why not, decided for machines that are not here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hal_backend_rocm.kernels import KERNELS
from hal_backend_rocm.targets import FP8_TYPE, PRODUCTS, TARGETS

from hal_core.contract import kernel_problems
from hal_core.machine import Device, Machine, Version
from hal_core.numerics import numerics_from_word
from hal_core.schemes import WeightScheme
from hal_core.spec import LinearSpec, MoESpec

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
EIGHT = numerics_from_word("fp8")


def machine(architecture: str, torch: str = "2.11.0+rocm7.1") -> Machine:
    return Machine("linux_x86_64", (Device("rocm", "amd", architecture, "a GPU"),), versions=(Version("torch", torch),))


def linear(scheme: str, **more) -> LinearSpec:
    return LinearSpec(256, 512, WeightScheme.parse(scheme), **more)


def experts(scheme: str, **more) -> MoESpec:
    s = WeightScheme.parse(scheme)
    return MoESpec(8, 2, 256, 128, s, s, s, **more)


def refused(name: str, spec, target: str, **more) -> list:
    return list(BY_NAME[name].refusals(spec, machine(target, **more)))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_keeps_the_contract(kernel):
    assert kernel_problems(kernel, ("linear", "moe", "kv")) == ()


@pytest.mark.parametrize("target", TARGETS)
def test_integers_and_halves_are_served_everywhere(target):
    for scheme in ("int4:g128", "int4:g32:zero", "int8:channel", "int4:g64:min", "int4:g32:act_order"):
        assert refused("linear_triton", linear(scheme), target) == []
        assert refused("moe_triton", experts(scheme), target) == []
    assert refused("moe_bf16_triton", experts("bf16"), target) == []
    assert refused("moe_fp16_triton", experts("fp16", dtype="fp16"), target) == []


FP8 = [(k.name, "fp8_e4m3:channel" if "rows" in k.name else "fp8_e4m3:b128x128") for k in KERNELS if "fp8" in k.name]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "scheme"), FP8)
def test_fp8_is_served_where_its_type_has_an_instruction(name, scheme, target):
    spec = (linear if name.startswith("linear") else experts)(scheme, numerics=EIGHT)
    operand = "e4m3fnuz" if "fnuz" in name else "e4m3fn"
    found = refused(name, spec, target)
    if FP8_TYPE.get(target) == operand:
        assert found == []
        return
    (reason,) = found
    assert reason.code == "device.arch"
    assert reason.asked == f"matrix instructions for {operand}"
    assert reason.found == f"{target}: {PRODUCTS[operand, target].why}"
    if target in FP8_TYPE:
        assert FP8_TYPE[target] in reason.fix


@pytest.mark.parametrize("torch", ["2.11.0", "2.11.0+cpu", "2.11.0+cu130", "2.11.0+xpu"])
def test_a_torch_that_is_not_of_rocm_is_refused(torch):
    (reason,) = refused("linear_triton", linear("int4:g128"), "gfx942", torch=torch)
    assert (reason.code, reason.found) == ("backend.torch", f"torch {torch}")


@pytest.mark.parametrize("torch", ["2.11.0+rocm7.1", "2.12.0+rocm7.2.0.lw.git1a2b", "2.11.0a0+git1a2b3c"])
def test_torch_of_rocm_is_taken(torch):
    assert refused("linear_triton", linear("int4:g128"), "gfx942", torch=torch) == []


def test_other_gpus_are_refused_by_name():
    (reason,) = refused("moe_triton", experts("int4:g128"), "gfx1100")
    assert reason.found == "gfx1100: not one of gfx90a, gfx942, gfx950"
    nothing = BY_NAME["moe_triton"].refusals(experts("int4:g128"), replace(machine("gfx942"), devices=()))
    assert [reason.code for reason in nothing] == ["device.missing"]


def test_one_fitting_gpu_among_others_is_enough():
    both = replace(machine("gfx90a"), devices=(*machine("gfx90a").devices, *machine("gfx942").devices))
    assert BY_NAME["moe_fp8_fnuz_triton"].refusals(experts("fp8_e4m3:b128x128", numerics=EIGHT), both) == ()
