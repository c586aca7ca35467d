"""The Triton kernels' numbers without a GPU: Triton's interpreter, repaired, against float64."""

from __future__ import annotations

import functools
import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("there is a CUDA device: test_triton_gpu runs the same cases on it", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed; `make test-cuda` brings it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 must be set before triton is imported; `make test-cuda` does", allow_module_level=True)

import triton_cases as cases
import triton_interpreter
from hal_backend_cuda.providers.flashinfer.beside import launch_merge, merge_on_host

from hal_core.check import check
from hal_core.errors import ShapeError
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.ops import Routed
from hal_core.schemes import WeightScheme
from hal_core.spec import LinearSpec, MoESpec
from hal_core.testing.data import random_weight
from hal_core.triton import launch
from hal_core.triton.configs import Tile
from hal_core.triton.modules import TritonExperts, TritonLinear

triton_interpreter.repair()


@pytest.mark.parametrize("case", cases.LINEARS, ids=str)
def test_linear_is_within_its_bound(case):
    found, wanted = case.run("cpu")
    assert cases.distance(found, wanted) < (cases.FP8_BOUND if case.scheme.startswith("fp8") else cases.BOUND[case.dtype])


@pytest.mark.parametrize("kind", [TritonLinear, TritonExperts])
def test_buffers_that_are_replaced_are_those_of_the_next_call(kind):
    rng, scheme = torch.Generator().manual_seed(0), WeightScheme.parse("int4:g32")

    def made():
        if kind is TritonLinear:
            weights = LinearWeights(random_weight(scheme, (64, 64), rng, "bf16"), torch.randn(64, generator=rng))
            return TritonLinear(LinearSpec(64, 64, scheme, dtype="bf16", bias=True), weights)
        parts = {role: random_weight(scheme, (2, 64, 64), rng, "bf16") for role in ("up", "down", "gate")}
        spec = MoESpec(num_experts=2, top_k=1, hidden=64, intermediate=64, up=scheme, down=scheme, gate=scheme)
        return TritonExperts(spec, MoEWeights(**parts))

    op, other, x = made(), made(), torch.randn(3, 64, generator=rng).bfloat16()
    given = (x,) if kind is TritonLinear else (x, Routed(torch.tensor([[0], [1], [0]]).int(), torch.ones(3, 1)))
    before, wanted = op.apply(*given), other.apply(*given)
    assert not torch.equal(before, wanted)
    assert torch.equal(torch.func.functional_call(op, other.state_dict(), given), wanted)
    assert torch.equal(op.apply(*given), before)
    op.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(op.apply(*given), wanted)


@pytest.mark.parametrize("arguments", cases.BLOCKS, ids=str)
def test_experts_are_within_their_bound_and_wrong_ids_are_raised(arguments):
    block = cases.Block(**arguments)
    found = block.run()
    if block.wrong:
        with pytest.raises(ShapeError, match=f"{block.experts + 3} at token {block.tokens // 2}, slot 0"):
            check()
    check()
    assert cases.distance(found, block.truth()) < block.bound


def test_many_slots_are_sorted_in_two_kernels(monkeypatch):
    monkeypatch.setattr(launch, "_FEW", 16)
    monkeypatch.setattr(launch, "_CHUNK", 32)
    block = cases.Block("int4:g32", 64, 32, 50, wrong=True)
    found = block.run()
    with pytest.raises(ShapeError, match="9 at token 25, slot 0"):
        check()
    assert cases.distance(found, block.truth()) < block.bound


@pytest.mark.parametrize(
    "options", [{"mapped": True}, {"scheme": "int4:g32:zero:act_order", "bias": True}, {"scheme": "int8:channel"}], ids=str
)
def test_rows_beside_a_tile_and_tiles_in_a_tile_of_the_sort(options):
    block = cases.Block(**{"scheme": "int4:g32", "hidden": 64, "inner": 33, "tokens": 60, "experts": 4, **options})
    found = block.run((Tile(16, 64, 4, 3, extra=16), Tile(32, 64, 4, 3, extra=32)))
    assert cases.distance(found, block.truth()) < block.bound
    check()


def test_no_tokens():
    block = cases.Block("int4:g32", 64, 32, 0)
    assert block.run().shape == (0, 64)
    assert cases.Linear("int4:g32", 64, 32, 0).run("cpu")[0].shape == (0, 64)


def test_nan_stays_in_its_row():
    block = cases.Block("int4:g32", 64, 64, 8)
    block.good[:] = block.ids[:] = 1
    block.x[3] = float("nan")
    found, wanted = block.run(), block.truth()
    assert found[3].isnan().all()
    rest = [0, 1, 2, 4, 5, 6, 7]
    assert cases.distance(found[rest], wanted[rest]) < block.bound


def test_written_out_weights_are_those_of_the_definition():
    for scheme in ("int4:g32:zero:act_order", "int4:channel:min", "int8:g64", "int8:channel:zero"):
        rng = torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())
        weight = cases.random_weight(cases.WeightScheme.parse(scheme), (70, 160), rng)
        wide = torch.full((66, 160), float("nan"), dtype=torch.bfloat16)
        launch.widened(cases.matrix(weight), 4, wide)
        assert torch.equal(wide, weight.dequantize()[4:].to(torch.bfloat16))


@pytest.mark.parametrize(("rows", "k"), [(1, 64), (3, 200), (2, 5000)])
def test_quantizers_round_to_nearest(rows, k):
    x = torch.randn(rows, k).to(torch.bfloat16)
    codes, scales = launch.quantize_int8(x)
    assert torch.equal(codes.float(), (x.float() / scales[:, None]).round().clamp(-127, 127))
    codes, scales = launch.quantize_fp8(x, 128)
    spread = scales.repeat_interleave(128, dim=1)[:, :k]
    assert torch.equal(codes.float(), (x.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn).float())
    x[0, :3] = torch.tensor([float("nan"), float("inf"), 5.0])
    assert launch.quantize_int8(x)[1][0].isnan()
    assert launch.quantize_fp8(x, 128)[0][0, :2].float().isnan().all()


@pytest.mark.parametrize(("kind", "limit", "gated"), [("silu", None, True), ("swiglu_oai", 0.7, True), ("relu2", 0.7, False)])
@pytest.mark.parametrize("group", ["int8", None, 128])
def test_an_activation_is_quantized_as_if_it_had_been_written(kind, limit, gated, group):
    y = (torch.randn(5, 2 * 200) * 3).to(torch.bfloat16)
    y[1, 7] = float("nan")
    gate, up = (y[:, :200], y[:, 200:]) if gated else (None, y)
    epilogue, between = launch.Epilogue(kind, 1.702, limit), torch.empty_like(up, memory_format=torch.contiguous_format)
    launch.activate(up, gate, between, epilogue)
    quantize = launch.quantize_int8 if group == "int8" else functools.partial(launch.quantize_fp8, group=group)
    (codes, scales), (wanted, wanted_scales) = quantize(up, gate=gate, epilogue=epilogue), quantize(between)
    assert wanted_scales.nan_to_num(0).count_nonzero() >= 4
    assert torch.equal(scales.nan_to_num(-1.0), wanted_scales.nan_to_num(-1.0))
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


def test_slots_of_one_expert_are_merged():
    ids = torch.tensor([[3, 1, 3], [5, 5, 5], [-1, 6, -1], [0, 2, 4]] * 20, dtype=torch.int32)
    weights = torch.randn(80, 3)
    out = torch.full_like(ids, 99), torch.full_like(weights, float("nan"))
    flag = torch.zeros(2, dtype=torch.int64)
    launch_merge((ids, weights), out, flag, 6, 3, 1.5)
    assert (flag[0] & 0xFFFFFFFF, flag[1], ((flag[0] >> 32) - 1) % 12) == (6, 3, 7)
    assert out[0][:4].tolist() == [[3, 1, -1], [5, -1, -1], [-1, -1, -1], [0, 2, 4]]
    for found, wanted in zip(out, merge_on_host(ids, weights, 6, 1.5), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
