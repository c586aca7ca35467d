"""FlashInfer's entries for experts: bound against the installed version, and computed on the host from the arguments they would get."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("flashinfer", reason="needs flashinfer-python")

from flashinfer_emulated import emulated
from hal_backend_cuda.providers.flashinfer import moe
from hal_backend_cuda.providers.flashinfer.moe import FlashInferExperts, packed_routing
from hal_backend_cuda.providers.flashinfer.moe_entries import ENTRIES, QUANTIZERS
from hal_backend_cuda.providers.flashinfer.mxfp8 import mxfp8_arguments

from hal_core.calls import Bound, bind
from hal_core.errors import ContractError, ShapeError, UnfitWeightsError
from hal_core.kernel import MoEWeights
from hal_core.ops import QuantizedActivation, Routed
from hal_core.reference.moe import ReferenceMoE
from hal_core.schemes import WeightScheme
from hal_core.spec import Activation, MoESpec
from hal_core.testing.data import random_weight

SCHEMES = {
    "cutlass_bf16": "bf16", "cutlass_fp8_block": "fp8_e4m3:b128x128", "cutlass_mxfp4_mxfp8": "mxfp4:g32", "trtllm_bf16": "bf16",
    "trtllm_fp8_tensor": "fp8_e4m3:tensor", "trtllm_fp8_block": "fp8_e4m3:b128x128", "trtllm_nvfp4": "nvfp4:g16",
    "trtllm_mxfp4": "mxfp4:g32", "trtllm_mxint4": "int4:g32",
}  # fmt: skip
BY_NAME = {entry.name: entry for entry in ENTRIES}
EACH = pytest.mark.parametrize("name", SCHEMES)


def fits(entry):
    """Whether the installed version has the entry at all."""
    try:
        bind(entry.call)
    except ContractError:
        return False
    return True


def fake_fp4(
    input,  # noqa: A002 - FlashInfer's name
    global_scale,
    sf_vec_size,
    sf_use_ue8m0,
    is_sf_swizzled_layout,
):
    """NVFP4 as the format defines it: e4m3 scales of 16, codes of the nearest of eight numbers."""
    assert (sf_vec_size, sf_use_ue8m0, is_sf_swizzled_layout) == (16, False, False)
    x = input.float() * global_scale
    parts = x.unflatten(-1, (-1, 16))
    scales = (parts.abs().amax(-1) / 6).clamp(1e-3, 448).to(torch.float8_e4m3fn)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = parts / scales.float().unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    codes = codes.flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales.view(torch.uint8)


def case(name, intermediate=200, seed=0, experts=4):
    """Sizes that are padded: 200 to 256, but for blocks, which end at multiples of 128 or inside one."""
    scheme, rng = WeightScheme.parse(SCHEMES[name]), torch.Generator().manual_seed(seed)
    intermediate = 192 if scheme.granularity.group == 32 else 208 if scheme.granularity.group == 16 else intermediate
    oai = "swiglu_oai" in BY_NAME[name].activations
    spec = MoESpec(
        experts, 2, 256, intermediate, scheme, scheme, scheme, bias=BY_NAME[name].bias, routed_scaling=1.5,
        activation=Activation("swiglu_oai", 1.702, 2.0) if oai else Activation(),
    )  # fmt: skip
    shapes = {"gate": (intermediate, 256), "up": (intermediate, 256), "down": (256, intermediate)}
    parts = {role: random_weight(scheme, (experts, *shape), rng, "bf16") for role, shape in shapes.items()}
    if name in {"trtllm_fp8_tensor", "trtllm_nvfp4"}:
        into, between = torch.full((experts,), 0.02), torch.rand(experts, generator=rng) * 0.05 + 0.02
        parts = {role: replace(w, input_scale=between if role == "down" else into) for role, w in parts.items()}
    biases = [torch.randn(experts, n, generator=rng) for n in (intermediate, intermediate, 256)] if spec.bias else [None] * 3
    return spec, MoEWeights(parts["up"], parts["down"], parts["gate"], *biases)


def prepared(name, spec, weights):
    entry = BY_NAME[name]
    if not fits(entry):
        pytest.skip(f"this version of flashinfer has no {entry.call.function}")
    op = FlashInferExperts(spec, weights, entry, torch.device("cpu"))
    op.bound = Bound(emulated(entry.form), op.bound.keywords)
    return op


def mxfp8(x):
    parts = x.float().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(parts.abs().amax(-1).clamp(min=1e-30))) - 8
    scales = (exponent + 127).clamp(0, 254).to(torch.uint8)
    codes = (parts / torch.exp2(scales.float() - 127).unsqueeze(-1)).clamp(-448, 448).flatten(-2).to(torch.float8_e4m3fn)
    return QuantizedActivation(codes, scales, "g32")


@EACH
def test_calls_fit_the_versions_that_the_entry_names(name):
    from importlib.metadata import version

    import flashinfer
    from packaging.specifiers import SpecifierSet

    entry, installed = BY_NAME[name], getattr(flashinfer, "__version__", None) or version("flashinfer-python")
    assert fits(entry) == SpecifierSet(entry.versions).contains(installed, prereleases=True)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers_fit(name):
    assert bind(QUANTIZERS[name]).keywords == frozenset(QUANTIZERS[name].keywords)


@EACH
@pytest.mark.parametrize("seed", [0, 1])
def test_the_arguments_compute_the_block(name, seed, monkeypatch):
    """Against the float32 reference with unquantized inputs: what is left is the quantization of inputs and the router's bf16."""
    real = moe.bind
    monkeypatch.setattr(moe, "bind", lambda call: Bound(fake_fp4, frozenset()) if call is QUANTIZERS["nvfp4"] else real(call))
    spec, weights = case(name, seed=seed)
    op, rng = prepared(name, spec, weights), torch.Generator().manual_seed(seed + 9)
    x = torch.randn(7, 256, generator=rng).bfloat16()
    ids = torch.rand(7, 4, generator=rng).topk(2, dim=1).indices.int()
    ids[2, 1], ids[4, 0], ids[5, 1] = -1, 4, ids[5, 0]
    routed = Routed(ids, torch.rand(7, 2, generator=rng))
    out = torch.full((7, 256), float("nan"), dtype=torch.bfloat16)
    given = mxfp8(x) if name == "cutlass_mxfp4_mxfp8" else x
    op.apply(given, routed, out=out)
    ids[4, 0] = -1  # the reference refuses what is out of range
    wanted = ReferenceMoE().prepare(spec, weights).apply(x.float(), routed)
    error = float((out.float() - wanted).norm() / wanted.norm())
    quantized = BY_NAME[name].quant
    assert error < (6e-3 if quantized is None or name == "cutlass_fp8_block" else 0.2 if "nvfp4" in name else 0.06), error


@pytest.mark.parametrize("name", ["cutlass_bf16", "cutlass_mxfp4_mxfp8", "trtllm_bf16"])
def test_slots_apart(name):
    spec, weights = case(name)
    op, rng = prepared(name, spec, weights), torch.Generator().manual_seed(3)
    x = torch.randn(5, 256, generator=rng).bfloat16()
    routed = Routed(torch.tensor([[0, 3], [2, 2], [-1, 1], [3, -1], [1, 0]], dtype=torch.int32), torch.rand(5, 2, generator=rng))
    found = op.apply(mxfp8(x) if name == "cutlass_mxfp4_mxfp8" else x, routed, reduce=False)
    wanted = ReferenceMoE().prepare(spec, weights).apply(x.float(), routed, reduce=False)
    assert found.shape == (5, 2, 256)
    assert float((found.float() - wanted).norm() / wanted.norm()) < (0.1 if BY_NAME[name].quant else 6e-3)


@EACH
def test_update_clears_the_padding_and_equals_a_fresh_op(name):
    spec, weights = case(name)
    op = prepared(name, spec, weights)
    addresses = {n: b.data_ptr() for n, b in op.named_buffers()}
    for buffer in op.buffers():
        buffer.view(torch.uint8).fill_(0x7B)
    _, other = case(name, seed=5)
    op.update(other)
    fresh = prepared(name, spec, other)
    assert {n: b.data_ptr() for n, b in op.named_buffers()} == addresses
    for (n, left), (_, right) in zip(op.named_buffers(), fresh.named_buffers(), strict=True):
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), n


@EACH
def test_output_is_bf16_and_nothing_else(name):
    spec, weights = case(name)
    op = prepared(name, spec, weights)
    x, routed = torch.zeros(2, 256).bfloat16(), Routed(torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2))
    given = mxfp8(x) if name == "cutlass_mxfp4_mxfp8" else x
    with pytest.raises(ShapeError, match="bfloat16"):
        op.apply(given, routed, out=torch.zeros(2, 256))


@EACH
def test_a_cast_of_the_model_leaves_packed_weights(name):
    spec, weights = case(name)
    op = prepared(name, spec, weights)
    before = {n: b.clone() for n, b in op.named_buffers()}
    torch.nn.Sequential(op).to(torch.float64)
    for n, buffer in op.named_buffers():
        assert buffer.dtype == before[n].dtype, n
        assert torch.equal(buffer.view(torch.uint8), before[n].view(torch.uint8)), n


def test_flag_and_payload_agree():
    x = torch.randn(3, 64).bfloat16()
    given = mxfp8(x)
    found = mxfp8_arguments(True, given)
    assert found["input"] is given.values
    assert found["input_sf"] is given.scales
    assert (found["use_mxfp8_act_scaling"], found["swizzled_input_sf"]) == (True, False)
    plain = mxfp8_arguments(False, x)
    assert (plain["input"] is x, plain["input_sf"], plain["use_mxfp8_act_scaling"]) == (True, None, False)


def test_the_flag_without_a_payload_is_refused():
    with pytest.raises(ShapeError, match="prepared for MXFP8 activations: x is torch.bfloat16, without scales; quantize x"):
        mxfp8_arguments(True, torch.randn(3, 64).bfloat16())
    spec, weights = case("cutlass_mxfp4_mxfp8")
    op = prepared("cutlass_mxfp4_mxfp8", spec, weights)
    with pytest.raises(ShapeError, match="without scales"):
        op.apply(torch.zeros(2, 256).bfloat16(), Routed(torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2)))


def test_a_payload_without_the_flag_is_refused():
    with pytest.raises(ShapeError, match="prepared for unquantized activations: x is torch.float8_e4m3fn with scales per g32"):
        mxfp8_arguments(False, mxfp8(torch.randn(3, 64)))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: QuantizedActivation(p.values, p.scales, "g16"),
        lambda p: QuantizedActivation(p.values.float(), p.scales, "g32"),
        lambda p: QuantizedActivation(p.values, p.scales.float(), "g32"),
        lambda p: QuantizedActivation(p.values, p.scales[:, :1], "g32"),
    ],
)
def test_a_payload_of_another_form_is_refused(change):
    with pytest.raises(ShapeError, match="MXFP8 activations"):
        mxfp8_arguments(True, change(mxfp8(torch.randn(3, 64))))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: replace(p, values=p.values[:, :128].contiguous(), scales=p.scales[:, :4].contiguous()), r"values \[T, 256\]"),
        (lambda p: replace(p, values=p.values.T.contiguous().T), "not contiguous; give contiguous values"),
        (lambda p: replace(p, scales=p.scales.T.contiguous().T), r"not contiguous; give contiguous scales \[T, 8\]"),
        (lambda p: replace(p, scales=p.scales.to("meta")), "on meta; give contiguous scales"),
    ],
    ids=["width", "values", "scales", "device"],
)
def test_a_payload_that_flashinfer_would_read_wrongly_is_refused(change, told):
    spec, weights = case("cutlass_mxfp4_mxfp8")
    op = prepared("cutlass_mxfp4_mxfp8", spec, weights)
    routed = Routed(torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2))
    with pytest.raises(ShapeError, match=told):
        op.apply(change(mxfp8(torch.randn(3, 256))), routed)


def test_routing_is_packed_and_skipped_slots_weigh_nothing():
    ids = torch.tensor([[3, -1], [40000, 0]], dtype=torch.int32)
    packed = packed_routing(ids, torch.tensor([[0.5, 9.0], [-1.25, 3.0]]))
    weights = (packed & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()
    assert (packed >> 16 & 0xFFFF).tolist() == [[3, 0], [40000, 0]]
    assert weights.tolist() == [[0.5, 0.0], [-1.25, 3.0]]


def test_input_scales_that_differ_between_experts_are_refused():
    spec, weights = case("trtllm_nvfp4")
    scales = weights.up.input_scale.clone()
    scales[1] = 0.5
    with pytest.raises(UnfitWeightsError, match="input scales from 0.02 to 0.5"):
        prepared("trtllm_nvfp4", spec, replace(weights, up=replace(weights.up, input_scale=scales)))
    with pytest.raises(UnfitWeightsError, match="no static input scale"):
        prepared("trtllm_nvfp4", spec, replace(weights, down=replace(weights.down, input_scale=None)))


def test_numbers_of_enumerations_are_flashinfers():
    from flashinfer import tllm_enums

    assert tllm_enums.ActivationType.Swiglu == moe._SWIGLU
    assert (tllm_enums.WeightLayout.MajorK, tllm_enums.WeightLayout.BlockMajorK) == (moe._MAJOR_K, moe._BLOCK_MAJOR_K)
    assert tllm_enums.RoutingMethodType.TopK == moe._TOP_K


@pytest.mark.parametrize("name", ["cutlass_bf16", "cutlass_mxfp4_mxfp8"])
def test_the_block_is_one_op_of_a_compiled_graph(name):
    spec, weights = case(name)
    op = prepared(name, spec, weights)
    ids, scores = torch.tensor([[0, 3]] * 5, dtype=torch.int32), torch.rand(5, 2)
    given = mxfp8(torch.randn(5, 256).bfloat16()) if name == "cutlass_mxfp4_mxfp8" else torch.randn(5, 256).bfloat16()
    graph = torch.compile(lambda x, ids, scores: op.apply(x, Routed(ids, scores)), fullgraph=True, backend="aot_eager")
    assert torch.equal(graph(given, ids, scores), op.apply(given, Routed(ids, scores)))
