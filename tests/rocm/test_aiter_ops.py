"""What the ops give to AITER, computed on the host by functions with AITER's parameters: order, scales, types and routing.

It shows that arguments mean what we read in AITER's source, not that AITER's kernels are right.
"""

from __future__ import annotations

import enum
import os
import sys
import types

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; `make test-rocm` brings it")

from hal_backend_rocm.aiter_provider import weights as packing
from hal_backend_rocm.aiter_provider.entries import LINEARS, MOES
from hal_backend_rocm.aiter_provider.kernels import KERNELS
from hal_backend_rocm.aiter_provider.layouts import separated, unpacked_int4, unshuffled, unshuffled_scales
from hal_backend_rocm.aiter_provider.ops import AiterExperts, AiterLinear, report_wrong_ids

from hal_core.canonical import QuantizedTensor
from hal_core.check import check
from hal_core.errors import ShapeError, UnfitWeightsError
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.machine import Device, Machine, Version
from hal_core.ops import Routed
from hal_core.schemes import WeightScheme
from hal_core.spec import Activation, LinearSpec, MoESpec
from hal_core.testing import truth
from hal_core.testing.data import random_input, random_weight

CPU = torch.device("cpu")
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
E, TOP_K, H, INNER, TOKENS = 5, 3, 128, 256, 11
SOFTWARE = (Version("torch", "2.11.0+rocm7.1"), Version("amd-aiter", "0.1.7.post2.dev18"))


class ActivationType(enum.Enum):
    Silu = 0
    Swiglu = 2


class QuantType(enum.Enum):
    No = 0
    per_Token = 2  # noqa: N815 - AITER's own name
    per_1x32 = 3
    per_128x128 = 5


def widened_mxfp4(weight, scales, striped):
    """float64 weights from E2M1 codes and E8M0 scales, both in AITER's order; striped: gate and up by turns."""
    count, n, width = weight.shape
    codes, grid = unshuffled(weight.view(torch.uint8)), unshuffled_scales(scales.view(torch.uint8)).view(count, n, -1)
    if striped:
        codes, grid = (torch.cat(separated(part), dim=-2) for part in (codes, grid))
    plain = QuantizedTensor(WeightScheme.parse("mxfp4:g32"), (count, n, 2 * width), codes.contiguous(), scales=grid.contiguous())
    return plain.dequantize().double()


def wide(weight, scales, striped=False):
    """float64 weights from codes in AITER's order, or plain, and scales by row or by block."""
    if weight.dtype == torch.float4_e2m1fn_x2:
        assert weight.is_shuffled
        return widened_mxfp4(weight, scales, striped)
    if weight.dtype == torch.uint32:
        assert not weight.is_shuffled
        codes = unpacked_int4(weight)
        low, high = ((codes.to(torch.int16) >> shift) & 15 for shift in (0, 4))
        signed = torch.stack([low, high], -1).flatten(-2)
        return (signed - 16 * (signed > 7)).double() * scales.double()
    plain = (unshuffled(weight) if weight.is_shuffled else weight).double()
    if scales is None:
        return plain
    rows, columns = plain.shape[-2] // scales.shape[-2], plain.shape[-1] // scales.shape[-1]
    return plain * scales.double().repeat_interleave(rows, -2).repeat_interleave(columns, -1)


def fused_moe(
    hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None, activation=ActivationType.Silu, quant_type=QuantType.No,
    doweight_stage1=False, w1_scale=None, w2_scale=None, dtype=None, bias1=None, bias2=None,
):  # fmt: skip
    assert (activation is ActivationType.Swiglu) == (bias1 is not None) == (bias2 is not None)
    assert (quant_type is QuantType.per_1x32) == (w1.dtype == torch.float4_e2m1fn_x2)
    assert (quant_type is QuantType.No) == (w1_scale is None)
    assert topk_ids.dtype == expert_mask.dtype == torch.int32
    assert len(expert_mask) == len(w1) + 1
    assert topk_weight.dtype == torch.float32
    first, second = wide(w1, w1_scale, striped=bias1 is not None), wide(w2, w2_scale)
    assert hidden_states.shape[1] == first.shape[2] == second.shape[1]
    out = torch.zeros_like(hidden_states, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weight.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if not expert_mask[expert]:
                continue
            inner = first[expert] @ hidden_states[token].double()
            gate, up = (inner if bias1 is None else inner + bias1[expert].double()).chunk(2)
            if activation is ActivationType.Swiglu:
                gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
            act = gate * torch.sigmoid(gate * (1.702 if activation is ActivationType.Swiglu else 1)) * up
            out[token] += weight * (second[expert] @ act + (0 if bias2 is None else bias2[expert].double()))
    return out.to(dtype)


def product(XQ, WQ, x_scale, w_scale, bias=None, dtype=torch.bfloat16):
    assert XQ.dtype == WQ.dtype
    assert x_scale.shape[0] == XQ.shape[0]
    columns = XQ.shape[1] // x_scale.shape[1]
    x = XQ.double() * x_scale.double().repeat_interleave(columns, -1)
    return (x @ wide(WQ, w_scale).T).to(dtype)


@pytest.fixture(autouse=True)
def library(monkeypatch):
    module = types.ModuleType("aiter")
    module.ActivationType, module.QuantType = ActivationType, QuantType
    moe, gemm = types.ModuleType("aiter.fused_moe"), types.ModuleType("aiter.ops.gemm_op_a8w8")
    moe.fused_moe = fused_moe
    gemm.gemm_a8w8 = gemm.gemm_a8w8_bpreshuffle = gemm.gemm_a8w8_blockscale = product
    found = {"aiter": module, "aiter.fused_moe": moe, "aiter.ops": types.ModuleType("aiter.ops"), "aiter.ops.gemm_op_a8w8": gemm}
    for name, made in found.items():
        monkeypatch.setitem(sys.modules, name, made)


def rng():
    return torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())


def scheme_of(entry):
    dtype, kind = entry.schemes.dtypes[0], entry.schemes.granularities[0].value
    return WeightScheme.parse(dtype if dtype == "bf16" else f"{dtype}:{ {'block': 'b128x128', 'group': 'g32'}.get(kind, kind) }")


def problem(entry, **changes):
    scheme, generator = scheme_of(entry), rng()
    spec = MoESpec(**{"num_experts": E, "top_k": TOP_K, "hidden": H, "intermediate": INNER, "up": scheme, "down": scheme, "gate": scheme,
                      "numerics": entry.numerics, "activation": entry.activation, "bias": entry.bias, **changes})  # fmt: skip
    shapes = {"gate": (E, spec.intermediate, H), "up": (E, spec.intermediate, H), "down": (E, H, spec.intermediate)}
    biases = {f"{name}_bias": torch.randn(shape[:2], generator=generator) for name, shape in shapes.items() if spec.bias}
    weights = MoEWeights(**{name: random_weight(scheme, shape, generator) for name, shape in shapes.items()}, **biases)
    ids = torch.randint(0, E, (TOKENS, TOP_K), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    routing = Routed(ids, torch.rand(ids.shape, generator=generator) + 0.05)
    return spec, weights, random_input((TOKENS, H), generator, "bf16", outliers=True), routing


def distance(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


EACH = [(entry, target) for entry in MOES for target in entry.targets]


@pytest.mark.parametrize(("entry", "target"), EACH, ids=lambda v: getattr(v, "name", v))
def test_experts_mean_what_they_say(entry, target):
    spec, weights, x, routing = problem(entry, routed_scaling=1.7)
    op = AiterExperts(spec, weights, entry, CPU, target)
    if entry.fp8:
        assert op.get_buffer("w1").dtype == FP8[target]
    wanted = truth.experts(spec, weights, x, routing.topk_ids, routing.topk_weights, None).sum(1) * 1.7
    assert distance(op.apply(x, routing), wanted) < 4e-3
    out = torch.full_like(x, float("nan"))
    assert op.apply(x, routing, out=out) is out
    assert distance(out, wanted) < 4e-3


@pytest.mark.parametrize("entry", MOES, ids=lambda e: e.name)
def test_experts_are_updated_in_place(entry):
    spec, weights, x, routing = problem(entry)
    op = AiterExperts(spec, weights, entry, CPU, entry.targets[0])
    places = {name: buffer.data_ptr() for name, buffer in op.named_buffers()}
    _, other, _, _ = problem(entry)
    op.update(other)
    assert places == {name: buffer.data_ptr() for name, buffer in op.named_buffers()}
    assert distance(op.apply(x, routing), truth.experts(spec, other, x, routing.topk_ids, routing.topk_weights, None).sum(1)) < 4e-3


def test_casting_a_model_leaves_weights_alone():
    spec, weights, x, routing = problem(MOES[1])
    op = AiterExperts(spec, weights, MOES[1], CPU, "gfx942")
    before = op.apply(x, routing)
    op.to(torch.float16)
    assert op.get_buffer("w1_scale").dtype == torch.float32
    assert torch.equal(op.apply(x, routing), before)


BY_NAME = {entry.name: entry for entry in MOES}
REFUSED = [
    ("fp8_ptpc", "gfx942", {"intermediate": 192}), ("int8", "gfx950", {}), ("bf16", "gfx90a", {}), ("mxfp4", "gfx942", {}),
    ("int4_fp8", "gfx942", {"intermediate": 64}), ("mxfp4_bf16", "gfx950", {"activation": Activation("swiglu_oai", 1.5, 7.0)}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "target", "changes"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_selection_refuses_is_never_converted(monkeypatch, name, target, changes):
    """The predicate that the kernel asks for its refusals is asked by preparation, before anything is packed."""
    entry = BY_NAME[name]
    spec, weights, _, _ = problem(entry, **changes)
    machine = Machine("linux_x86_64", (Device("rocm", "amd", target, "a GPU"),), versions=SOFTWARE)
    (kernel,) = (kernel for kernel in KERNELS if kernel.name == f"moe_aiter_{name}")
    assert [reason for reason in kernel.refusals(spec, machine) if not reason.code.startswith("numerics.")]
    for packer in ("_matrix", "_mxfp4"):
        monkeypatch.setattr(packing, packer, lambda *_: pytest.fail("weights were converted"))
    with pytest.raises(UnfitWeightsError, match=f"AITER's {entry.name}"):
        AiterExperts(spec, weights, entry, CPU, target)


@pytest.mark.parametrize(("entry", "target"), EACH, ids=lambda v: getattr(v, "name", v))
def test_what_selection_accepts_is_converted(entry, target):
    spec, weights, _, _ = problem(entry)
    machine = Machine("linux_x86_64", (Device("rocm", "amd", target, "a GPU"),), versions=SOFTWARE)
    (kernel,) = (kernel for kernel in KERNELS if kernel.name == f"moe_aiter_{entry.name}")
    assert kernel.refusals(spec, machine) == ()
    widths = {padding.dim: padding.padded for padding in kernel.padding(spec)}
    op = AiterExperts(spec, weights, entry, CPU, target)
    assert op.get_buffer("w2").shape[1] == widths.get("hidden", spec.hidden)


def test_scales_that_are_no_bytes_are_refused():
    spec, weights, _, _ = problem(BY_NAME["mxfp4"])
    up = QuantizedTensor(weights.up.scheme, weights.up.shape, weights.up.values, weights.up.scales.float())
    with pytest.raises(UnfitWeightsError, match=r"scales of torch\.float32"):
        AiterExperts(spec, MoEWeights(up, weights.down, weights.gate), BY_NAME["mxfp4"], CPU, "gfx950")


def test_wrong_inputs_are_named():
    spec, weights, x, routing = problem(MOES[0])
    op = AiterExperts(spec, weights, MOES[0], CPU, "gfx942")
    with pytest.raises(ShapeError, match=r"give torch\.bfloat16"):
        op.apply(x.float(), routing)
    with pytest.raises(ShapeError, match="ids and weights"):
        op.apply(x, Routed(routing.topk_ids[:, :1], routing.topk_weights))
    with pytest.raises(ShapeError, match="out"):
        op.apply(x, routing, out=torch.empty(1, 2))
    assert op.apply(x[:0], Routed(routing.topk_ids[:0], routing.topk_weights[:0])).shape == (0, H)


def test_ids_out_of_range_reach_no_expert():
    spec, weights, x, routing = problem(MOES[0])
    op = AiterExperts(spec, weights, MOES[0], CPU, "gfx942")
    wrong = routing.topk_ids.clone()
    wrong[4, 1], wrong[5, 0] = E, -7
    right = wrong.clone()
    right[4, 1] = right[5, 0] = -1
    assert torch.equal(op.apply(x, Routed(wrong, routing.topk_weights)), op.apply(x, Routed(right, routing.topk_weights)))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter, TRITON_INTERPRET=1; or a GPU")
def test_ids_out_of_range_are_reported():
    report_wrong_ids(torch.tensor([[0, -1], [E - 1, 1]]), E)
    check()
    report_wrong_ids(torch.tensor([[0, 1], [2, E + 2]]), E)
    with pytest.raises(ShapeError, match=f"{E + 2} at token 1, slot 1"):
        check()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter, TRITON_INTERPRET=1; or a GPU")
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("entry", LINEARS, ids=lambda e: e.name)
def test_linears_mean_what_they_say(entry, target):
    import triton_interpreter

    triton_interpreter.repair()
    generator = rng()
    spec = LinearSpec(128, 256, scheme_of(entry), numerics=entry.numerics)
    weights = LinearWeights(random_weight(spec.weights, (128, 256), generator))
    x = torch.randn(3, 7, 256, generator=generator).to(torch.bfloat16)
    op = AiterLinear(spec, weights, entry, CPU, target)
    if entry.fp8:
        assert op.get_buffer("WQ").dtype == FP8[target]
    found = op.apply(x)
    assert found.shape == (3, 7, 128)
    assert distance(found.view(21, 128), truth.linear(weights, x.view(21, 256))) < (4e-2 if entry.fp8 else 1.5e-2)
    assert op.apply(x[:0]).shape == (0, 7, 128)
