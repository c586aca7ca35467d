"""The Triton kernels on a CUDA GPU: numbers, graphs, bad ids, sizes beyond 32 bits."""

from __future__ import annotations

import threading

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import triton_cases as cases
from hal_backend_cuda.kernels import KERNELS

from hal_core.check import check
from hal_core.errors import ShapeError
from hal_core.machine import Machine
from hal_core.testing.bench import Bench
from hal_core.testing.plan import plan_of
from hal_core.triton import launch, ops
from hal_core.triton.configs import Tile
from hal_core.triton.relaunch import DriverLaunch, Launch

DEVICE = "cuda"


@pytest.mark.parametrize("case", cases.LINEARS, ids=str)
def test_linear_is_within_its_bound(case):
    found, wanted = case.run(DEVICE)
    assert cases.distance(found, wanted) < (cases.FP8_BOUND if case.scheme.startswith("fp8") else cases.BOUND[case.dtype])


@pytest.mark.parametrize("arguments", cases.BLOCKS, ids=str)
def test_experts_are_within_their_bound_and_wrong_ids_are_raised(arguments):
    block = cases.Block(**arguments, device=DEVICE)
    found = block.run()
    if block.wrong:
        with pytest.raises(ShapeError, match=f"{block.experts + 3} at token {block.tokens // 2}, slot 0"):
            check()
    check()
    assert cases.distance(found, block.truth()) < block.bound


@pytest.mark.parametrize("scheme", ["int4:g128", "int4:g32:zero", "int8:g128", "bf16"])
@pytest.mark.parametrize("tokens", [1, 3, 64, 300, 1500])
def test_large_experts(scheme, tokens):
    block = cases.Block(scheme, 2048, 768, tokens, experts=32, top_k=8, device=DEVICE)
    found = block.run()
    check()
    assert cases.distance(found, block.truth()) < block.bound
    assert torch.equal(block.run(), found), "two runs give other bits"


@pytest.mark.parametrize("rows", [1, 17, 64, 130, 700])
@pytest.mark.parametrize("scheme", ["int4:g128", "int4:g128:zero", "int4:g32:min", "int8:g128", "bf16", "fp8_e4m3:b128x128"])
def test_large_linear(scheme, rows):
    found, wanted = cases.Linear(scheme, 3072, 4096, rows, bias=True).run(DEVICE)
    assert cases.distance(found, wanted) < (cases.FP8_BOUND if scheme.startswith("fp8") else cases.BOUND["bf16"])


@pytest.mark.parametrize(
    "tiles", [(32, 64, 4, False, 0), (64, 128, 8, True, 0), (128, 64, 8, False, 0), (128, 128, 8, True, 0), (64, 64, 4, False, 16)]
)
@pytest.mark.parametrize("scheme", ["int4:g128", "int4:g32:zero:act_order", "int8:channel"])
def test_every_tile_gives_the_same_numbers(tiles, scheme):
    block = cases.Block(scheme, 512, 256, 200, experts=4, device=DEVICE, bias=True)
    tile = Tile(tiles[0], tiles[1], tiles[2], 3, weights=tiles[3], extra=tiles[4])
    assert cases.distance(block.run((tile, tile)), block.truth()) < block.bound


def test_nan_stays_in_its_row():
    block = cases.Block("int4:g32", 256, 128, 40, device=DEVICE)
    clean = block.run()
    block.x[7] = float("nan")
    found = block.run()
    assert found[7].isnan().all() or bool((block.good[7] < 0).all())
    rest = [i for i in range(40) if i != 7]
    assert torch.equal(found[rest], clean[rest])


@pytest.mark.parametrize("tokens", [1, 200])
def test_graphs_capture_and_see_new_inputs_and_weights(tokens):
    block = cases.Block("int4:g32", 256, 128, tokens, device=DEVICE)
    made, out = block.made(), torch.empty_like(block.x)
    ops.moe(block.x, block.ids, block.scores, None, made, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.moe(block.x, block.ids, block.scores, None, made, out)
    block.x.copy_(torch.randn_like(block.x))
    block.ids.copy_(torch.randint_like(block.ids, 0, block.experts))
    made.up.codes.copy_(torch.randint_like(made.up.codes, -(2**31), 2**31 - 1))
    graph.replay()
    replayed = out.clone()
    ops.moe(block.x, block.ids, block.scores, None, made, out)
    assert torch.equal(out, replayed)
    block.ids[0, 0] = 99
    graph.replay()
    with pytest.raises(ShapeError, match="99 at token 0, slot 0"):
        check()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("rows", [1, 33, 400])
def test_every_op_is_captured_and_its_graph_follows_inputs_and_updates(kernel, rows):
    plan = plan_of(f"cuda.{kernel.name}", kernel, Machine.detect())
    case = next(case for case in plan.cases() if case.check == "update")
    subject = Bench(kernel, case, plan.machine, rows, plan.accepted).subject()
    op, inputs, other = subject.prepare(), subject.inputs(rows), subject.inputs(rows)
    out = subject.poisoned(rows)
    subject.call(op, inputs, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        subject.call(op, inputs, out)
    weights = subject.new_weights()
    op.update(subject.copied(weights))
    inputs.x.copy_(other.x)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, subject.call(subject.prepare(weights), inputs))
    check()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_recorded_calls_are_launched_by_the_driver_in_any_thread_and_stream(kernel):
    plan = plan_of(f"cuda.{kernel.name}", kernel, Machine.detect())
    case = next(case for case in plan.cases() if case.check == "update")
    subject = Bench(kernel, case, plan.machine, 5, plan.accepted).subject()
    op, inputs, out, side = subject.prepare(), subject.inputs(5), subject.poisoned(5), torch.cuda.Stream()
    wanted = subject.call(op, inputs).clone()
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: subject.call(op, inputs, out))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
    out.fill_(float("nan"))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        subject.call(op, inputs, out)
    side.synchronize()
    assert torch.equal(out, wanted)
    (recorded,) = op.repeats.known.values()
    for plan in recorded.plans.values():
        assert any(isinstance(step, DriverLaunch) for step in plan.steps)
        assert not any(isinstance(step, Launch) for step in plan.steps)


def test_seventy_thousand_tokens_pass_32_bit_offsets():
    block = cases.Block("int4:g128", 2048, 128, 70_000, experts=16, top_k=16, device=DEVICE)
    assert block.tokens * block.top_k * block.hidden > 2**31
    found = block.run()
    check()
    few = [0, 1, 34_999, 65_536, 69_998, 69_999]
    whole = block.good, block.scores, block.x
    block.good, block.scores, block.x = (t[few] for t in whole)
    assert cases.distance(found[few], block.truth()) < block.bound
    assert bool(found.isfinite().all())


@pytest.mark.parametrize(("rows", "k"), [(1, 64), (33, 2048), (5, 5000)])
def test_quantizers_round_to_nearest(rows, k):
    x = torch.randn(rows, k, device=DEVICE).to(torch.bfloat16)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), 5.0])
    codes, scales = launch.quantize_int8(x)
    assert scales[0].isnan()
    assert torch.equal(codes[1:].float(), (x[1:].float() / scales[1:, None]).round().clamp(-127, 127))
    codes, scales = launch.quantize_fp8(x, 128)
    spread = scales.repeat_interleave(128, dim=1)[:, :k]
    wanted = (x.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert codes[0, :2].float().isnan().all()
    wanted[0, :2] = codes[0, :2].float()
    assert torch.equal(codes.float().nan_to_num(9e9), wanted.nan_to_num(9e9))
