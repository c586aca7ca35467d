"""Providers on a GPU: graphs, updates, what is given wrongly, and sizes at both ends. Small shapes; timings are in benchmarks/."""

from __future__ import annotations

import concurrent.futures
import functools
import math
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("humming", reason="needs humming-kernels")

import two_tiles
from hal_backend_cuda.kernels import MoETriton
from hal_backend_cuda.providers.flashinfer.attention import FlashInferKV
from hal_backend_cuda.providers.fused_steps import TritonSteps
from hal_backend_cuda.providers.humming import runtime
from hal_backend_cuda.providers.humming.kernels import LinearHumming, MoEHumming
from hal_backend_cuda.providers.humming.recipes import RECIPES
from hal_backend_cuda.providers.kernels import KERNELS
from hal_backend_cuda.providers.steps import Route, TorchSteps

from hal_core.check import check
from hal_core.errors import HalError, ShapeError
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.kv.op import KVParams
from hal_core.kv.scheme import KVScheme
from hal_core.ops import Grouped, Routed
from hal_core.reference.moe import ReferenceMoE
from hal_core.schemes import WeightScheme
from hal_core.spec import KVCacheSpec, LinearSpec, MoESpec
from hal_core.testing.data import random_weight, to_device
from hal_core.triton.relaunch import DriverLaunch
from hal_core.triton.repeat import Repeats

DEVICE = torch.device("cuda", 0)
INT4 = WeightScheme.parse("int4:g128")
RECIPE = next(recipe for recipe in RECIPES if recipe.name == "w4a16")


@pytest.fixture(autouse=True)
def only_two_tiles(monkeypatch):
    monkeypatch.setattr(runtime.Problem, "table", two_tiles.table)
    yield
    check()


def expert_weights(seed, e=8, h=256, i=128):
    rng = torch.Generator().manual_seed(seed)
    gate, up, down = (to_device(random_weight(INT4, (e, *shape), rng, "bf16"), DEVICE) for shape in ((i, h), (i, h), (h, i)))
    return MoEWeights(up, down, gate)


SPEC = MoESpec(8, 2, 256, 128, INT4, INT4, INT4)


def routing(tokens, seed=0, k=2, experts=8):
    rng = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=rng).topk(k, dim=1).indices.int()
    return Routed(ids.to(DEVICE), torch.rand(tokens, k, generator=rng).to(DEVICE))


def error(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_a_captured_graph_follows_inputs_and_updates():
    weights = expert_weights(0)
    op = MoEHumming(RECIPE).prepare(SPEC, weights)
    x, routed, out = torch.randn(33, 256, device=DEVICE).bfloat16(), routing(33), torch.empty(33, 256, dtype=torch.bfloat16, device=DEVICE)
    addresses = [b.data_ptr() for b in op.buffers()]
    graph = torch.cuda.CUDAGraph()
    op.apply(x, routed, out=out)
    with torch.cuda.graph(graph):
        op.apply(x, routed, out=out)
    for seed in (1, 2):
        other, way = torch.randn(33, 256, device=DEVICE).bfloat16(), routing(33, seed)
        x.copy_(other)
        routed.topk_ids.copy_(way.topk_ids)
        routed.topk_weights.copy_(way.topk_weights)
        weights = expert_weights(seed)
        op.update(weights)
        out.fill_(math.nan)
        graph.replay()
        assert error(out, ReferenceMoE().prepare(SPEC, weights).apply(x.float(), routed)) < 1e-2
    assert [b.data_ptr() for b in op.buffers()] == addresses


@pytest.mark.parametrize("name", ["w4a16", "w4a8_int8"])
@pytest.mark.parametrize("rows", [1, 33])
def test_repeated_calls_launch_hummings_kernels_alone(name, rows, monkeypatch):
    recipe = next(recipe for recipe in RECIPES if recipe.name == name)
    experts, linear = MoEHumming(recipe), LinearHumming(recipe)
    weight = LinearWeights(to_device(random_weight(INT4, (384, 256), torch.Generator().manual_seed(0), "bf16"), DEVICE))
    block = experts.prepare(replace(SPEC, numerics=experts.numerics), expert_weights(7))
    dense = linear.prepare(LinearSpec(384, 256, INT4, numerics=linear.numerics), weight)
    held = [(torch.randn(rows, 256, device=DEVICE).bfloat16(), routing(rows, seed)) for seed in range(4)]
    for op, calls in (
        (dense, [functools.partial(dense.apply, x) for x, _ in held]),
        (block, [functools.partial(block.apply, x, routed) for x, routed in held]),
    ):
        found = [call() for call in calls]
        (recorded,) = op.repeats.known.values()
        (plan,) = recorded.plans.values()
        assert all(isinstance(step, DriverLaunch) for step in plan.steps)
        with monkeypatch.context() as patch:
            patch.setattr(Repeats, "__call__", lambda self, key, tensors, call: call())
            assert all(torch.equal(one, call()) for one, call in zip(found, calls, strict=True))


@pytest.mark.parametrize("name", ["w4a16", "w4a8_int8"])
def test_rows_in_groups_follow_their_sizes_through_a_graph(name):
    kernel, weights = MoEHumming(next(recipe for recipe in RECIPES if recipe.name == name)), expert_weights(8)
    op = kernel.prepare(replace(SPEC, routing="grouped", numerics=kernel.numerics), weights)
    plain = ReferenceMoE().prepare(replace(SPEC, top_k=1), weights)
    x, out = torch.randn(40, 256, device=DEVICE).bfloat16(), torch.empty(40, 256, dtype=torch.bfloat16, device=DEVICE)
    counts, graph = torch.zeros(8, dtype=torch.int32, device=DEVICE), torch.cuda.CUDAGraph()
    op.apply(x, Grouped(counts), out=out)
    with torch.cuda.graph(graph):
        op.apply(x, Grouped(counts), out=out)
    for sizes in ([5] * 8, [0, 0, 33, 0, 0, 1, 0, 0], [0] * 7 + [40], [0] * 8):
        counts.copy_(torch.tensor(sizes))
        total, ids = sum(sizes), torch.repeat_interleave(torch.arange(8), torch.tensor(sizes)).int()[:, None].to(DEVICE)
        wanted = plain.apply(x[:total].float(), Routed(ids, torch.ones(total, 1, device=DEVICE)))
        for again in (graph.replay, lambda: op.apply(x, Grouped(counts), out=out)):
            out.fill_(math.nan)
            again()
            assert not total or error(out[:total], wanted) < kernel.error_bound / 2
            assert not out[total:].any()
    check()
    counts[0] = 41
    graph.replay()
    with pytest.raises(ShapeError, match="41 rows of expert 0"):
        check()


def test_ids_out_of_range_are_left_out_and_told():
    weights = expert_weights(3)
    op = MoEHumming(RECIPE).prepare(SPEC, weights)
    for tokens in (2, 40, 5000):
        x, routed = torch.randn(tokens, 256, device=DEVICE).bfloat16(), routing(tokens)
        routed.topk_ids[1, 0] = 8
        found = op.apply(x, routed)
        with pytest.raises(ShapeError, match="8 at token 1, slot 0"):
            check()
        routed.topk_ids[1, 0] = -1
        assert error(found, ReferenceMoE().prepare(SPEC, weights).apply(x.float(), routed)) < 1e-2
        check()


@pytest.mark.parametrize("tokens", [0, 1, 70_000])
def test_sizes_at_both_ends(tokens):
    weights = expert_weights(4)
    op = MoEHumming(RECIPE).prepare(SPEC, weights)
    x, routed = torch.randn(tokens, 256, device=DEVICE).bfloat16(), routing(tokens)
    out = op.apply(x, routed)
    assert tuple(out.shape) == (tokens, 256)
    if tokens:
        assert error(out, ReferenceMoE().prepare(SPEC, weights).apply(x.float(), routed)) < 1e-2


def test_rows_beyond_two_to_the_31_elements():
    """Outputs of 2.2e9 elements: offsets do not fit 32 bits."""
    rng = torch.Generator().manual_seed(0)
    weight = to_device(random_weight(INT4, (32768, 128), rng, "bf16"), DEVICE)
    spec = LinearSpec(32768, 128, INT4)
    op = LinearHumming(RECIPE).prepare(spec, LinearWeights(weight))
    x = torch.randn(70_000, 128, device=DEVICE).bfloat16()
    out = op.apply(x)
    dense = weight.dequantize().T
    for row in (0, 65_535, 65_536, 69_999):
        assert error(out[row], x[row].float() @ dense) < 6e-3


@pytest.mark.parametrize("kernel", [MoEHumming(RECIPE), MoETriton()], ids=lambda kernel: kernel.name)
def test_what_is_given_wrongly_is_refused(kernel):
    op = kernel.prepare(SPEC, expert_weights(5))
    x, routed = torch.randn(4, 256, device=DEVICE).bfloat16(), routing(4)
    for wrong, told in (
        ((x.float(), routed), "torch.float32"),
        ((x[:, :128], routed), r"\[4, 128\]"),
        ((x.cpu(), routed), "cpu"),
        ((x[:3], routed), r"topk_ids \[4, 2\]"),
        ((x, Routed(routed.topk_ids.cpu(), routed.topk_weights)), "on cpu"),
        ((x, Routed(routed.topk_ids.float(), routed.topk_weights)), "torch.float32"),
    ):
        with pytest.raises(ShapeError, match=told):
            op.apply(*wrong)
    with pytest.raises(ShapeError, match="out is"):
        op.apply(x, routed, out=torch.empty(4, 128, device=DEVICE))
    strided = torch.randn(4, 512, device=DEVICE).bfloat16()[:, ::2]
    assert torch.equal(op.apply(strided, routed), op.apply(strided.contiguous(), routed))


@pytest.mark.parametrize("tokens", [1, 4, 64, 500, 5000])
@pytest.mark.parametrize("mapped", [False, True])
def test_fused_steps_equal_plain_ones(tokens, mapped):
    routed = routing(tokens, k=8, experts=128)
    places = torch.full((128,), -1, dtype=torch.int32, device=DEVICE)
    places[::3] = torch.arange(43, dtype=torch.int32, device=DEVICE)
    routed.topk_ids[0, 3] = -1
    route = Route(routed.topk_ids, routed.topk_weights, 128, 43 if mapped else 128, places if mapped else None)
    fused, plain, count = TritonSteps(DEVICE), TorchSteps(), tokens * 8
    for block in (8, 24, 96):
        space = -(-(count + min(route.experts, count) * (block - 1)) // block) * block
        for _ in range(2):
            one, two = fused.sort(route, block, space), plain.sort(route, block, space)
            used = int(one.padded)
            local = route.local().reshape(-1)
            rows, experts = one.ids[:used].long(), one.experts[: used // block].repeat_interleave(block)
            inside = rows < count
            assert torch.equal(rows[inside].sort().values, torch.where(local >= 0)[0])
            assert torch.equal(local[rows[inside]], experts[inside].long())
            if count > 8:
                assert used == int(two.padded)
    y = torch.randn(count, 512, device=DEVICE).bfloat16()
    y[route.local().reshape(-1) < 0] = math.nan
    left, right = (torch.empty(tokens, 512, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    fused.reduce(y, route, 2.0, left)
    plain.reduce(y, route, 2.0, right)
    assert error(left, right) < 4e-3


@pytest.mark.parametrize("name", ["w4a8_int8", "w4a8_fp8", "fp8_block"])
@pytest.mark.parametrize(("rows", "width"), [(8, 768), (500, 768), (3, 5120)])
def test_activations_are_quantized_as_if_they_had_been_written(name, rows, width):
    recipe, fused = next(recipe for recipe in RECIPES if recipe.name == name), TritonSteps(DEVICE)
    y = (torch.randn(rows, 2 * width, device=DEVICE) * 3).bfloat16()
    y[0, 5] = math.nan
    found = fused.quantized(y, SPEC.activation, True, functools.partial(runtime.quantize_rows, recipe))
    wanted = runtime.quantize_rows(recipe, fused.activate(y, SPEC.activation, True))
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.parametrize(("name", "scheme"), [("bf16", "bf16"), ("fp8_block", "fp8_e4m3:b128x128")])
def test_cutlass_experts(name, scheme):
    """Numbers, skipped, stray and repeated ids, a graph that follows inputs and updates. Sizes that are padded: 200 to 256."""
    jit = pytest.importorskip("flashinfer.jit.fused_moe", reason="needs flashinfer-python")
    if torch.cuda.get_device_capability() != (9, 0) or not jit.gen_cutlass_fused_moe_sm90_module().is_compiled:
        pytest.skip("needs sm_90 and FlashInfer's library fused_moe_90, which compiles for hours: build it beforehand")
    kernel, scheme = next(k for k in KERNELS if k.name == f"moe_flashinfer_cutlass_{name}"), WeightScheme.parse(scheme)
    spec = MoESpec(8, 2, 256, 200, scheme, scheme, scheme, routed_scaling=1.5, numerics=kernel.numerics)

    def weights(seed):
        rng = torch.Generator().manual_seed(seed)
        return MoEWeights(*(to_device(random_weight(scheme, (8, *s), rng, "bf16"), DEVICE) for s in ((200, 256), (256, 200), (200, 256))))

    def wanted(x, way, seed):
        return ReferenceMoE().prepare(spec, weights(seed)).apply(x.float(), way)

    op, bound = kernel.prepare(spec, weights(0)), kernel.error_bound
    for tokens in (1, 33, 700):
        x, way = torch.randn(tokens, 256, device=DEVICE).bfloat16(), routing(tokens)
        way.topk_ids[2:9, 1] = way.topk_ids[2:9, 0]
        way.topk_ids[0, 0] = -1
        out = op.apply(x, way, out=torch.full_like(x, math.nan))
        assert error(out, wanted(x, way, 0)) < bound
    way.topk_ids[1, 1] = 8
    found = op.apply(x, way)
    with pytest.raises(ShapeError, match="8 at token 1, slot 1"):
        check()
    way.topk_ids[1, 1] = -1
    assert error(found, wanted(x, way, 0)) < bound
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.apply(x, way, out=out)
    other = routing(700, 5)
    x.copy_(torch.randn_like(x))
    way.topk_ids.copy_(other.topk_ids)
    op.update(weights(1))
    out.fill_(math.nan)
    graph.replay()
    assert error(out, wanted(x, way, 1)) < bound


def cache(kind, rows, pages_each=4):
    scheme = KVScheme.parse(kind)
    spec = KVCacheSpec(8, 2, 128, 16, scheme, scheme)
    op = FlashInferKV().prepare(spec, KVParams())
    pages = torch.zeros(rows * pages_each, op.page_bytes, dtype=torch.uint8, device=DEVICE)
    table = torch.randperm(rows * pages_each, device=DEVICE).int().view(rows, pages_each)
    k, v = (torch.randn(rows * pages_each * 16, 2, 128, device=DEVICE).bfloat16() for _ in range(2))
    op.append(pages, k, v, torch.arange(len(k), device=DEVICE))
    return op, pages, table


def attended(op, pages, row, q, length):
    k, v = (t.float().repeat_interleave(4, dim=1) for t in op.materialize(pages, row, length, dtype="fp32"))
    logits = torch.einsum("hd,nhd->hn", q.float(), k) * 128**-0.5
    return torch.einsum("hn,nhd->hd", logits.softmax(-1), v), logits.logsumexp(-1)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_graph_plan_serves_other_lengths(kind):
    pytest.importorskip("flashinfer", reason="needs flashinfer-python")
    op, pages, table = cache(kind, 3)
    q, out = torch.randn(3, 8, 128, device=DEVICE).bfloat16(), torch.empty(3, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    lengths, starts = torch.tensor([64, 64, 64], dtype=torch.int32, device=DEVICE), torch.arange(4, dtype=torch.int32, device=DEVICE)
    op.plan(len(pages), table, lengths, starts, graph=True)
    op.attend(q, pages, table, lengths, starts, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = op.attend(q, pages, table, lengths, starts, out=out)
    for new in ([64, 17, 1], [5, 33, 0]):
        lengths.copy_(torch.tensor(new))
        op.plan(len(pages), table, lengths, starts, graph=True)
        out.fill_(math.nan)
        graph.replay()
        for b, n in enumerate(new):
            if n:
                wanted, sums = attended(op, pages, table[b], q[b], n)
                assert error(out[b], wanted) < 6e-3
                assert (lse[b] - sums).abs().max() < 5e-3
            else:
                assert not out[b].any()
                assert bool(torch.isneginf(lse[b]).all())


def test_attention_without_a_plan_follows_what_changes():
    pytest.importorskip("flashinfer", reason="needs flashinfer-python")
    op, pages, table = cache("bf16", 2)
    q, starts = torch.randn(2, 8, 128, device=DEVICE).bfloat16(), torch.arange(3, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([64, 3], dtype=torch.int32, device=DEVICE)
    for new in ([64, 3], [1, 40], [0, 2]):
        lengths.copy_(torch.tensor(new))
        out, lse = op.attend(q, pages, table, lengths, starts)
        assert torch.equal(op.attend_only(q, pages, table, lengths, starts, out=torch.full_like(q, math.nan)), out)
        for b, n in enumerate(new):
            if n:
                assert error(out[b], attended(op, pages, table[b], q[b], n)[0]) < 6e-3
            else:
                assert bool(torch.isneginf(lse[b]).all())
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(HalError, match="there is no plan"), torch.cuda.graph(graph):
        op.attend(q, pages, table, lengths, starts)
    op.plan(len(pages), table, lengths, starts)
    assert torch.equal(op.attend_only(q, pages, table, lengths, starts), out)
    lengths += 1
    with pytest.raises(ShapeError, match="changed after the plan"):
        op.attend_only(q, pages, table, lengths, starts)


def test_windows_and_caps():
    pytest.importorskip("flashinfer", reason="needs flashinfer-python")
    op, pages, table = cache("bf16", 1)
    for changes in ({"window": 20}, {"soft_cap": 5.0}):
        other = FlashInferKV().prepare(replace(op.spec, **changes), KVParams())
        q = torch.randn(1, 8, 128, device=DEVICE).bfloat16() * 3
        lengths, starts = torch.tensor([50], dtype=torch.int32, device=DEVICE), torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
        found, _ = other.attend(q, pages, table, lengths, starts)
        k, v = (t.float().repeat_interleave(4, dim=1) for t in op.materialize(pages, table[0], 50, dtype="fp32"))
        logits = torch.einsum("hd,nhd->hn", q[0].float(), k) * 128**-0.5
        if "window" in changes:
            logits[:, :30] = -math.inf
        else:
            logits = 5.0 * torch.tanh(logits / 5.0)
        assert error(found[0], torch.einsum("hn,nhd->hd", logits.softmax(-1), v)) < 8e-3


def test_appending_skips_saturates_and_refuses():
    op, pages, _ = cache("fp8", 1)
    before = pages.clone()
    x = torch.full((3, 2, 128), 1e6, device=DEVICE).bfloat16()
    for wrong, told in (([-1, 5, 10**9], "these run from -1 to 63"), ([5, 7, 5], "slot 5 given twice")):
        with pytest.raises(ShapeError, match=told):
            op.append(pages, x, x, torch.tensor(wrong, device=DEVICE))
        assert torch.equal(pages, before)
    op.append(pages, x, x, torch.tensor([-1, 5, -1], device=DEVICE))
    k, _ = op.materialize(pages, torch.arange(4, dtype=torch.int32, device=DEVICE), 64, dtype="fp32")
    assert bool((k[5] == 448).all())
    assert (pages != before).sum().item() <= 2 * 256


def test_two_threads_share_a_cache():
    pytest.importorskip("flashinfer", reason="needs flashinfer-python")
    op, pages, table = cache("bf16", 2)
    lengths = [torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([64, 20], [3, 33])]
    starts, q = torch.arange(3, dtype=torch.int32, device=DEVICE), torch.randn(2, 8, 128, device=DEVICE).bfloat16()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [(n, pool.submit(op.attend, q, pages, table, n, starts)) for _ in range(8) for n in lengths]
        for n, job in jobs:
            for b, length in enumerate(n.tolist()):
                wanted, sums = attended(op, pages, table[b], q[b], length)
                assert error(job.result()[0][b], wanted) < 6e-3
                assert (job.result()[1][b] - sums).abs().max() < 5e-3
