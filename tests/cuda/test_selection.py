"""Which of this backend's kernels serve what, decided for machines that are not here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hal_backend_cuda.kernels import KERNELS

from hal_core.contract import kernel_problems
from hal_core.machine import Device, Machine
from hal_core.numerics import Numerics, numerics_from_word
from hal_core.schemes import Granularity, WeightScheme
from hal_core.spec import Activation, LinearSpec, MoESpec

BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def machine(architecture: str) -> Machine:
    return Machine("linux_x86_64", (Device("cuda", "nvidia", architecture, "a GPU"),))


def linear(scheme: str, **more) -> LinearSpec:
    return LinearSpec(256, 512, WeightScheme.parse(scheme), **more)


def experts(scheme: str, **more) -> MoESpec:
    s = WeightScheme.parse(scheme)
    return MoESpec(8, 2, 256, 128, s, s, s, **more)


def codes(name: str, spec, architecture: str = "sm_90") -> set[str]:
    return {reason.code for reason in BY_NAME[name].refusals(spec, machine(architecture))}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_keeps_the_contract(kernel):
    assert kernel_problems(kernel, ("linear", "moe")) == ()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_integer_weights_are_served_from_ampere_on(architecture):
    for scheme in ("int4:g128", "int4:g32:zero", "int8:channel", "int4:g64:min", "int4:g32:act_order"):
        assert codes("linear_triton", linear(scheme), architecture) == set()
        assert codes("moe_triton", experts(scheme), architecture) == set()
    assert codes("moe_bf16_triton", experts("bf16"), architecture) == set()


def test_fp8_needs_tensor_cores_that_multiply_it():
    eight = numerics_from_word("fp8")
    assert "device.arch" in codes("linear_fp8_triton", linear("fp8_e4m3:b128x128", numerics=eight), "sm_80")
    assert codes("linear_fp8_triton", linear("fp8_e4m3:b128x128", numerics=eight), "sm_89") == set()
    assert codes("moe_fp8_triton", experts("fp8_e4m3:b128x128", numerics=eight)) == set()


def test_activations_are_quantized_only_where_that_is_tolerated():
    assert codes("linear_fp8_triton", linear("fp8_e4m3:b128x128", numerics=Numerics())) == {"numerics.activations"}
    assert codes("moe_fp8_rows_triton", experts("fp8_e4m3:channel", numerics=Numerics())) == {"numerics.activations"}


@pytest.mark.parametrize("block", [[128, 128], (128, 128)])
def test_blocks_of_128_are_served_as_list_and_as_tuple(block):
    scheme = WeightScheme("fp8_e4m3", Granularity.blocks(*block))
    # a configuration's list reaches the value as it is when nobody makes a tuple of it
    object.__setattr__(scheme.granularity, "block", block)
    spec = LinearSpec(256, 512, scheme, numerics=numerics_from_word("fp8"))
    assert codes("linear_fp8_triton", spec) == set()


def test_other_blocks_are_refused():
    assert codes("linear_fp8_triton", linear("fp8_e4m3:b64x128", numerics=numerics_from_word("fp8"))) == {"scheme.granularity"}


def test_what_is_not_served_is_named():
    assert codes("linear_triton", linear("int4:g48")) == {"scheme.group"}
    assert codes("linear_triton", linear("int4:g128", dtype="fp32")) == {"dtype.activation"}
    assert "epilogue.lora" in codes("moe_triton", experts("int4:g128", lora=True))
    mixed = replace(experts("int4:g128"), down=WeightScheme.parse("int8:channel"))
    assert codes("moe_triton", mixed) == {"epilogue.mixed_schemes"}
    assert codes("moe_triton", experts("int4:g128"), "sm_70") == {"device.arch"}


def test_paddings_are_told():
    spec = LinearSpec(100, 200, WeightScheme.parse("int4:g32"))
    assert {(p.dim, p.asked, p.padded) for p in BY_NAME["linear_triton"].padding(spec)} == {("n", 100, 128), ("k", 200, 256)}
    assert BY_NAME["linear_fp8_triton"].padding(linear("fp8_e4m3:b128x128")) == ()


def test_gpt_oss_activation_is_served():
    spec = experts("int4:g32", activation=Activation("swiglu_oai", alpha=1.702, limit=7.0), bias=True)
    assert codes("moe_triton", spec) == set()
