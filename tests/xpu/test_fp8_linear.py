"""Linears with weights of narrow floats, and W8A8, on the SYCL device of the host: every code, odd sizes, ragged blocks, updates."""

from __future__ import annotations

import pytest
import torch
from hal_backend_xpu.fp8_linear import Int8Linear, NarrowLinear
from hal_backend_xpu.session import session

from hal_core.codebooks import codebook
from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError
from hal_core.kernel import LinearWeights
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.reference.inputs import InputQuantizer
from hal_core.schemes import ActivationScheme, Granularity, WeightScheme
from hal_core.spec import LinearSpec
from hal_core.testing import truth
from hal_core.testing.data import random_input, random_weight

pytestmark = pytest.mark.usefixtures("sycl_device")
CPU = torch.device("cpu")
INT8 = Numerics((ActivationQuant("int8", "token"),))


def rng():
    return torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())


def distance(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


def decoded(codes: torch.Tensor, bits: int) -> torch.Tensor:
    here, out = session(CPU), torch.full((codes.numel(),), 77.0)
    here.launch(here.kernel("codes.hpp", "decoded"), (1, 1, codes.numel() // 16), (1, 1, 16), (codes, codes.numel(), bits, out))
    here.finish()
    return out


def test_every_code_of_e4m3_is_what_torch_makes_of_it():
    codes = torch.arange(256, dtype=torch.uint8)
    found, wanted = decoded(codes, 8), codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.view(torch.int32)[~found.isnan()], wanted.view(torch.int32)[~found.isnan()])


def test_every_code_of_e2m1_is_that_of_the_standard():
    assert torch.equal(decoded(torch.arange(16, dtype=torch.uint8), 4), codebook("mxfp4", CPU).float())


def problem(text, n, k, generator, dtype="bf16", **more):
    spec = LinearSpec(n, k, WeightScheme.parse(text), dtype=dtype, bias=True, **more)
    weight = random_weight(spec.weights, (n, k), generator)
    return spec, LinearWeights(weight, torch.randn(n, generator=generator).to(torch_dtype(dtype)))


SCHEMES = ("fp8_e4m3:channel", "fp8_e4m3:tensor", "fp8_e4m3:b128x128", "fp8_e4m3:g32", "mxfp8:g32", "mxfp4:g32", "nvfp4:g16")


@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_narrow_floats(scheme, rows):
    generator = rng()
    spec, weights = problem(scheme, 80, 352, generator)  # a block of 80 of 128 rows, and one of 96 of 128 columns
    x = random_input((rows, 352), generator, "bf16", outliers=True)
    op = NarrowLinear(spec, weights, CPU)
    out = torch.full((rows, 80), float("nan"), dtype=torch.bfloat16)
    assert op.apply(x, out=out) is out
    # weights are rounded to bf16 with their scale, where a column has several that are no powers of two
    exact = scheme.startswith("mx") or scheme.endswith(("channel", "tensor"))
    assert distance(out, truth.linear(weights, x)) < (4e-3 if exact else 6e-3)
    _, other = problem(scheme, 80, 352, generator)
    places = [buffer.data_ptr() for buffer in op.buffers()]
    op.update(other)
    assert places == [buffer.data_ptr() for buffer in op.buffers()]
    assert torch.equal(op.apply(x), NarrowLinear(spec, other, CPU).apply(x))


@pytest.mark.parametrize("rows", [1, 13])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
def test_int8_rows_are_quantized_as_the_reference_quantizes_them(rows, out_dtype):
    generator = rng()
    spec, weights = problem("int8:channel", 48, 192, generator, numerics=INT8, out_dtype=out_dtype)
    x = random_input((rows, 192), generator, "bf16", outliers=True)
    rounded = InputQuantizer(ActivationScheme("int8", Granularity.token()))(x.float())
    found = Int8Linear(spec, weights, CPU).apply(x)
    # a number in the middle of two codes may take either, so the bound is not that of the float product alone
    assert distance(found, truth.linear(weights, rounded)) < (4e-3 if out_dtype == "bf16" else 2e-3)


def test_a_nan_stays_in_its_row_and_a_nan_weight_in_its_column():
    spec, weights = problem("fp8_e4m3:channel", 32, 64, rng())
    weights.weight.values.view(torch.uint8)[5, 3] = 0x7F
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[1, 7] = float("nan")
    found = NarrowLinear(spec, weights, CPU).apply(x).isnan()
    assert [bool(row.all()) for row in found] == [False, True, False]
    assert found[0].nonzero().flatten().tolist() == [5]


def test_wrong_inputs_are_named():
    spec, weights = problem("fp8_e4m3:channel", 32, 64, rng())
    op = NarrowLinear(spec, weights, CPU)
    with pytest.raises(ShapeError, match=r"give torch\.bfloat16"):
        op.apply(torch.zeros(2, 64))
    with pytest.raises(ShapeError, match="output"):
        op.apply(torch.zeros(2, 64, dtype=torch.bfloat16), out=torch.zeros(2, 31, dtype=torch.bfloat16))
    assert op.apply(torch.zeros(2, 0, 64, dtype=torch.bfloat16)).shape == (2, 0, 32)
