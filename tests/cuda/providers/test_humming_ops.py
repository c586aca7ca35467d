"""The ops around Humming on the host: its launches are computed in float32 from the tensors that they would get."""

from __future__ import annotations

import copy
import itertools
import types
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from hal_backend_cuda.providers.humming import ops, runtime
from hal_backend_cuda.providers.humming.layout import HummingLayout
from hal_backend_cuda.providers.humming.ops import HummingExperts, HummingGroups, HummingLinear
from hal_backend_cuda.providers.humming.recipes import RECIPES
from hal_backend_cuda.providers.steps import TorchSteps
from recorded_on_host import pretend_gpu

from hal_core.errors import ShapeError, UnfitWeightsError
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.ops import Grouped, Routed
from hal_core.reference.linear import ReferenceLinear
from hal_core.reference.moe import ReferenceMoE
from hal_core.schemes import WeightScheme
from hal_core.spec import Activation, LinearSpec, MoESpec
from hal_core.testing.data import random_weight
from hal_core.triton import launch, relaunch

BY_NAME = {recipe.name: recipe for recipe in RECIPES}
CASES = [
    ("w4a16", "int4:g128"),
    ("w4a16", "int4:g32:zero"),
    ("w8a16", "int8:channel"),
    ("mxfp4", "mxfp4:g32"),
    ("fp8_a16", "fp8_e4m3:b128x128"),
    ("nvfp4", "nvfp4:g16"),
]


class Emulator:
    """Humming's modules as runtime.library gives them; a tile's number says whose product it is."""

    def __init__(self):
        self.problems, self.launches = [], []
        self.kernel = self
        self.transform = lambda configuration, tensors: dict(tensors)
        self.launcher = lambda: self.launch

    def prepare_kernels(self, text, words, rows, device):
        return torch.tensor([[low, high, int(text), 0] for low, high, _ in rows], dtype=torch.int64).reshape(-1)

    def dense(self, p, tensors):
        """float32 ``[E, N, K]``."""
        lead = tensors["weight"].shape[:-2]
        form, out = HummingLayout(p.dtype, torch.uint8 if p.scheme.dtype == "mxfp4" else torch.float32), []
        for e in range(lead[0] if lead else 1):
            part = {n: (t[e] if lead else t) for n, t in tensors.items()}
            whole = part.get("weight_scale_2")
            if whole is not None:  # of the matrix, or of each row
                assert whole.numel() == (p.n if p.stacked else 1)
                part["weight_scale_2"] = torch.ones(1)
            found = form.unpack(part, p.scheme, (p.n, p.k)).dequantize()
            out.append(found if whole is None else found * whole.float().reshape(-1, 1))
        return torch.stack(out)

    def launch(self, tiles, x, weight, scale, whole, x_scale, none, zero, bias, out, ids, experts, padded, layout, locks, top_k, rows):
        number = int(tiles[0] if tiles.numel() == 2 else tiles[2])
        p = self.problems[number]
        self.launches.append((number, x.shape[0]))
        named = (("weight", weight), ("weight_scale", scale), ("weight_scale_2", whole), ("zero_point", zero))
        tensors = {n: t for n, t in named if t is not None}
        matrix, x = self.dense(p, tensors), x.float() if x_scale is None else x.float() * x_scale
        if layout is not None:
            assert layout.shape == (p.experts + 1,)
            for e, (first, last) in enumerate(itertools.pairwise(layout.tolist())):
                out[first:last] = x[first:last] @ matrix[e].T + (0 if bias is None else bias[e].float())
            return
        if ids is None:
            out.copy_(x @ matrix[0].T + (0 if bias is None else bias.float()))
            return
        block = 8
        for place, row in enumerate(ids[: int(padded)].tolist()):
            if row < x.shape[0] * top_k:
                e = int(experts[place // block])
                out[row] = x[row // top_k] @ matrix[e].T + (0 if bias is None else bias[e].float())


def quantize_int8(x):
    scales = (x.float().abs().amax(-1) / 127).clamp(min=1e-10)
    return (x.float() / scales[:, None]).round().to(torch.int8), scales


@pytest.fixture(autouse=True)
def emulator(monkeypatch):
    found = Emulator()
    monkeypatch.setattr(launch, "quantize_int8", quantize_int8)

    def configuration(self, device):
        found.problems.append(self)
        number = len(found.problems) - 1
        return types.SimpleNamespace(to_str=lambda: str(number))

    monkeypatch.setattr(runtime, "library", lambda: found)
    monkeypatch.setattr(runtime.Problem, "configuration", configuration)
    monkeypatch.setattr(runtime.Problem, "table", lambda self, c, d: [(0, 1 << 30, {"block_shape": (8, 128, 64)})])
    monkeypatch.setattr(ops, "on_cuda", dict)
    return found


def error(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def linear_case(text, seed=0, dtype="bf16", bias=True):
    scheme, rng = WeightScheme.parse(text), torch.Generator().manual_seed(seed)
    spec = LinearSpec(256, 384, scheme, dtype=dtype, bias=bias)
    return spec, LinearWeights(random_weight(scheme, (256, 384), rng, dtype), torch.randn(256, generator=rng) if bias else None)


def experts_case(text, seed=0, **changes):
    scheme, rng = WeightScheme.parse(text), torch.Generator().manual_seed(seed)
    spec = MoESpec(
        **{"num_experts": 6, "top_k": 2, "hidden": 256, "intermediate": 128, "up": scheme, "down": scheme, "gate": scheme, **changes}
    )
    e, sizes = spec.local, {"up": (128, 256), "down": (256, 128), "gate": (128, 256)}
    parts = {role: random_weight(scheme, (e, *size), rng, "bf16") for role, size in sizes.items() if role != "gate" or spec.gate}
    if spec.bias:
        parts |= {f"{role}_bias": torch.randn(e, size[0], generator=rng) for role, size in sizes.items() if role in parts}
    return spec, MoEWeights(**parts)


def routing(tokens, seed=0):
    rng = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, 6, generator=rng).topk(2, dim=1).indices.int()
    ids[torch.rand(ids.shape, generator=rng) < 0.2] = -1
    return Routed(ids, torch.rand(tokens, 2, generator=rng))


@pytest.mark.parametrize(("name", "text"), CASES)
def test_linears(name, text):
    spec, weights = linear_case(text)
    op = HummingLinear(spec, weights, BY_NAME[name])
    for shape in ((1, 384), (2, 3, 384), (0, 384)):
        x = torch.randn(shape).bfloat16()
        y = op.apply(x)
        assert tuple(y.shape) == (*shape[:-1], 256)
        if y.numel():
            assert error(y, ReferenceLinear().prepare(spec, weights).apply(x.float())) < 5e-3
    strided = torch.randn(4, 768).bfloat16()[:, ::2]
    assert torch.equal(op.apply(strided), op.apply(strided.contiguous()))


@pytest.mark.parametrize(("name", "text"), CASES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": True, "routed_scaling": 2.5},
        {"gate": None, "activation": Activation("relu2")},
        {"expert_map": True, "local_experts": 4},
    ],
    ids=["plain", "bias", "ungated", "mapped"],
)
def test_experts(name, text, changes):
    spec, weights = experts_case(text, **changes)
    op = HummingExperts(spec, weights, BY_NAME[name])
    assert isinstance(op.steps, TorchSteps)
    places = torch.tensor([3, -1, 0, 2, -1, 1], dtype=torch.int32) if spec.expert_map else None
    for tokens in (1, 9, 0):
        x, routed = torch.randn(tokens, 256).bfloat16(), routing(tokens)
        for reduce in (True, False):
            found = op.apply(x, routed, expert_map=places, reduce=reduce)
            wanted = ReferenceMoE().prepare(spec, weights).apply(x.float(), routed, expert_map=places, reduce=reduce)
            assert found.shape == wanted.shape
            assert not tokens or not float(wanted.norm()) or error(found, wanted) < BY_NAME[name].error_bound("moe")


@pytest.mark.parametrize(("name", "text"), CASES)
@pytest.mark.parametrize("changes", [{"bias": True}, {"gate": None, "activation": Activation("relu2")}], ids=["bias", "ungated"])
def test_rows_in_groups(name, text, changes):
    spec, weights = experts_case(text, routing="grouped", **changes)
    op = HummingGroups(spec, weights, BY_NAME[name])
    counts = torch.tensor([3, 0, 5, 1, 0, 2])
    ids = torch.repeat_interleave(torch.arange(6), counts).int()[:, None]
    plain = ReferenceMoE().prepare(replace(spec, routing="routed", top_k=1), weights)
    for rows in (11, 14):  # three rows of padding
        x, out = torch.randn(rows, 256).bfloat16(), torch.full((rows, 256), float("nan"), dtype=torch.bfloat16)
        assert op.apply(x, Grouped(counts.int()), out=out) is out
        wanted = plain.apply(x[:11].float(), Routed(ids, torch.ones(11, 1)))
        assert error(out[:11], wanted) < BY_NAME[name].error_bound("moe")
        assert not out[11:].any()
    assert op.apply(torch.empty(0, 256).bfloat16(), Grouped(torch.zeros(6, dtype=torch.int64))).shape == (0, 256)


@pytest.mark.parametrize(
    ("routing", "told", "more"),
    [
        (Routed(torch.zeros(4, 2).int(), torch.ones(4, 2)), "with Routed", {}),
        (Grouped(torch.ones(6)), "num_tokens_per_expert torch.float32", {}),
        (Grouped([1] * 6), "num_tokens_per_expert is a list", {}),
        (Grouped(torch.ones(5).int()), r"\[5\]", {}),
        (Grouped(torch.ones(6).int()), "expert_map", {"expert_map": torch.arange(6).int()}),
    ],
)
def test_groups_given_wrongly_are_refused(routing, told, more):
    spec, weights = experts_case("int4:g128", routing="grouped")
    with pytest.raises(ShapeError, match=told):
        HummingGroups(spec, weights, BY_NAME["w4a16"]).apply(torch.randn(4, 256).bfloat16(), routing, **more)


@pytest.fixture
def recorded(monkeypatch):
    """Calls are recorded as on a GPU."""
    pretend_gpu(monkeypatch, lambda index: 0)
    monkeypatch.setattr(relaunch, "driver_library", lambda: None)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("how", ["assigned", "for_one_call", "in_a_part", "moved"])
def test_buffers_that_are_replaced_are_those_of_the_next_call(how):
    op, other = (HummingLinear(*linear_case("int4:g128", seed), BY_NAME["w4a16"]) for seed in (0, 1))
    x, state = torch.randn(3, 384).bfloat16(), other.state_dict()
    before, wanted = op.apply(x), other.apply(x)
    assert op.repeats.known
    assert not torch.equal(op.apply(x), wanted)
    if how == "for_one_call":
        assert torch.equal(torch.func.functional_call(op, state, (x,)), wanted)
        assert torch.equal(op.apply(x), before)
        return
    if how == "assigned":
        op.load_state_dict(state, assign=True)
    elif how == "in_a_part":
        for name, buffer in other.matrix.named_buffers():
            setattr(op.matrix, name, buffer)
    else:
        held = iter(other.matrix.buffers())
        op.matrix._apply(lambda _: next(held))
    assert torch.equal(op.apply(x), wanted)


@pytest.mark.usefixtures("recorded")
def test_steps_of_plain_torch_are_taken_anew_by_every_call():
    spec, weights = experts_case("int4:g128")
    op = HummingExperts(spec, weights, BY_NAME["w4a16"], TorchSteps())
    for _ in range(2):
        x, routed = torch.randn(9, 256).bfloat16(), routing(9)
        wanted = ReferenceMoE().prepare(spec, weights).apply(x.float(), routed)
        assert error(op.apply(x, routed), wanted) < BY_NAME["w4a16"].error_bound("moe")


def test_a_graph_finds_copies_by_numbers_of_their_own():
    op = HummingExperts(*experts_case("int4:g128"), BY_NAME["w4a16"], TorchSteps())
    other = copy.deepcopy(op)
    assert other.number != op.number
    assert [HummingExperts.numbers[each.number] for each in (op, other)] == [op, other]


def test_a_compiled_graph_has_experts_in_one_piece():
    x, routed, counts = torch.randn(5, 256).bfloat16(), routing(5), torch.tensor([2, 0, 1, 0, 1, 1], dtype=torch.int32)
    spec, weights = experts_case("int4:g128")
    block = HummingExperts(spec, weights, BY_NAME["w4a16"])
    groups = HummingGroups(replace(spec, routing="grouped"), weights, BY_NAME["w4a16"])

    def both(x, ids, scores, counts):
        return block.apply(x, Routed(ids, scores)), groups.apply(x, Grouped(counts))

    given = (x, routed.topk_ids, routed.topk_weights, counts)
    found = torch.compile(both, fullgraph=True, backend="eager")(*given)
    assert all(torch.equal(one, two) for one, two in zip(found, both(*given), strict=True))


def test_quantized_activations_reach_both_products(emulator):
    spec, weights = experts_case("int4:g128")
    op = HummingExperts(spec, weights, BY_NAME["w4a8_int8"])
    emulator.launches.clear()
    x, routed = torch.randn(5, 256).bfloat16(), routing(5)
    assert error(op.apply(x, routed), ReferenceMoE().prepare(spec, weights).apply(x.float(), routed)) < 0.06
    assert emulator.launches == [(0, 5), (1, 10)]


def test_update_is_a_fresh_op_at_the_same_addresses():
    spec, weights = experts_case("int4:g32:zero", bias=True)
    _, other = experts_case("int4:g32:zero", seed=7, bias=True)
    op, fresh = (HummingExperts(spec, w, BY_NAME["w4a16"]) for w in (weights, other))
    before = [b.data_ptr() for b in op.buffers()]
    op.update(other)
    assert [b.data_ptr() for b in op.buffers()] == before
    assert all(torch.equal(a, b) for a, b in zip(op.buffers(), fresh.buffers(), strict=True))


def test_an_update_that_does_not_fit_changes_nothing():
    spec, weights = experts_case("int4:g128", dtype="fp16")
    even = {role: replace(w, scales=torch.full_like(w.scales, 0.01)) for role, w in vars(weights).items() if w is not None}
    weights = other = MoEWeights(**even)
    op = HummingExperts(spec, weights, BY_NAME["w4a16"])
    before = [b.clone() for b in op.buffers()]
    huge = other.down.scales.clone()
    huge[1, 2, 0] = 1e30
    with pytest.raises(UnfitWeightsError, match="outside the range of fp16"):
        op.update(replace(other, down=replace(other.down, scales=huge)))
    with pytest.raises(ShapeError, match="gate_bias|bias"):
        op.update(replace(other, up_bias=torch.zeros(6, 128)))
    assert all(torch.equal(a, b) for a, b in zip(op.buffers(), before, strict=True))


def test_a_move_of_the_model_to_another_device_is_refused_and_moves_nothing():
    spec, weights = linear_case("int4:g128")
    op = HummingLinear(spec, weights, BY_NAME["w4a16"])
    with pytest.raises(ShapeError, match="prepared on cpu: moved to meta"):
        torch.nn.Sequential(op).to("meta")
    assert {buffer.device.type for buffer in op.buffers()} == {"cpu"}


def test_a_cast_of_the_model_leaves_packed_weights():
    spec, weights = linear_case("int4:g128")
    op = HummingLinear(spec, weights, BY_NAME["w4a16"])
    before = {n: b.clone() for n, b in op.named_buffers()}
    torch.nn.Sequential(op).to(torch.float64)
    for n, buffer in op.named_buffers():
        assert buffer.dtype == before[n].dtype
        assert torch.equal(buffer, before[n])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x, r: (x.float(), r), "torch.float32"),
        (lambda x, r: (x[:, :64], r), r"\[4, 64\]"),
        (lambda x, r: (x[:3], r), r"topk_ids \[4, 2\]"),
        (lambda x, r: (x, Routed(r.topk_ids.float(), r.topk_weights)), "topk_ids torch.float32"),
        (lambda x, r: (x, Routed(r.topk_ids[:, :1], r.topk_weights)), r"topk_ids \[4, 1\]"),
        (lambda x, r: (x.requires_grad_(), r), "no backward"),
        (lambda x, r: ("x", r), "str with Routed"),
        (lambda x, r: (x, Routed(r.topk_ids.tolist(), r.topk_weights)), "topk_ids is a list"),
    ],
)
def test_what_is_given_wrongly_is_refused(change, told):
    spec, weights = experts_case("int4:g128")
    op = HummingExperts(spec, weights, BY_NAME["w4a16"])
    with pytest.raises(ShapeError, match=told):
        op.apply(*change(torch.randn(4, 256).bfloat16(), routing(4)))


def test_outputs_that_do_not_fit_and_maps_that_are_missing():
    spec, weights = experts_case("int4:g128", expert_map=True, local_experts=4)
    op, x = HummingExperts(spec, weights, BY_NAME["w4a16"]), torch.randn(4, 256).bfloat16()
    with pytest.raises(ShapeError, match="expert_map: missing"):
        op.apply(x, routing(4))
    places = torch.arange(6, dtype=torch.int32) % 4
    for out in (torch.empty(4, 256), torch.empty(4, 128).bfloat16(), torch.empty(256, 4).bfloat16().T):
        with pytest.raises(ShapeError, match="output: out is"):
            op.apply(x, routing(4), expert_map=places, out=out)
