"""The providers' kernels answer every question of the contract, and say what they need."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hal_backend_cuda.providers.kernels import KERNELS

from hal_core.contract import kernel_problems
from hal_core.kv.scheme import KVScheme
from hal_core.machine import Version
from hal_core.schemes import WeightScheme
from hal_core.spec import KVCacheSpec, LinearSpec, MoESpec
from hal_core.stored import load_facts

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
H200 = replace(load_facts("h200"), versions=(Version("humming-kernels", "0.1.20"), Version("flashinfer-python", "0.6.13")))


def linear(text, **changes):
    return LinearSpec(**{"n": 512, "k": 1024, "weights": WeightScheme.parse(text), **changes})


def experts(text, **changes):
    scheme = WeightScheme.parse(text)
    return MoESpec(
        **{"num_experts": 8, "top_k": 2, "hidden": 512, "intermediate": 256, "up": scheme, "down": scheme, "gate": scheme, **changes}
    )


def codes(name, spec, machine=H200):
    return [reason.code for reason in BY_NAME[name].refusals(spec, machine)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_the_contract_is_kept(kernel):
    assert kernel_problems(kernel) == ()


def test_names_are_unique():
    assert len(BY_NAME) == len(KERNELS)


def test_without_the_library_the_reason_names_it_and_how_to_get_it():
    bare = replace(H200, versions=())
    reasons = [r for r in BY_NAME["linear_humming_w4a16"].refusals(linear("int4:g128"), bare) if r.code == "backend.package"]
    assert [(r.asked, r.found, r.fix) for r in reasons] == [
        ("humming-kernels >=0.1.20,<0.2", "not installed", "pip install 'hal-backend-cuda[humming]'")
    ]
    old = replace(H200, versions=(Version("humming-kernels", "0.1.3"),))
    assert codes("linear_humming_w4a16", linear("int4:g128"), old) == ["backend.package"]


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("w4a16", "int4:g128"), ("w4a16", "int4:g32:zero"), ("w4a16", "int4:channel"), ("w8a16", "int8:g128"),
        ("fp8_a16", "fp8_e4m3:b128x128"), ("mxfp4", "mxfp4:g32"), ("nvfp4", "nvfp4:g16"),
    ],
)  # fmt: skip
def test_exact_requests_are_served(name, spec):
    assert codes(f"linear_humming_{name}", linear(spec)) == []
    assert codes(f"moe_humming_{name}", experts(spec)) == []


@pytest.mark.parametrize(
    ("name", "spec"), [("w4a8_int8", "int4:g128"), ("w4a8_fp8", "int4:g128"), ("fp8_block", "fp8_e4m3:b128x128"), ("w8a8", "int8:channel")]
)
def test_quantized_activations_are_served_only_where_they_are_tolerated(name, spec):
    kernel = BY_NAME[f"linear_humming_{name}"]
    assert "numerics.activations" in codes(kernel.name, linear(spec))
    assert codes(kernel.name, linear(spec, numerics=kernel.numerics)) == []
    assert codes(f"moe_humming_{name}", experts(spec, numerics=kernel.numerics)) == []


def test_integer_group_scales_are_told_as_a_change_of_the_weights():
    kernel = BY_NAME["linear_humming_w4a8_int8"]
    kept = replace(kernel.numerics, weights="as_stored")
    assert codes(kernel.name, linear("int4:g128", numerics=kept)) == ["numerics.weights"]
    assert "humming_integer_group_scales" in [t.name for t in kernel.transforms(linear("int4:g128"))]


@pytest.mark.parametrize(
    ("name", "spec", "code"),
    [
        ("w4a16", linear("int4:g128", n=500), "shape.multiple"),
        ("w4a16", linear("int4:g96", k=1152), "scheme.group"),
        ("w4a16", linear("int4:g512", k=1280), "scheme.group"),
        ("w4a16", linear("int4:g32:min"), "scheme.zero"),
        ("w4a16", linear("int4:g32:act_order"), "scheme.act_order"),
        ("w4a16", linear("int4:g32", out_dtype="fp32"), "dtype.output"),
        ("w4a16", linear("int4:g32", dtype="fp32"), "dtype.activation"),
        ("mxfp4", linear("mxfp4:g32", dtype="fp16"), "dtype.activation"),
        ("w8a16", linear("int8:channel", dtype="fp16"), "dtype.activation"),
        ("w8a8", linear("int8:channel", dtype="fp16"), "dtype.activation"),
        ("fp8_a16", linear("fp8_e4m3:b64x128"), "scheme.granularity"),
    ],
)
def test_refusals_of_linears(name, spec, code):
    assert code in codes(f"linear_humming_{name}", spec)


def test_refusals_of_experts():
    name = "moe_humming_w4a16"
    assert codes(name, experts("int4:g128", router_weight_on_input=True)) == ["epilogue.router_weight_on_input"]
    assert codes(name, replace(experts("int4:g128"), down=WeightScheme.parse("int4:g64"))) == ["epilogue.mixed_schemes"]
    assert codes(name, experts("int4:g256", intermediate=128)) == ["scheme.group"]
    assert codes(name, experts("int4:g128", expert_map=True, local_experts=4, bias=True, routed_scaling=2.5)) == []


def test_rows_in_groups_are_served_where_nothing_is_asked_of_their_sum():
    name = "moe_humming_w4a16"
    assert codes(name, experts("int4:g128", routing="grouped", bias=True)) == []
    assert codes(name, experts("int4:g128", routing="grouped", expert_map=True)) == ["epilogue.expert_map"]
    assert codes(name, experts("int4:g128", routing="grouped", routed_scaling=2.5)) == ["epilogue.routed_scaling"]
    assert codes(name, experts("int4:g128", routing="batched")) == ["routing.form"]


def test_fp16_is_refused_where_sums_are_rounded_before_the_scales_of_rows():
    for recipe, scheme in (("w4a16", "int4:channel"), ("w8a16", "int8:channel"), ("fp8_a16", "fp8_e4m3:channel"), ("nvfp4", "nvfp4:g16")):
        name = f"moe_humming_{recipe}"
        assert codes(name, experts(scheme, dtype="fp16")) == ["dtype.activation"]
        assert codes(name, experts(scheme)) == []
    # one global scale is applied in float32; gate and up in one matrix have two
    assert codes("moe_humming_nvfp4", replace(experts("nvfp4:g16", dtype="fp16"), gate=None)) == []
    assert codes("moe_humming_w4a16", experts("int4:g128", dtype="fp16")) == []


def test_processors_and_old_devices_are_refused():
    assert codes("linear_humming_w4a16", linear("int4:g128"), replace(load_facts("avx2-laptop"), versions=H200.versions)) == [
        "device.missing"
    ]
    turing = replace(H200, devices=(replace(H200.devices[1], architecture="sm_75"),))
    assert codes("linear_humming_w4a16", linear("int4:g128"), turing) == ["dtype.activation"]
    assert codes("linear_humming_w4a16", linear("int4:g128", dtype="fp16"), turing) == []
    assert "device.arch" in codes("linear_humming_fp8_block", linear("fp8_e4m3:b128x128"), turing)


def cache(kind, **changes):
    scheme = KVScheme.parse(kind)
    return KVCacheSpec(
        **{"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "keys": scheme, "values": scheme, **changes}
    )


def test_caches():
    name = "kv_flashinfer"
    for kind in ("bf16", "fp8"):
        assert codes(name, cache(kind, window=4096, soft_cap=30.0)) == []
    assert codes(name, cache("fp16", dtype="fp16")) == []
    assert codes(name, cache("fp16")) == ["kv.scheme"]
    assert codes(name, cache("turboquant:4")) == ["kv.scheme"] * 2
    assert codes(name, cache("fp8:head")) == ["kv.scheme"] * 2
    assert codes(name, cache("bf16", head_dim=96)) == ["kv.head_dim"] * 2
    assert codes(name, cache("bf16", sinks=True)) == ["epilogue.sinks"]
    assert codes(name, cache("bf16", value_dim=64)) == ["epilogue.value_dim"]
    ampere = replace(H200, devices=(replace(H200.devices[1], architecture="sm_80"),))
    assert codes(name, cache("fp8"), ampere) == ["kv.scheme"]
    assert codes(name, cache("bf16"), ampere) == []


def test_experts_of_flashinfer():
    b200 = replace(H200, devices=(replace(H200.devices[1], architecture="sm_100"),))
    bf16 = experts("bf16")
    assert codes("moe_flashinfer_cutlass_bf16", bf16) == []
    assert codes("moe_flashinfer_trtllm_bf16", bf16) == ["device.arch"]
    assert codes("moe_flashinfer_trtllm_bf16", bf16, b200) == []
    assert codes("moe_flashinfer_trtllm_bf16", replace(bf16, out_dtype="fp16"), b200) == ["dtype.output"]
    assert codes("moe_flashinfer_trtllm_mxint4", experts("int4:g64"), b200) == ["scheme.group"]
    assert codes("moe_flashinfer_trtllm_mxfp4", experts("mxfp4:g32", bias=True), b200) == []
    assert codes(
        "moe_flashinfer_trtllm_fp8_tensor", experts("fp8_e4m3:tensor", numerics=BY_NAME["moe_flashinfer_trtllm_fp8_tensor"].numerics), b200
    ) == ["backend.package"]
    found = BY_NAME["moe_flashinfer_trtllm_mxfp4"].padding(experts("mxfp4:g32", intermediate=192))
    assert [(p.dim, p.asked, p.padded) for p in found] == [("intermediate", 192, 256)]
