"""What the ops give to vllm-xpu-kernels and auto-round-lib, computed on the host: order, scales, zero points, routing; and selection."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated_libraries import libraries
from hal_backend_xpu.providers.entries import LINEARS, MOES
from hal_backend_xpu.providers.kernels import KERNELS
from hal_backend_xpu.providers.ops import ArkExperts, ArkLinear, TorchLinear, VllmExperts, VllmLinear

from hal_core.check import check
from hal_core.contract import kernel_problems
from hal_core.dtypes import torch_dtype
from hal_core.errors import ContractError, ShapeError, UnfitWeightsError
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.machine import Device, Machine, Version
from hal_core.ops import Routed
from hal_core.reference.inputs import input_quantizer
from hal_core.schemes import ActivationScheme, Granularity, WeightScheme
from hal_core.spec import Activation, LinearSpec, MoESpec
from hal_core.testing import truth
from hal_core.testing.data import random_input, random_weight

__all__ = ["libraries"]
BLOCK = next(entry for entry in LINEARS if entry.name == "torch_scaled_block")
CPU, E, TOP_K, H, INNER, TOKENS = torch.device("cpu"), 5, 3, 256, 128, 11


def rng():
    return torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())


def schemes_of(entry):
    """A scheme for every granularity and zero kind that an entry serves."""
    (dtype,) = entry.schemes.dtypes
    grains = {"group": "g32", "block": "b128x128", "channel": "channel"}
    if dtype in ("bf16", "fp16"):
        return [dtype]
    return [
        f"{dtype}:{grains[kind.value]}{':zero' * (zero.value == 'integer')}"
        for kind in entry.schemes.granularities
        for zero in entry.schemes.zeros
    ]


CASES = [(entry, scheme, dtype) for entry in MOES for scheme in schemes_of(entry) for dtype in entry.dtypes]
LINEAR_CASES = [(entry, scheme, dtype) for entry in LINEARS for scheme in schemes_of(entry) for dtype in entry.dtypes]


def named(value):
    return getattr(value, "name", str(value))


def experts_op(entry, spec, weights):
    return (ArkExperts if entry.name.startswith("ark") else VllmExperts)(spec, weights, entry, CPU, "bmg")


def linear_op(entry, spec, weights):
    kinds = {"ark": ArkLinear, "torch": TorchLinear, "vllm": VllmLinear}
    return kinds[entry.name.partition("_")[0]](spec, weights, entry, CPU, "bmg")


def problem(entry, text, dtype, **changes):
    scheme, generator = WeightScheme.parse(text), rng()
    spec = MoESpec(E, TOP_K, H, INNER, scheme, scheme, scheme, numerics=entry.numerics, dtype=dtype, **changes)
    shapes = {"gate": (E, INNER, H), "up": (E, INNER, H), "down": (E, H, INNER)}
    weights = MoEWeights(**{name: random_weight(scheme, shape, generator, dtype) for name, shape in shapes.items()})
    ids = torch.randint(0, E, (TOKENS, TOP_K), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    routing = Routed(ids, torch.rand(ids.shape, generator=generator) + 0.05)
    return spec, weights, random_input((TOKENS, H), generator, dtype, outliers=True), routing


def distance(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("entry", "scheme", "dtype"), CASES, ids=named)
def test_experts_mean_what_they_say(libraries, entry, scheme, dtype):
    limit = Activation("silu", limit=1.5) if entry.limit else Activation()
    spec, weights, x, routing = problem(entry, scheme, dtype, routed_scaling=1.7, activation=limit)
    op = experts_op(entry, spec, weights)
    wanted = truth.experts(spec, weights, x, routing.topk_ids, routing.topk_weights, None).sum(1) * 1.7
    out = torch.full_like(x, float("nan"))
    assert op.apply(x, routing, out=out) is out
    assert distance(out, wanted) < 6e-3
    places = {name: buffer.data_ptr() for name, buffer in op.named_buffers()}
    _, other, _, _ = problem(entry, scheme, dtype)
    op.update(other)
    assert places == {name: buffer.data_ptr() for name, buffer in op.named_buffers()}
    assert torch.equal(op.apply(x, routing), experts_op(entry, spec, other).apply(x, routing))
    assert op.apply(x[:0], Routed(routing.topk_ids[:0], routing.topk_weights[:0])).shape == (0, H)


@pytest.mark.parametrize("entry", MOES, ids=named)
def test_slots_that_are_not_summed_are_each_their_own(libraries, entry):
    spec, weights, x, routing = problem(entry, schemes_of(entry)[0], entry.dtypes[0], routed_scaling=1.7)
    wanted = truth.experts(spec, weights, x, routing.topk_ids, routing.topk_weights, None) * 1.7
    out = torch.full((TOKENS, TOP_K, H), float("nan"), dtype=x.dtype)
    assert experts_op(entry, spec, weights).apply(x, routing, out=out, reduce=False) is out
    assert distance(out, wanted) < 6e-3
    assert not out[routing.topk_ids < 0].any()


@pytest.mark.parametrize(("entry", "scheme", "dtype"), LINEAR_CASES, ids=named)
def test_linears_mean_what_they_say(libraries, entry, scheme, dtype):
    generator = rng()
    spec = LinearSpec(128, 256, WeightScheme.parse(scheme), numerics=entry.numerics, dtype=dtype, bias=True)
    weights = LinearWeights(
        random_weight(spec.weights, (128, 256), generator, dtype), torch.randn(128, generator=generator).to(torch_dtype(dtype))
    )
    x = torch.randn(3, 7, 256, generator=generator).to(torch_dtype(dtype))
    op = linear_op(entry, spec, weights)
    found = op.apply(x)
    assert found.shape == (3, 7, 128)
    assert distance(found.view(21, 128), truth.linear(weights, x.view(21, 256))) < (6e-3 if entry.quant is None else 5e-2)
    out = torch.full_like(found, float("nan"))
    assert op.apply(x, out=out) is out
    assert torch.equal(out, found)
    assert op.apply(x[:0]).shape == (0, 7, 128)
    other = LinearWeights(random_weight(spec.weights, (128, 256), generator, dtype), weights.bias)
    op.update(other)
    assert torch.equal(op.apply(x), linear_op(entry, spec, other).apply(x))


def test_the_last_group_of_scaled_mm_may_be_smaller(libraries):
    """Rows of 208 columns have a second group of 80; weights of 144 rows a second block of 16."""
    spec, generator = LinearSpec(144, 208, WeightScheme.parse("fp8_e4m3:b128x128"), numerics=BLOCK.numerics), rng()
    weights = LinearWeights(random_weight(spec.weights, (144, 208), generator))
    x = torch.randn(5, 208, generator=generator).to(torch.bfloat16)
    x[:, 128:] *= 100  # a scale of the whole row would round the first group away
    x[3] = 0
    found = linear_op(BLOCK, spec, weights).apply(x)
    quantizer = input_quantizer(replace(spec, activations=ActivationScheme("fp8_e4m3", Granularity.groups(128))))
    assert distance(found, truth.linear(weights, quantizer(x.float()))) < 4e-3
    assert not found[3].any()


def test_a_nan_stays_in_its_row(libraries):
    spec = LinearSpec(128, 256, WeightScheme.parse("fp8_e4m3:b128x128"), numerics=BLOCK.numerics)
    x = torch.ones(3, 256, dtype=torch.bfloat16)
    x[1, 7] = float("nan")
    found = linear_op(BLOCK, spec, LinearWeights(random_weight(spec.weights, (128, 256), rng()))).apply(x)
    assert [bool(row.isnan().any()) for row in found] == [False, True, False]


def test_a_function_that_writes_another_dtype_is_found_out(libraries, monkeypatch):
    spec = LinearSpec(128, 256, WeightScheme.parse("fp8_e4m3:channel"))
    op = linear_op(LINEARS[1], spec, LinearWeights(random_weight(spec.weights, (128, 256), rng())))
    monkeypatch.setattr(op, "product", lambda rows: torch.zeros(rows.shape[0], 128, dtype=torch.float16))
    with pytest.raises(ContractError, match=r"torch\.float16 \[2, 128\]; it should be torch\.bfloat16"):
        op.apply(torch.zeros(2, 256, dtype=torch.bfloat16))


@pytest.mark.parametrize("entry", [MOES[2], MOES[5]], ids=named)
def test_ids_out_of_range_reach_no_expert_and_are_reported(libraries, entry):
    spec, weights, x, routing = problem(entry, "int4:g32", "bf16")
    op = experts_op(entry, spec, weights)
    wrong = routing.topk_ids.clone()
    wrong[4, 1], wrong[5, 0] = E, -7
    right = wrong.clone()
    right[4, 1] = right[5, 0] = -1
    check()
    expected = op.apply(x, Routed(right, routing.topk_weights))
    check()
    assert torch.equal(op.apply(x, Routed(wrong, routing.topk_weights)), expected)
    with pytest.raises(ShapeError, match=f"{E} at token 4, slot 1"):
        check()
    check()


def test_scales_that_the_models_dtype_cannot_hold_are_refused(libraries):
    spec = LinearSpec(128, 256, WeightScheme.parse("int4:g32"), dtype="fp16")
    weight = random_weight(spec.weights, (128, 256), rng(), "fp32")
    weight.scales[3, 2] = 1e6
    with pytest.raises(UnfitWeightsError, match="outside the range of fp16"):
        linear_op(LINEARS[0], spec, LinearWeights(weight))


def machine(architecture: str, **versions: str) -> Machine:
    found = tuple(Version(name.replace("_", "-"), version) for name, version in versions.items())
    return Machine("linux_x86_64", (Device("xpu", "intel", architecture, "a GPU"),), versions=found)


BOTH = {"vllm_xpu_kernels": "0.1.16.2", "auto_round_lib": "0.16.0"}
BY_NAME = {kernel.name: kernel for kernel in KERNELS}


@pytest.mark.parametrize("kernel", KERNELS, ids=named)
def test_every_kernel_keeps_the_contract(kernel):
    assert kernel_problems(kernel, ("linear", "moe")) == ()
    assert kernel.provider in ("vllm-xpu-kernels", "auto-round-lib", "torch")


def codes(name, spec, where):
    return [(reason.code, reason.found) for reason in BY_NAME[name].refusals(spec, where)]


def test_limits_are_refusals_with_their_numbers():
    def experts(text, **more):
        scheme = WeightScheme.parse(text)
        sizes = {"num_experts": 8, "top_k": 2, "hidden": 256, "intermediate": 128, **more}
        return MoESpec(**sizes, up=scheme, down=scheme, gate=scheme)

    here = machine("bmg", **BOTH)
    assert codes("moe_vllm_int4", experts("int4:g32"), here) == []
    assert codes("moe_ark_int4", experts("int4:g32:zero"), here) == []
    assert [code for code, _ in codes("moe_vllm_int4", experts("int4:g32:zero"), here)] == ["scheme.zero"] * 3
    ((code, found),) = codes("moe_vllm_int4", experts("int4:g32"), machine("pvc", **BOTH))
    assert (code, found[:19]) == ("device.arch", "pvc; serves bmg, ln")
    assert codes("moe_vllm_bf16", experts("bf16"), machine("pvc", **BOTH)) == []
    ((code, found),) = codes("moe_ark_int4", experts("int4:g32", intermediate=136, hidden=256), here)[:1]
    assert code == "shape.multiple"
    assert "multiple of 16" in found
    assert ("shape.multiple", "needs a multiple of the group, 128") in codes("moe_ark_int4", experts("int4:g128", intermediate=192), here)
    assert [code for code, _ in codes("moe_vllm_int4", experts("int4:g32"), machine("bmg"))] == ["backend.package"]
    old = machine("bmg", **{**BOTH, "auto_round_lib": "0.13.0"})
    assert codes("moe_ark_int4", experts("int4:g32"), old) == [("backend.package", "version 0.13.0")]


def test_what_selection_refuses_is_never_converted(libraries):
    spec, weights, _, _ = problem(MOES[2], "int4:g32", "bf16")
    with pytest.raises(UnfitWeightsError, match="vllm-xpu-kernels: vllm_int4: pvc"):
        VllmExperts(spec, weights, MOES[2], CPU, "pvc")
