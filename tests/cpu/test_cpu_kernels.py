"""Every CPU kernel against the reference, through the same prepare and apply that a model uses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hal_core.canonical import QuantizedTensor, pack_nibbles
from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.machine import Machine
from hal_core.ops import Routed
from hal_core.reference.linear import ReferenceEmbedding, ReferenceLinear
from hal_core.reference.moe import ReferenceMoE
from hal_core.schemes import WeightScheme
from hal_core.spec import Activation, EmbeddingSpec, LinearSpec, MoESpec

kernels = pytest.importorskip("hal_backend_cpu.kernels", reason="the hal-backend-cpu wheel is not installed")

LEVELS = {
    "avx512bf16": (kernels.LinearAVX512BF16(), kernels.EmbeddingAVX512BF16(), kernels.MoEAVX512BF16()),
    "avx512": (kernels.LinearAVX512(), kernels.EmbeddingAVX512(), kernels.MoEAVX512()),
    "avx2": (kernels.LinearAVX2(), kernels.EmbeddingAVX2(), kernels.MoEAVX2()),
}
SCHEMES = [
    "int4:g32",
    "int4:g128:zero",
    "int4:g32:min",
    "int4:channel:zero",
    "int4:tensor",
    "int8:g64",
    "int8:channel:zero",
    "int8:g32:min",
]
BOUND = {"fp32": 2e-5, "bf16": 4e-3, "fp16": 1e-3}


def kernel(level: str, op: int):
    wanted = LEVELS[level][op]
    missing = [feature for feature in wanted.isa if feature not in Machine.detect().isa]
    if missing:
        pytest.skip(f"this processor lacks {', '.join(missing)}")
    return wanted


def random_weight(text: str, lead: tuple[int, ...], n: int, k: int, *, act_order: bool = False) -> QuantizedTensor:
    """A canonical tensor with negative scales and outlier groups."""
    scheme = WeightScheme.parse(text)
    act_order = act_order and scheme.granularity.group is not None  # one scale a row has no groups to order
    scheme = replace(scheme, act_order=act_order)
    low = 0 if scheme.zero.value != "none" else -(2 ** (scheme.bits - 1))
    codes = torch.randint(low, low + 2**scheme.bits, (*lead, n, k))
    values = pack_nibbles(codes) if scheme.bits == 4 else codes.to(torch.int8 if low else torch.uint8)
    g = scheme.granularity
    grid = (1, 1) if g.kind.value == "tensor" else (n, -(-k // g.group) if g.group else 1)
    scales = (torch.randn(*lead, *grid) * 0.02).half()
    scales[torch.rand(scales.shape) < 0.02] *= 20
    zeros = torch.randint(0, 2**scheme.bits, (*lead, *grid), dtype=torch.uint8) if scheme.zero.value == "integer" else None
    mins = (torch.randn(*lead, *grid) * 0.05).half() if scheme.zero.value == "minimum" else None
    g_idx = None
    if act_order:
        base = torch.arange(k, dtype=torch.int32) // (g.group or k)
        g_idx = torch.stack([base[torch.randperm(k)] for _ in range(lead[0] if lead else 1)]).reshape(*lead, k)
    return QuantizedTensor(scheme, (*lead, n, k), values, scales, zeros, mins, g_idx)


def inputs(rows: int, k: int, dtype: str) -> torch.Tensor:
    x = torch.randn(rows, k)
    x[torch.rand(x.shape) < 0.01] *= 20
    return x.to(torch_dtype(dtype))


def relative(y: torch.Tensor, truth: torch.Tensor, terms: torch.Tensor | None = None) -> float:
    """Relative L2 error. ``terms``: the sums of absolute products; a few outputs alone may cancel, and rounding is relative to those."""
    assert torch.isfinite(y).all()
    scale = truth.double().norm()
    if terms is not None:
        scale = scale.clamp(min=float(0.05 * terms.double().norm()))
    return float((y.double() - truth.double()).norm() / scale.clamp(min=1e-30))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(40, 256), (17, 96), (1, 64), (16, 8), (33, 131)])
def test_linear_within_its_bound(level: str, scheme: str, shape: tuple[int, int]) -> None:
    n, k = shape
    weight = random_weight(scheme, (), n, k)
    for dtype in ("fp32", "bf16", "fp16"):
        spec = LinearSpec(n, k, weight.scheme, dtype=dtype, bias=True)
        bias = torch.randn(n).to(torch_dtype(dtype))
        op = kernel(level, 0).prepare(spec, LinearWeights(weight, bias))
        assert op.isa == level
        truth_op = ReferenceLinear().prepare(replace(spec, dtype="fp32"), LinearWeights(weight, bias))
        for rows in (1, 5):
            x = inputs(rows, k, dtype)
            out = torch.full((rows, n), float("nan"), dtype=x.dtype)
            terms = x.float().abs() @ weight.dequantize().abs().T
            assert relative(op.apply(x, out=out), truth_op.apply(x.float()), terms) < BOUND[dtype]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheme", ["int4:g32", "int4:g32:zero", "int8:g32:min", "int4:g64:zero"])
def test_act_order_linear(level: str, scheme: str) -> None:
    weight = random_weight(scheme, (), 24, 160, act_order=True)
    spec = LinearSpec(24, 160, weight.scheme, dtype="fp32")
    x = inputs(3, 160, "fp32")
    truth = ReferenceLinear().prepare(spec, LinearWeights(weight)).apply(x)
    assert relative(kernel(level, 0).prepare(spec, LinearWeights(weight)).apply(x), truth) < 2e-5


def test_weights_that_the_layout_cannot_hold_are_served_by_the_next_with_a_note() -> None:
    import hal_core as hal

    weight = random_weight("int4:g32:zero", (), 8, 64, act_order=True)
    weight.g_idx[:] = torch.randint(0, 2, (64,))
    weight.g_idx[:2] = torch.tensor([0, 1])
    weight.g_idx[2:36] = 0  # more than a group's columns
    spec, weights = LinearSpec(8, 64, weight.scheme, dtype="fp32"), LinearWeights(weight)
    with pytest.warns(hal.HalWarning, match="cannot hold"):
        op = hal.prepare(spec, weights)
    assert op.selection.kernel == "reference.linear"
    x = inputs(3, 64, "fp32")
    assert torch.equal(op.apply(x), ReferenceLinear().prepare(spec, weights).apply(x))
    with pytest.raises(ShapeError, match="require:reference"):
        hal.prepare(spec, weights, policy="require:cpu")


def test_listing_kernels_loads_no_native_code() -> None:
    import subprocess
    import sys

    code = "import sys, hal_backend_cpu.backend as b; b.backend.kernels(); assert 'hal_backend_cpu._native' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_padding_of_the_layout_is_reported_and_true() -> None:
    import hal_core as hal

    op = hal.prepare(LinearSpec(17, 90, WeightScheme.parse("int4:g16"), dtype="fp32"), LinearWeights(random_weight("int4:g16", (), 17, 90)))
    found = {p.dim: (p.asked, p.padded) for p in op.selection.padding}
    assert found == {"n": (17, 32), "k": (90, 96)}
    tiles, words, lanes = op.weight.codes.shape
    assert (tiles * lanes, words * 8) == (32, 96)


def test_act_order_with_uneven_groups_is_refused_with_a_way_out() -> None:
    weight = random_weight("int4:g32:zero", (), 8, 64, act_order=True)
    weight.g_idx[:] = 0
    with pytest.raises(ShapeError, match="require:reference"):
        kernel("avx2", 0).prepare(LinearSpec(8, 64, weight.scheme), LinearWeights(weight))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("act_order", [False, True])
def test_layout_reverses_bit_for_bit(scheme: str, lead: tuple[int, ...], act_order: bool) -> None:
    from hal_backend_cpu.layout import PackedMatrix

    for n, k in ((17, 96), (16, 64), (5, 72)):
        weight = random_weight(scheme, lead, n, k, act_order=act_order)
        back = PackedMatrix(weight).unpack()
        assert back.scheme == weight.scheme
        assert back.shape == weight.shape
        for name, tensor in weight.tensors().items():
            assert torch.equal(back.tensors()[name], tensor), name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_embedding_rows_equal_the_reference_bit_for_bit(level: str, scheme: str) -> None:
    weight = random_weight(scheme, (), 50, 96)
    for dtype in ("fp32", "bf16", "fp16"):
        spec = EmbeddingSpec(50, 96, weight.scheme, dtype=dtype, tied_head=True)
        op, truth = kernel(level, 1).prepare(spec, LinearWeights(weight)), ReferenceEmbedding().prepare(spec, LinearWeights(weight))
        ids = torch.randint(0, 50, (2, 7))
        assert torch.equal(op.lookup(ids), truth.lookup(ids))
        x = inputs(3, 96, dtype)
        assert relative(op.apply(x), truth.apply(x.float())) < BOUND[dtype]
        with pytest.raises(ShapeError, match="50"):
            op.lookup(torch.tensor([1, 50]))


MOE_CASES = [
    (Activation("silu"), ("int4:g32:zero",) * 3, {}),
    (Activation("silu", limit=0.5), ("int4:g32",) * 3, {}),
    (Activation("gelu"), ("int4:g32:min", "int4:g32:min", "int8:g32"), {"bias": True}),
    (Activation("gelu_tanh", limit=1.0), ("int8:channel",) * 3, {"router_weight_on_input": True}),
    (Activation("swiglu_oai", alpha=1.3, limit=0.8), ("int4:g32:zero",) * 3, {"bias": True, "routed_scaling": 2.5}),
    (Activation("swiglu_oai"), ("int4:g32:zero",) * 3, {}),
    (Activation("relu2"), (None, "int4:channel", "int8:g32"), {"bias": True}),
    (Activation("gelu", limit=0.5), (None, "int4:g32", "int4:g32"), {}),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", range(len(MOE_CASES)))
@pytest.mark.parametrize("act_order", [False, True])
def test_moe_within_its_bound(level: str, case: int, act_order: bool) -> None:
    activation, schemes, more = MOE_CASES[case]
    e, h, i, k = 6, 64, 96, 3
    mats = {
        r: random_weight(s, (e,), *((i, h) if r != "down" else (h, i)), act_order=act_order)
        for r, s in zip(("gate", "up", "down"), schemes, strict=True)
        if s
    }
    biases = {f"{r}_bias": torch.randn(e, h if r == "down" else i) for r in mats} if more.get("bias") else {}
    scheme = {r: m.scheme for r, m in mats.items()}
    for dtype in ("fp32", "bf16"):
        spec = MoESpec(e, k, h, i, scheme["up"], scheme["down"], scheme.get("gate"), activation, dtype=dtype, **more)
        op = kernel(level, 2).prepare(spec, MoEWeights(**mats, **biases))
        truth_op = ReferenceMoE().prepare(replace(spec, dtype="fp32"), MoEWeights(**mats, **biases))
        for rows, top in ((1, e), (17, e - 1), (9, 1), (0, e)):  # all tokens to one expert when top is 1
            x = inputs(rows, h, dtype)
            ids, weights = torch.randint(0, top, (rows, k), dtype=torch.int32), torch.rand(rows, k)
            if rows > 1:
                ids[0, 1] = -1
            for reduce in (True, False):
                y = op.apply(x, Routed(ids, weights), reduce=reduce)
                truth = truth_op.apply(x.float(), Routed(ids, weights), reduce=reduce)
                assert y.shape == truth.shape
                assert relative(y, truth) < BOUND[dtype]


def test_moe_with_expert_map_and_out() -> None:
    weight = {r: random_weight("int4:g32", (3,), *((96, 64) if r != "down" else (64, 96))) for r in ("gate", "up", "down")}
    s = weight["up"].scheme
    spec = MoESpec(6, 2, 64, 96, s, s, s, dtype="fp32", local_experts=3, expert_map=True)
    op, truth = kernel("avx2", 2).prepare(spec, MoEWeights(**weight)), ReferenceMoE().prepare(spec, MoEWeights(**weight))
    mapping = torch.tensor([-1, 2, -1, 0, 1, -1], dtype=torch.int32)
    x, ids, w = inputs(8, 64, "fp32"), torch.randint(0, 6, (8, 2), dtype=torch.int32), torch.rand(8, 2)
    ids[0] = torch.tensor([1, 3])
    out = torch.full_like(x, float("nan"))
    assert relative(op.apply(x, Routed(ids, w), expert_map=mapping, out=out), truth.apply(x, Routed(ids, w), expert_map=mapping)) < 2e-5
    mapping[1] = 3
    with pytest.raises(ShapeError):
        op.apply(x, Routed(ids, w), expert_map=mapping)
    ids[4, 1] = 6
    mapping[1] = 2
    with pytest.raises(ShapeError, match=r"token 4.*slot 1"):
        op.apply(x, Routed(ids, w), expert_map=mapping)


def test_moe_input_of_a_width_that_only_padding_hides_is_refused() -> None:
    weight = {r: random_weight("int4:g32", (3,), *((96, 64) if r != "down" else (64, 96))) for r in ("gate", "up", "down")}
    s = weight["up"].scheme
    op = kernel("avx2", 2).prepare(MoESpec(3, 2, 64, 96, s, s, s, dtype="fp32"), MoEWeights(**weight))
    for width in (63, 65):
        with pytest.raises(ShapeError, match="64"):
            op.apply(torch.randn(2, width), Routed(torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2)))


def test_update_equals_a_fresh_prepare_and_keeps_addresses() -> None:
    first, second = (random_weight("int4:g32:zero", (), 24, 96) for _ in range(2))
    spec = LinearSpec(24, 96, first.scheme, dtype="fp32")
    op = kernel("avx2", 0).prepare(spec, LinearWeights(first))
    addresses = [b.data_ptr() for b in op.buffers()]
    op.update(LinearWeights(second))
    x = inputs(4, 96, "fp32")
    assert [b.data_ptr() for b in op.buffers()] == addresses
    assert torch.equal(op.apply(x), kernel("avx2", 0).prepare(spec, LinearWeights(second)).apply(x))


def test_moving_a_module_to_another_dtype_never_recasts_packed_scales() -> None:
    weight = random_weight("int4:g32:min", (), 24, 96)
    op = kernel("avx2", 0).prepare(LinearSpec(24, 96, weight.scheme, dtype="fp32"), LinearWeights(weight))
    x = inputs(4, 96, "fp32")
    before = op.apply(x)
    assert torch.equal(op.bfloat16().apply(x), before)


@pytest.mark.parametrize("make", ["linear", "moe"])
def test_ops_compile_without_a_graph_break(make: str) -> None:
    weight = {r: random_weight("int4:g32", (3,), *((96, 64) if r != "down" else (64, 96))) for r in ("gate", "up", "down")}
    s = weight["up"].scheme
    x = inputs(4, 64, "fp32")
    if make == "linear":
        op = kernel("avx2", 0).prepare(LinearSpec(96, 64, s, dtype="fp32"), LinearWeights(weight["up"].expert(0)))
        call = op.apply
    else:
        moe = kernel("avx2", 2).prepare(MoESpec(3, 2, 64, 96, s, s, s, dtype="fp32"), MoEWeights(**weight))
        ids, w = torch.randint(0, 3, (4, 2), dtype=torch.int32), torch.rand(4, 2)
        call = lambda v: moe.apply(v, Routed(ids, w))  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), call(x))


def test_wrong_input_is_a_clear_error() -> None:
    weight = random_weight("int4:g32", (), 24, 96)
    op = kernel("avx2", 0).prepare(LinearSpec(24, 96, weight.scheme, dtype="fp32"), LinearWeights(weight))
    for x in (torch.randn(2, 95), torch.randn(2, 96).double(), torch.zeros(2, 96, dtype=torch.int32)):
        with pytest.raises(ShapeError, match="cpu linear"):
            op.apply(x)
    with pytest.raises(ShapeError):
        op.apply(torch.randn(2, 96), out=torch.empty(3, 24))


def test_a_refused_update_changes_nothing() -> None:
    first, second = (random_weight("int4:g32:zero", (), 24, 96) for _ in range(2))
    op = kernel("avx2", 0).prepare(LinearSpec(24, 96, first.scheme, dtype="fp32", bias=True), LinearWeights(first, torch.randn(24)))
    x = inputs(4, 96, "fp32")
    before = op.apply(x)
    wide = replace(second, scales=second.scales.float())
    for wrong in (LinearWeights(second), LinearWeights(second, torch.zeros(1)), LinearWeights(wide, torch.zeros(24)), None):
        with pytest.raises(ShapeError):
            op.update(wrong)
        assert torch.equal(op.apply(x), before)


@pytest.mark.parametrize("make", ["linear", "moe"])
def test_an_input_that_wants_a_gradient_is_refused_not_given_a_wrong_one(make: str) -> None:
    weight = {r: random_weight("int4:g32", (3,), *((96, 64) if r != "down" else (64, 96))) for r in ("gate", "up", "down")}
    s, x = weight["up"].scheme, inputs(4, 64, "fp32").requires_grad_()
    if make == "linear":
        call = kernel("avx2", 0).prepare(LinearSpec(96, 64, s, dtype="fp32"), LinearWeights(weight["up"].expert(0))).apply
    else:
        op = kernel("avx2", 2).prepare(MoESpec(3, 2, 64, 96, s, s, s, dtype="fp32"), MoEWeights(**weight))
        routed = Routed(torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2))
        call = lambda v: op.apply(v, routed)  # noqa: E731
    with pytest.raises(ShapeError, match="backward"):
        call(x)
    with torch.no_grad():
        assert torch.isfinite(call(x)).all()


def test_weights_on_the_meta_device_compute_nothing() -> None:
    weight = random_weight("int4:g32", (), 24, 96)
    op = kernel("avx2", 0).prepare(LinearSpec(24, 96, weight.scheme, dtype="fp32"), LinearWeights(weight)).to("meta")
    with pytest.raises(ShapeError, match="meta"):
        op.apply(torch.randn(2, 96))
