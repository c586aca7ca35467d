"""The golden definition against independent float64 arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from hal_core.canonical import QuantizedTensor, pack_nibbles, stack, unpack_nibbles
from hal_core.errors import ShapeError
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.ops import Routed
from hal_core.reference.linear import ReferenceEmbedding, ReferenceLinear
from hal_core.reference.moe import ReferenceMoE
from hal_core.schemes import WeightScheme
from hal_core.spec import Activation, EmbeddingSpec, LinearSpec, MoESpec

SCHEMES = [
    "int4:g32", "int4:g32:zero", "int4:g32:min", "int4:channel", "int4:tensor", "int8:g64", "int8:channel:zero", "int4:g32:zero:act_order",
    "int3:g32:zero", "fp8_e4m3:b16x32", "bf16",
]  # fmt: skip


def make(text: str, n: int, k: int, seed: int = 0) -> tuple[QuantizedTensor, torch.Tensor]:
    """A random canonical tensor and its weight computed element by element in float64."""
    g = torch.Generator().manual_seed(seed)
    scheme = WeightScheme.parse(text)
    if not scheme.quantized:
        values = torch.randn(n, k, generator=g).bfloat16()
        return QuantizedTensor(scheme, (n, k), values), values.double()
    low, high = (-(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1)) if scheme.zero.value == "none" else (0, 2**scheme.bits)
    codes = torch.randint(low, high, (n, k), generator=g)
    if scheme.dtype == "fp8_e4m3":
        values = torch.randn(n, k, generator=g).to(torch.float8_e4m3fn)
        codes = values.double()
    elif scheme.bits == 4:
        values = pack_nibbles(codes)
    else:
        values = codes.to(torch.int8 if low < 0 else torch.uint8)
    probe = QuantizedTensor.__new__(QuantizedTensor)
    object.__setattr__(probe, "scheme", scheme)
    object.__setattr__(probe, "shape", (n, k))
    grid = probe.grid
    scales = torch.randn(grid, generator=g).half()
    zeros = torch.randint(0, 2**scheme.bits, grid, generator=g, dtype=torch.uint8) if scheme.zero.value == "integer" else None
    mins = torch.randn(grid, generator=g).half() if scheme.zero.value == "minimum" else None
    g_idx = torch.randint(0, grid[1], (k,), generator=g, dtype=torch.int32) if scheme.act_order else None
    block = scheme.granularity.block or (1, scheme.granularity.group or k)
    weight = torch.empty(n, k, dtype=torch.float64)
    for row in range(n):
        for column in range(k):
            r = min(row // block[0], grid[0] - 1)
            c = int(g_idx[column]) if g_idx is not None else column // block[1]
            q = float(codes[row, column])
            zero = float(zeros[r, c]) if zeros is not None else 0.0
            weight[row, column] = (q - zero) * float(scales[r, c]) + (float(mins[r, c]) if mins is not None else 0.0)
    return QuantizedTensor(scheme, (n, k), values, scales, zeros, mins, g_idx), weight


def relative(y: torch.Tensor, truth: torch.Tensor) -> float:
    assert torch.isfinite(y).all()
    return float((y.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(5, 96), (33, 70), (1, 1), (16, 33)])
def test_dequantize_follows_the_formula(scheme: str, shape: tuple[int, int]) -> None:
    tensor, weight = make(scheme, *shape)
    assert torch.equal(tensor.dequantize().double(), weight.float().double()) or relative(tensor.dequantize(), weight) < 1e-6


@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_agrees_with_float64(scheme: str) -> None:
    tensor, weight = make(scheme, 24, 96)
    x = torch.randn(7, 3, 96)
    x[0, 0, 5] = 300.0
    bias = torch.randn(24)
    op = ReferenceLinear().prepare(LinearSpec(24, 96, tensor.scheme, dtype="fp32", bias=True), LinearWeights(tensor, bias))
    out = torch.full((7, 3, 24), float("nan"))
    assert op.apply(x, out=out) is out
    assert relative(out, x.double() @ weight.T + bias.double()) < 1e-5
    assert op.apply(x[:0]).shape == (0, 3, 24)


def test_linear_reads_large_matrices_in_blocks_with_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, weight = make("int4:g32:min", 40, 64)
    monkeypatch.setattr("hal_core.reference.weights._BLOCK_BYTES", 64 * 4 * 7)
    op = ReferenceLinear().prepare(LinearSpec(40, 64, tensor.scheme, dtype="fp32"), LinearWeights(tensor))
    x = torch.randn(3, 64)
    assert relative(op.apply(x), x.double() @ weight.T) < 1e-5


def test_update_equals_a_fresh_prepare_and_keeps_addresses() -> None:
    (first, _), (second, _) = make("int4:g32:zero", 8, 64, 1), make("int4:g32:zero", 8, 64, 2)
    spec = LinearSpec(8, 64, first.scheme, dtype="fp32")
    op = ReferenceLinear().prepare(spec, LinearWeights(first))
    addresses = [b.data_ptr() for b in op.buffers()]
    op.update(LinearWeights(second))
    x = torch.randn(4, 64)
    assert [b.data_ptr() for b in op.buffers()] == addresses
    assert torch.equal(op.apply(x), ReferenceLinear().prepare(spec, LinearWeights(make("int4:g32:zero", 8, 64, 2)[0])).apply(x))
    with pytest.raises(ShapeError, match="the spec says"):
        op.update(LinearWeights(make("int4:g32", 8, 64)[0]))


def test_moving_a_module_to_another_dtype_never_recasts_scales() -> None:
    tensor, _ = make("int4:g32:min", 8, 64)
    op = ReferenceLinear().prepare(LinearSpec(8, 64, tensor.scheme, dtype="fp32"), LinearWeights(tensor))
    before = op.apply(torch.ones(1, 64))
    op.bfloat16()
    assert op.weight.tensor().scales.dtype == torch.float16
    assert torch.equal(op.apply(torch.ones(1, 64)), before)


@pytest.mark.parametrize("scheme", ["int4:g32:min", "int8:g32", "int4:tensor", "int8:channel"])
def test_embedding_rows_and_tied_head_share_weights(scheme: str) -> None:
    tensor, weight = make(scheme, 11, 64)
    op = ReferenceEmbedding().prepare(EmbeddingSpec(11, 64, tensor.scheme, dtype="fp32", tied_head=True), LinearWeights(tensor))
    ids = torch.tensor([[0, 10], [3, 3]])
    assert relative(op.lookup(ids), weight[ids]) < 1e-6
    x = torch.randn(2, 64)
    assert relative(op.apply(x), x.double() @ weight.T) < 1e-5
    assert op.lookup(ids[:0]).shape == (0, 2, 64)
    for bad in (-1, 11):
        with pytest.raises(ShapeError, match=f"{bad} at position 1"):
            op.lookup(torch.tensor([0, bad]))


def moe_truth(
    spec: MoESpec, mats: dict, biases: dict, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, expert_map: list[int] | None
):
    out = torch.zeros(*ids.shape, spec.hidden, dtype=torch.float64)
    for t in range(ids.shape[0]):
        for s in range(ids.shape[1]):
            e = int(ids[t, s])
            e = expert_map[e] if expert_map is not None and e >= 0 else e
            if e < 0:
                continue
            row = x[t].double() * (float(weights[t, s]) if spec.router_weight_on_input else 1.0)
            u = mats["up"][e] @ row + biases["up"][e]
            g = mats["gate"][e] @ row + biases["gate"][e] if spec.gate else None
            limit = spec.activation.limit
            if limit is not None:
                u = u.clamp(-limit, limit)
                g = g.clamp(max=limit) if g is not None else None
            h = act_truth(spec.activation, u, g)
            y = mats["down"][e] @ h + biases["down"][e]
            out[t, s] = y * (1.0 if spec.router_weight_on_input else float(weights[t, s])) * spec.routed_scaling
    return out


def act_truth(activation: Activation, u: torch.Tensor, g: torch.Tensor | None) -> torch.Tensor:
    def f(v: torch.Tensor) -> torch.Tensor:
        if activation.kind == "silu":
            return v / (1 + torch.exp(-v))
        if activation.kind == "gelu":
            return v * 0.5 * (1 + torch.erf(v / math.sqrt(2)))
        if activation.kind == "gelu_tanh":
            return 0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
        return v.clamp(min=0) ** 2

    if g is None:
        return f(u)
    if activation.kind == "swiglu_oai":
        return (u + 1) * g / (1 + torch.exp(-(activation.alpha or 1.702) * g))
    return f(g) * u


def moe_case(e: int, h: int, i: int, schemes: tuple[str | None, str, str], bias: bool):
    mats, tensors = {}, {}
    for seed, (role, scheme, shape) in enumerate(zip(("gate", "up", "down"), schemes, ((i, h), (i, h), (h, i)), strict=True)):
        if scheme is None:
            continue
        made = [make(scheme, *shape, seed=100 * seed + x) for x in range(e)]
        tensors[role] = stack((t for t, _ in made), e)
        mats[role] = [w * 0.1 for _, w in made]
        from dataclasses import replace

        scaled = (tensors[role].scales.float() * 0.1).half()
        tensors[role] = replace(tensors[role], scales=scaled) if tensors[role].mins is None else tensors[role]
        mats[role] = [tensors[role].expert(x).dequantize().double() for x in range(e)]
    biases = {r: torch.randn(e, s).double() if bias else torch.zeros(e, s).double() for r, s in (("gate", i), ("up", i), ("down", h))}
    return mats, tensors, biases


@pytest.mark.parametrize(
    ("activation", "gated"),
    [(Activation("silu"), True), (Activation("silu", limit=0.5), True), (Activation("gelu"), True), (Activation("gelu_tanh"), True),
     (Activation("swiglu_oai", alpha=1.5, limit=0.7), True), (Activation("relu2"), False), (Activation("silu"), False)],
)  # fmt: skip
@pytest.mark.parametrize("on_input", [False, True])
def test_moe_agrees_with_a_float64_loop(activation: Activation, gated: bool, on_input: bool) -> None:
    e, h, i, k, t = 5, 64, 96, 2, 9
    schemes = ("int4:g32:zero" if gated else None, "int4:g32:zero", "int8:g32")
    mats, tensors, biases = moe_case(e, h, i, schemes, bias=True)
    scheme = {r: t.scheme for r, t in tensors.items()}
    spec = MoESpec(
        e, k, h, i, scheme["up"], scheme["down"], scheme.get("gate"), activation, dtype="fp32", bias=True, router_weight_on_input=on_input,
        routed_scaling=1.5,
    )  # fmt: skip
    parts = {f"{r}_bias": b.float() for r, b in biases.items() if r in tensors}
    biases = {r: b.float().double() for r, b in biases.items()}
    op = ReferenceMoE().prepare(spec, MoEWeights(**tensors, **parts))
    x, ids, weights = torch.randn(t, h), torch.randint(0, e - 1, (t, k), dtype=torch.int32), torch.rand(t, k)
    ids[0, 1] = -1
    truth = moe_truth(spec, mats, biases, x, ids, weights, None)
    assert relative(op.apply(x, Routed(ids, weights)), truth.sum(1)) < 1e-5
    assert relative(op.apply(x, Routed(ids, weights), reduce=False), truth) < 1e-5
    everyone = torch.zeros(t, k, dtype=torch.int32)
    assert relative(op.apply(x, Routed(everyone, weights)), moe_truth(spec, mats, biases, x, everyone, weights, None).sum(1)) < 1e-5
    assert op.apply(x[:0], Routed(ids[:0], weights[:0])).shape == (0, h)


def test_moe_expert_map_serves_local_experts_only() -> None:
    e, h, i = 3, 32, 64
    mats, tensors, biases = moe_case(e, h, i, ("int8:g32",) * 3, bias=False)
    scheme = WeightScheme.parse("int8:g32")
    spec = MoESpec(6, 2, h, i, scheme, scheme, scheme, dtype="fp32", local_experts=e, expert_map=True)
    op = ReferenceMoE().prepare(spec, MoEWeights(**tensors))
    mapping = [-1, 2, -1, 0, 1, -1]
    x, ids, weights = torch.randn(8, h), torch.randint(0, 6, (8, 2), dtype=torch.int32), torch.rand(8, 2)
    ids[0] = torch.tensor([1, 3])
    truth = moe_truth(spec, mats, biases, x, ids, weights, mapping).sum(1)
    assert relative(op.apply(x, Routed(ids, weights), expert_map=torch.tensor(mapping, dtype=torch.int32)), truth) < 1e-5


@pytest.mark.parametrize("bad", [5, -2, 1_000_000])
def test_moe_id_out_of_range_is_an_error_with_token_slot_and_id(bad: int) -> None:
    _, tensors, _ = moe_case(5, 32, 32, ("int8:g32",) * 3, bias=False)
    scheme = WeightScheme.parse("int8:g32")
    op = ReferenceMoE().prepare(MoESpec(5, 2, 32, 32, scheme, scheme, scheme, dtype="fp32"), MoEWeights(**tensors))
    ids = torch.zeros(4, 2, dtype=torch.int32)
    ids[2, 1] = bad
    with pytest.raises(ShapeError, match=f"{bad} at token 2, slot 1"):
        op.apply(torch.randn(4, 32), Routed(ids, torch.ones(4, 2)))


def test_moe_nan_row_stays_in_its_row() -> None:
    _, tensors, _ = moe_case(4, 32, 32, ("int8:g32",) * 3, bias=False)
    scheme = WeightScheme.parse("int8:g32")
    op = ReferenceMoE().prepare(MoESpec(4, 2, 32, 32, scheme, scheme, scheme, dtype="fp32"), MoEWeights(**tensors))
    x = torch.randn(6, 32)
    x[3, 4] = float("nan")
    bad = op.apply(x, Routed(torch.randint(0, 4, (6, 2), dtype=torch.int32), torch.ones(6, 2))).isnan().any(1)
    assert bad.tolist() == [False, False, False, True, False, False]


def test_nibbles_round_trip_for_odd_lengths() -> None:
    codes = torch.randint(0, 16, (3, 7), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes), 7), codes)


def test_stack_names_the_expert_that_differs() -> None:
    good, other = make("int8:g32", 4, 32)[0], make("int8:g32", 4, 64)[0]
    with pytest.raises(ShapeError, match="expert 1"):
        stack([good, other], 2)
    with pytest.raises(ShapeError, match="1 given, 2 expected"):
        stack([good], 2)


def test_module_apply_of_torch_still_walks_a_model_that_holds_ops() -> None:
    tensor, _ = make("int8:g32", 4, 32)
    op = ReferenceLinear().prepare(LinearSpec(4, 32, tensor.scheme), LinearWeights(tensor))
    seen: list[str] = []
    torch.nn.Sequential(op).apply(lambda module: seen.append(type(module).__name__))
    assert "ReferenceLinearOp" in seen


def test_a_refused_update_changes_nothing() -> None:
    """Another scale dtype would be rounded, a short bias broadcast, an absent one kept: all are refused before a byte moves."""
    from dataclasses import replace

    weight, other = make("int4:g32:zero", 8, 64, 1)[0], make("int4:g32:zero", 8, 64, 2)[0]
    op = ReferenceLinear().prepare(LinearSpec(8, 64, weight.scheme, dtype="fp32", bias=True), LinearWeights(weight, torch.randn(8)))
    x = torch.randn(3, 64)
    before = op.apply(x)
    wide = replace(other, scales=other.scales.float())
    for wrong in (
        LinearWeights(other), LinearWeights(other, torch.zeros(1)), LinearWeights(other, torch.zeros(8, dtype=torch.int64)),
        LinearWeights(other, torch.zeros(8).bfloat16()), LinearWeights(wide, torch.zeros(8)), None,
    ):  # fmt: skip
        with pytest.raises(ShapeError):
            op.update(wrong)
        assert torch.equal(op.apply(x), before)


def test_routing_of_another_width_or_dtype_is_refused() -> None:
    _, tensors, _ = moe_case(5, 32, 32, ("int8:g32",) * 3, bias=False)
    scheme = WeightScheme.parse("int8:g32")
    op = ReferenceMoE().prepare(MoESpec(5, 2, 32, 32, scheme, scheme, scheme, dtype="fp32"), MoEWeights(**tensors))
    x = torch.randn(4, 32)
    for ids in (torch.zeros(4, 3, dtype=torch.int32), torch.zeros(4, 2), torch.zeros(3, 2, dtype=torch.int32)):
        with pytest.raises(ShapeError):
            op.apply(x, Routed(ids, torch.ones(ids.shape)))
