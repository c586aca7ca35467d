"""The reference with quantized inputs, against a small implementation that goes number by number."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import checkpoints
import float_checkpoints as floats
import pytest
import torch
from core.fakes import MACHINE

import hal_core as hal
from hal_core.canonical import stack
from hal_core.errors import NoKernelError, ShapeError
from hal_core.formats import open_checkpoint
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.numerics import ActivationQuant, Numerics, numerics_from_word
from hal_core.ops import Routed
from hal_core.plan import plan_checkpoint
from hal_core.reference.inputs import InputQuantizer
from hal_core.reference.linear import ReferenceLinear
from hal_core.reference.moe import ReferenceMoE
from hal_core.schemes import ActivationScheme, Granularity, WeightScheme
from hal_core.spec import LinearSpec, MoESpec

T, C, G = Granularity.tensor(), Granularity.token(), Granularity.groups
E2M1 = [s * v for v in floats.E2M1 for s in (1, -1)]
FP8 = sorted({floats._byte_value(byte, torch.float8_e4m3fn) for byte in range(256) if byte & 0x7F != 0x7F})
SCHEMES = [
    ActivationScheme("int8", C),
    ActivationScheme("int8", C, symmetric=False),
    ActivationScheme("int8", T),
    ActivationScheme("int8", G(48)),
    ActivationScheme("int8", T, dynamic=False),
    ActivationScheme("int8", T, dynamic=False, symmetric=False),
    ActivationScheme("fp8_e4m3", C),
    ActivationScheme("fp8_e4m3", T),
    ActivationScheme("fp8_e4m3", G(128)),
    ActivationScheme("fp8_e4m3", T, dynamic=False),
    ActivationScheme("mxfp8", G(32)),
    ActivationScheme("mxfp4", G(32)),
    ActivationScheme("nvfp4", G(16)),
]


def single(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).float())


def nearest(value: float, table: list[float]) -> float:
    """Ties go to the value whose code is even: of two neighbours that are equally far, the one with the rounder mantissa."""
    best = min(abs(value - entry) for entry in table)
    near = sorted({entry for entry in table if abs(value - entry) == best}, key=abs)
    return near[0] if len(near) == 1 else min(near, key=lambda entry: table_code(entry) % 2)


def table_code(value: float) -> int:
    if abs(value) in floats.E2M1 and value * 2 == int(value * 2) and abs(value) <= 6:
        return floats.E2M1.index(abs(value))
    return int(torch.tensor(abs(value)).to(torch.float8_e4m3fn).view(torch.uint8))


def half_even(value: float) -> int:
    return round(value)


def one_block(row: list[float], scheme: ActivationScheme, scale: float | None, zero: int, whole: float) -> list[float]:
    """The values that the codes of numbers with one scale stand for."""
    top = max(map(abs, row))
    if scheme.dtype == "int8":
        if scheme.dynamic and not scheme.symmetric:
            low, high = min(0.0, *row), max(0.0, *row)
            scale = single(single(high - low) / 255) or 1.0
            zero = max(-128, min(127, half_even(single(-128 - single(low / scale)))))
        elif scheme.dynamic:
            scale = single(top / 127) or 1.0
        return [single((max(-128, min(127, half_even(single(x / scale)) + zero)) - zero) * scale) for x in row]
    if scheme.dtype.startswith("mx"):
        exponent = math.floor(math.log2(top)) - (8 if scheme.dtype == "mxfp8" else 2) if top else 0
        scale = math.ldexp(1.0, exponent)
    elif scheme.dtype == "nvfp4":
        block = nearest(single(min(448.0, top / 6 / whole)), FP8)
        scale = single(block * whole) or 1.0
    elif scheme.dynamic:
        scale = single(top / 448) or 1.0
    table, limit = (E2M1, 6.0) if scheme.dtype in ("mxfp4", "nvfp4") else (FP8, 448.0)
    return [single(nearest(max(-limit, min(limit, single(x / scale))), table) * scale) for x in row]


def slow_inputs(x: torch.Tensor, scheme: ActivationScheme, scale: float | None, zero: int = 0) -> torch.Tensor:
    size = scheme.granularity.group or x.shape[1]
    rows = x.tolist()
    whole = scale if scale is not None else single(max(abs(v) for row in rows for v in row) / (448 * 6))
    if scheme.granularity == T:
        flat = one_block(list(itertools.chain(*rows)), scheme, scale, zero, whole)
        return torch.tensor(flat).view(x.shape)
    parts = [[one_block(row[i : i + size], scheme, scale, zero, whole) for i in range(0, len(row), size)] for row in rows]
    return torch.tensor([list(itertools.chain(*part)) for part in parts])


def inputs(m: int, k: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed)) * 3
    x[:, ::17] *= 20
    x[0] = 0
    return x


def with_inputs(weight, scheme: ActivationScheme):
    if scheme.dynamic:
        return weight
    zero = None if scheme.symmetric else torch.tensor(-9, dtype=torch.int8)
    return replace(weight, input_scale=torch.tensor(0.37, dtype=torch.bfloat16), input_zero=zero)


def request(scheme: ActivationScheme) -> Numerics:
    return numerics_from_word("checkpoint", scheme)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("k", [64, 200])
def test_a_linear_computes_with_the_inputs_that_the_checkpoint_says(scheme, k):
    weight = with_inputs(floats.random_element_weight(WeightScheme.parse("int8:channel"), 24, k, 1, torch.float32), scheme)
    spec = LinearSpec(24, k, weight.scheme, scheme, request(scheme), "fp32")
    op = hal.prepare(spec, LinearWeights(weight), policy="require:reference")
    assert [str(a) for a in op.selection.numerics.activations] == [str(scheme)]
    x = inputs(5, k)
    scale = None if weight.input_scale is None else float(weight.input_scale)
    expected = slow_inputs(x, scheme, scale, 0 if weight.input_zero is None else -9) @ weight.dequantize().T
    assert float((op.apply(x) - expected).norm() / expected.norm()) < 1e-6
    exact = hal.prepare(replace(spec, numerics=Numerics()), LinearWeights(weight), policy="require:reference")
    assert exact.selection.numerics.exact
    assert torch.allclose(exact.apply(x), x @ weight.dequantize().T, rtol=1e-5, atol=1e-3)
    assert not torch.allclose(exact.apply(x), expected, rtol=1e-5, atol=1e-3)


def test_nvfp4_inputs_with_their_static_global_scale():
    scheme = ActivationScheme("nvfp4", G(16))
    weight = floats.random_element_weight(WeightScheme.parse("nvfp4:g16"), 24, 72, 1, torch.float8_e4m3fn)
    weight = replace(weight, input_scale=torch.tensor(0.01, dtype=torch.float64))
    op = hal.prepare(LinearSpec(24, 72, weight.scheme, scheme, request(scheme), "fp32"), LinearWeights(weight), policy="require:reference")
    x = inputs(4, 72)
    expected = slow_inputs(x, scheme, 0.01) @ weight.dequantize().T
    assert float((op.apply(x) - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[5], SCHEMES[8]], ids=str)
def test_experts_quantize_what_enters_each_matrix(scheme):
    e, h, i = 3, 72, 40
    matrices = {}
    for seed, (name, n, k) in enumerate((("gate", i, h), ("up", i, h), ("down", h, i))):
        experts = [floats.random_element_weight(WeightScheme.parse("int8:channel"), n, k, seed * 9 + j, torch.float32) for j in range(e)]
        experts = [with_inputs(expert, scheme) for expert in experts]
        if not scheme.dynamic:  # every expert has its own
            experts = [replace(x, input_scale=torch.tensor(0.1 * (j + 1) * (50 if name == "down" else 1))) for j, x in enumerate(experts)]
        matrices[name] = stack(experts, e)
    s = WeightScheme.parse("int8:channel")
    spec = MoESpec(e, 1, h, i, s, s, s, activations=scheme, numerics=request(scheme), dtype="fp32")
    op = hal.prepare(spec, MoEWeights(**matrices), policy="require:reference")
    x = inputs(6, h)
    ids = torch.tensor([[0], [1], [2], [0], [2], [1]], dtype=torch.int32)
    got = op.apply(x, Routed(ids, torch.ones(6, 1)))
    expected = torch.empty(6, h)
    for j in range(e):
        rows = [t for t in range(6) if int(ids[t]) == j]

        def through(name, rows, j=j):
            weight = matrices[name].expert(j)
            zero = 0 if weight.input_zero is None else int(weight.input_zero)
            scale = None if weight.input_scale is None else float(weight.input_scale)
            return slow_inputs(rows, scheme, scale, zero) @ weight.dequantize().T

        inner = torch.nn.functional.silu(through("gate", x[rows])) * through("up", x[rows])
        expected[rows] = through("down", inner)
    assert float((got - expected).norm() / expected.norm()) < 1e-4


def test_a_request_for_other_numerics_is_never_met_with_the_checkpoints():
    scheme = ActivationScheme("int8", T, dynamic=False)
    weight = with_inputs(floats.random_element_weight(WeightScheme.parse("int8:channel"), 24, 64, 1, torch.float32), scheme)
    for word in ("exact", "int8", "fp8"):
        spec = LinearSpec(24, 64, weight.scheme, scheme, numerics_from_word(word, scheme), "fp32")
        assert hal.prepare(spec, LinearWeights(weight), policy="require:reference").selection.numerics.exact
    assert ActivationQuant.of(scheme) != ActivationQuant("int8", "tensor")
    assert str(ActivationQuant.of(replace(scheme, symmetric=False))) == "int8:tensor:static:asym"


def test_a_static_scheme_without_its_scale_is_refused():
    scheme = ActivationScheme("int8", T, dynamic=False, symmetric=False)
    weight = floats.random_element_weight(WeightScheme.parse("int8:channel"), 24, 64, 1, torch.float32)
    spec = LinearSpec(24, 64, weight.scheme, scheme, request(scheme), "fp32")
    with pytest.raises(ShapeError, match="no input_scale"):
        hal.prepare(spec, LinearWeights(weight), policy="require:reference")
    with pytest.raises(ShapeError, match="no input_zero"):
        hal.prepare(spec, LinearWeights(replace(weight, input_scale=torch.tensor(1.0))), policy="require:reference")


def test_an_update_brings_its_own_static_scale():
    scheme = ActivationScheme("int8", T, dynamic=False)
    first = with_inputs(floats.random_element_weight(WeightScheme.parse("int8:channel"), 24, 64, 1, torch.float32), scheme)
    second = replace(first, input_scale=torch.tensor(2.0, dtype=torch.bfloat16))
    spec = LinearSpec(24, 64, first.scheme, scheme, request(scheme), "fp32")
    op = hal.prepare(spec, LinearWeights(first), policy="require:reference")
    op.update(LinearWeights(second))
    assert torch.equal(op.apply(inputs(3, 64)), hal.prepare(spec, LinearWeights(second), policy="require:reference").apply(inputs(3, 64)))


@pytest.mark.parametrize("kind", list(floats.KINDS))
def test_plans_of_checkpoints_ask_for_what_their_config_says(kind, tmp_path):
    tensors, config, _ = floats.make(kind)
    checkpoint = open_checkpoint(checkpoints.write(tmp_path, tensors, config))
    for planned in plan_checkpoint(checkpoint, "fp32", "checkpoint"):
        entry = checkpoint.entries[planned.names("weight")[0]]
        assert planned.spec.activations == entry.activations
        wanted = () if entry.activations is None else (ActivationQuant.of(entry.activations),)
        assert planned.spec.numerics.activations == wanted
        op = hal.prepare(planned.spec, LinearWeights(checkpoint.read(entry.name)), policy="require:reference")
        assert op.selection.numerics.activations == wanted
        assert torch.isfinite(op.apply(inputs(3, planned.spec.k))).all()


def test_no_inputs_at_all_have_no_scale():
    scheme = ActivationScheme("fp8_e4m3", T)
    weight = floats.random_element_weight(WeightScheme.parse("fp8_e4m3:channel"), 24, 64, 1, torch.float32)
    op = hal.prepare(LinearSpec(24, 64, weight.scheme, scheme, request(scheme), "fp32"), LinearWeights(weight), policy="require:reference")
    assert op.apply(torch.zeros(0, 64)).shape == (0, 24)
    assert torch.equal(op.apply(torch.zeros(2, 64)), torch.zeros(2, 24))


UNSERVED = [
    ActivationScheme("int4", C),
    ActivationScheme("int8", Granularity.blocks(128, 128)),
    ActivationScheme("int8", Granularity.superblocks(16, 64)),
    ActivationScheme("fp8_e4m3", C, symmetric=False),
    ActivationScheme("int8", C, dynamic=False),
    ActivationScheme("mxfp4", G(32), dynamic=False),
]


@pytest.mark.parametrize("scheme", UNSERVED, ids=str)
def test_inputs_that_cannot_be_quantized_as_asked_are_refused_and_never_computed_otherwise(scheme):
    weight = floats.random_element_weight(WeightScheme.parse("int8:channel"), 24, 64, 1, torch.float32)
    spec = LinearSpec(24, 64, weight.scheme, scheme, request(scheme), "fp32")
    moe = MoESpec(3, 1, 64, 40, weight.scheme, weight.scheme, weight.scheme, activations=scheme, numerics=request(scheme), dtype="fp32")
    for kernel, asked in ((ReferenceLinear(), spec), (ReferenceMoE(), moe)):
        (refusal,) = kernel.refusals(asked, MACHINE)
        assert refusal.code == "numerics.activations"
        assert str(scheme) in refusal.asked
        assert "no rule" in refusal.found
        assert "--numerics exact" in refusal.fix
        assert not kernel.refusals(replace(asked, numerics=Numerics()), MACHINE)
    with pytest.raises(NoKernelError, match=r"numerics\.activations"):
        hal.prepare(spec, LinearWeights(weight), policy="require:reference")
    with pytest.raises(ShapeError, match="no rule"):
        ReferenceLinear().prepare(spec, LinearWeights(weight))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.dynamic] + [ActivationScheme("int8", T, symmetric=False)], ids=str)
def test_numbers_that_are_not_finite_spoil_their_own_row_only(scheme, bad):
    x = inputs(4, 96)
    damaged = x.clone()
    damaged[2, 5] = bad
    x[2, 5] = 0
    got, expected = InputQuantizer(scheme)(damaged), InputQuantizer(scheme)(x)
    others = torch.tensor([0, 1, 3])
    assert torch.equal(got[others], expected[others])
    assert got[others].any()
    assert torch.equal(got[2, 5], damaged[2, 5]) or (got[2, 5].isnan() and damaged[2, 5].isnan())
