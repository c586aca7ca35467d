"""e4m3fnuz beside e4m3fn: half the number, one NaN, no negative zero."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; `make test-rocm` brings it")

from hal_backend_rocm.fnuz import FnuzRows

from hal_core.codes import from_fnuz, to_fnuz
from hal_core.schemes import WeightScheme
from hal_core.testing.data import random_weight
from hal_core.triton import launch
from hal_core.triton.rows import RowMatrix

ALL = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_every_code_stands_for_half_the_number():
    values, halves = ALL.float(), to_fnuz(ALL).float()
    assert torch.equal(halves.isnan(), values.isnan())
    numbers = ~values.isnan()
    assert numbers.sum() == 254
    assert torch.equal(2 * halves[numbers], values[numbers])
    assert halves[numbers].abs().max() == 224


def test_zeros_lose_their_sign_and_nothing_else_changes():
    back = from_fnuz(to_fnuz(ALL))
    codes, found = ALL.view(torch.uint8), back.view(torch.uint8)
    changed = codes != found
    assert codes[changed].tolist() == [0x80, 0xFF]
    assert found[changed].tolist() == [0x00, 0x7F]


def test_what_torch_says_of_the_type():
    assert torch.finfo(torch.float8_e4m3fnuz).max == 240
    assert torch.tensor([0x80], dtype=torch.uint8).view(torch.float8_e4m3fnuz).float().isnan().all()
    assert not torch.signbit(to_fnuz(torch.tensor([-0.0]).to(torch.float8_e4m3fn)).float()).any()


@pytest.mark.parametrize("scheme", ["fp8_e4m3:channel", "fp8_e4m3:tensor", "fp8_e4m3:b128x128"])
@pytest.mark.parametrize("scales", ["fp32", "bf16"])
def test_packed_rows_hold_the_same_numbers(scheme, scales):
    generator = torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())
    weight = random_weight(WeightScheme.parse(scheme), (3, 130, 200), generator, scales)
    plain, made = RowMatrix(weight), FnuzRows(weight)
    assert made.get_buffer("weight").dtype == torch.float8_e4m3fnuz
    assert torch.equal(made.get_buffer("weight").float() * 2, plain.get_buffer("weight").float())
    assert torch.equal(made.get_buffer("scales"), plain.get_buffer("scales") * 2)


def test_a_packed_weight_is_updated_in_place():
    generator = torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())
    scheme = WeightScheme.parse("fp8_e4m3:channel")
    made = FnuzRows(random_weight(scheme, (40, 64), generator))
    place, other = made.get_buffer("weight").data_ptr(), random_weight(scheme, (40, 64), generator)
    made.update(other)
    assert made.get_buffer("weight").data_ptr() == place
    assert torch.equal(made.get_buffer("weight").view(torch.uint8), FnuzRows(other).get_buffer("weight").view(torch.uint8))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter, TRITON_INTERPRET=1; or a GPU")
@pytest.mark.parametrize("group", [None, 128])
def test_activations_become_the_codes_of_e4m3fn(group):
    import triton_interpreter

    triton_interpreter.repair()
    x = (torch.randn(5, 300) * torch.tensor([1e-3, 1.0, 60.0, 1e4, 0.0])[:, None]).to(torch.bfloat16)
    x[1, 7] = 2000.0
    codes, scales = launch.quantize_fp8(x, group)
    fnuz, doubled = launch.quantize_fp8(x, group, torch.float8_e4m3fnuz)
    live = [0, 1, 2, 3]
    assert torch.equal(fnuz[live].float() * 2, codes[live].float())
    torch.testing.assert_close(doubled[live], scales[live] * 2, rtol=2e-7, atol=0)
    assert not fnuz.float().isnan().any()
    assert fnuz.float().abs().max() <= 224
