"""What is selected on an Arc B580 and a PVC, from stored facts: with and without other libraries, and where a policy names a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hal_backend_xpu.backend import OWN
from hal_backend_xpu.providers.kernels import KERNELS as PROVIDED

from hal_core.errors import NoKernelError
from hal_core.kv.scheme import parse_pair
from hal_core.machine import Version
from hal_core.numerics import numerics_from_word
from hal_core.policy import Policy
from hal_core.registry import RegisteredKernel
from hal_core.schemes import WeightScheme
from hal_core.select import select_from
from hal_core.spec import KVCacheSpec, LinearSpec, MoESpec
from hal_core.stored import load_facts

ALL = tuple(RegisteredKernel(f"xpu.{kernel.name}", "xpu", kernel) for kernel in (*OWN, *PROVIDED))
PLAIN = (Version("torch", "2.14.0+xpu"), Version("intel-sycl-rt", "2026.2.0"))
LIBRARIES = (*PLAIN[1:], Version("vllm-xpu-kernels", "0.1.16.2"), Version("auto-round-lib", "0.16.0"))
SOFTWARE = {
    "plain": PLAIN,
    "vllm": (*PLAIN, Version("vllm-xpu-kernels", "0.1.16.2")),
    "ark": (*PLAIN, Version("auto-round-lib", "0.16.0")),
    "none": (Version("torch", "2.14.0+xpu"),),
    **{f"all, torch {build}": (Version("torch", build), *LIBRARIES) for build in ("2.13.0+cpu", "2.14.0", "2.14.0+xpu")},
}


def linear(scheme, word="exact", n=4096, k=2048, **more):
    return LinearSpec(n, k, WeightScheme.parse(scheme), numerics=numerics_from_word(word), **more)


def moe(scheme, word="exact", hidden=2048, inner=768, **more):
    s = WeightScheme.parse(scheme)
    return MoESpec(128, 8, hidden, inner, s, s, s, numerics=numerics_from_word(word), **more)


def cache(scheme):
    return KVCacheSpec(32, 8, 128, 32, *parse_pair(scheme))


def chosen(name, software, spec, policy="auto"):
    machine = replace(load_facts(name), versions=SOFTWARE[software])
    try:
        return select_from(spec, machine, Policy.parse(policy), ALL, ()).intervals[-1].kernel.removeprefix("xpu.")
    except NoKernelError:
        return None


#: machine, software, spec, policy, chosen (None: nothing).
ROWS = (
    ("arc-b580", "plain", linear("int4:g128"), "auto", "linear_int4"),
    ("arc-b580", "vllm", linear("int4:g128", dtype="fp16"), "auto", "linear_vllm_int4"),
    ("arc-b580", "vllm", linear("int4:g128"), "auto", "linear_int4"),
    ("arc-b580", "ark", linear("int4:g128:zero", dtype="fp16"), "auto", "linear_int4"),
    ("arc-b580", "plain", linear("fp8_e4m3:b128x128"), "auto", "linear_fp8"),
    ("arc-b580", "plain", linear("fp8_e4m3:b128x128", "fp8"), "auto", "linear_fp8"),
    ("arc-b580", "plain", linear("fp8_e4m3:b128x128", "fp8"), "require:xpu.linear_torch_scaled_*", "linear_torch_scaled_block"),
    ("arc-b580", "plain", linear("fp8_e4m3:channel", "fp8"), "require:xpu.linear_torch_scaled_*", "linear_torch_scaled_channel"),
    ("arc-b580", "plain", linear("fp8_e4m3:channel"), "require:xpu.linear_torch_scaled_*", None),
    ("arc-b580", "vllm", linear("fp8_e4m3:channel"), "auto", "linear_vllm_fp8_w8a16"),
    ("arc-b580", "vllm", linear("fp8_e4m3:channel"), "require:xpu.linear_fp8", "linear_fp8"),
    ("arc-b580", "plain", linear("mxfp4:g32"), "auto", "linear_mxfp4"),
    ("pvc", "plain", linear("int8:channel", "int8"), "auto", "linear_int8_rows"),
    ("pvc", "plain", linear("int8:channel"), "auto", None),
    ("pvc", "none", linear("int8:channel", "int8"), "auto", None),
    ("arc-b580", "vllm", moe("mxfp4:g32"), "auto", "moe_vllm_mxfp4"),
    ("pvc", "vllm", moe("mxfp4:g32"), "auto", None),
    ("pvc", "vllm", moe("bf16"), "auto", "moe_vllm_bf16"),
    ("arc-b580", "ark", moe("int8:g128"), "auto", "moe_ark_int8"),
    *(("arc-b580", f"all, torch {build}", linear("int4:g128"), "auto", None) for build in ("2.13.0+cpu", "2.14.0")),
    ("arc-b580", "all, torch 2.14.0+xpu", linear("int4:g128"), "auto", "linear_int4"),
    ("pvc", "plain", cache("int8"), "auto", "kv_pages"),
    ("pvc", "plain", cache("turboquant:4"), "auto", "kv_pages"),
    ("pvc", "plain", cache("int4"), "auto", None),
)


@pytest.mark.parametrize(("machine", "software", "spec", "policy", "wanted"), ROWS, ids=str)
def test_rows(machine, software, spec, policy, wanted):
    assert chosen(machine, software, spec, policy) == wanted


@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.kernel.name)
def test_no_kernel_of_an_intel_gpu_is_served_by_a_torch_for_other_devices(kernel):
    """It would compute on the processor, and say that it runs on the GPU."""
    spec = {"linear": linear("int4:g128"), "moe": moe("int4:g128"), "kv": cache("int8")}[kernel.kernel.op]
    told = {}
    for build in ("2.13.0+cpu", "2.14.0", "2.14.0+xpu", "2.15.0a0+git12ab"):
        machine = replace(load_facts("arc-b580"), versions=(Version("torch", build), *PLAIN[1:]))
        reasons = kernel.kernel.refusals(spec, machine)
        told[build] = [reason.found for reason in reasons if reason.code == "backend.torch"]
    assert told == {"2.13.0+cpu": ["torch 2.13.0+cpu"], "2.14.0": ["torch 2.14.0"], "2.14.0+xpu": [], "2.15.0a0+git12ab": []}
