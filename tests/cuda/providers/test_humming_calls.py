"""What is handed to Humming, against its own code: configurations, tables of tiles, and the check of tensors. Nothing is launched."""

from __future__ import annotations

import pytest
import torch
from hal_backend_cuda.providers.humming.layout import humming_tensors, stacked_rows
from hal_backend_cuda.providers.humming.recipes import RECIPES
from hal_backend_cuda.providers.humming.runtime import Problem
from hal_backend_cuda.providers.humming.tables import joined
from humming_device import pretend

from hal_core.schemes import WeightScheme
from hal_core.testing.data import random_weight

BY_NAME = {recipe.name: recipe for recipe in RECIPES}
CASES = [
    ("w4a16", "int4:g128"), ("w4a16", "int4:g32:zero"), ("w4a16", "int4:channel"), ("w8a16", "int8:g128"), ("w8a16", "int8:channel"),
    ("w4a8_int8", "int4:g128"), ("w4a8_fp8", "int4:g128"), ("w8a8", "int8:channel"), ("fp8_block", "fp8_e4m3:b128x128"),
    ("fp8_channel", "fp8_e4m3:channel"), ("fp8_a16", "fp8_e4m3:b128x128"), ("fp8_a16", "fp8_e4m3:channel"), ("mxfp4", "mxfp4:g32"),
    ("nvfp4", "nvfp4:g16"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def device(monkeypatch):
    pretend(monkeypatch)


def problem(name, text, n, k, experts=0, dtype="bf16", bias=False):
    return Problem(BY_NAME[name], WeightScheme.parse(text), n, k, dtype, bias, experts)


def legal(p, table):
    """Whole tiles, and an interval for every number of rows."""
    assert table[0][0] == 0
    assert table[-1][1] >= 1 << 30
    for (_, high, tile), after in zip(table, [*table[1:], None], strict=True):
        assert after is None or after[0] == high
        assert p.n % tile["block_shape"][1] == 0, (high, tile)
        assert p.k % tile["block_shape"][2] == 0, (high, tile)


@pytest.mark.parametrize(("name", "text"), [CASES[i] for i in (0, 2, 4, 5, 6, 8, 12, 13)])
def test_dense_tables_fit_odd_multiples_of_the_declared_step(name, text):
    p = problem(name, text, 2944, 1152)
    legal(p, p.table(p.configuration(0), 0))


def test_one_step_is_enough():
    p = problem("w4a16", "int4:g128", 128, 128)
    legal(p, p.table(p.configuration(0), 0))


@pytest.mark.parametrize(("name", "text"), [CASES[0], CASES[5], CASES[8]])
def test_tables_of_experts_join(name, text):
    hidden, intermediate = 896, 384
    first = problem(name, text, 2 * intermediate, hidden, experts=16)
    second = problem(name, text, hidden, intermediate, experts=16)
    left, right = joined(*(p.table(p.configuration(0), 0) for p in (first, second)))
    legal(first, left)
    legal(second, right)
    assert [tile["block_shape"][0] for *_, tile in left] == [tile["block_shape"][0] for *_, tile in right]


@pytest.mark.parametrize(("name", "text"), CASES)
@pytest.mark.parametrize("experts", [0, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_humming_takes_the_tensors(name, text, experts, bias):
    from humming.transform import check_and_pad_tensors

    for dtype in BY_NAME[name].dtypes:
        p = problem(name, text, 256, 384, experts, dtype, bias)
        shape = (experts, 256, 384) if experts else (256, 384)
        weight = random_weight(p.scheme, shape, torch.Generator().manual_seed(3), dtype)
        tensors = humming_tensors(weight, dtype)
        if bias:
            tensors["bias"] = torch.zeros(shape[:-1], dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
        kept = check_and_pad_tensors(p.configuration(0), dict(tensors))
        for tensor_name, tensor in tensors.items():
            assert kept[tensor_name].shape == tensor.shape, "nothing is padded, so nothing is copied"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_humming_takes_global_scales_of_each_row(dtype):
    from humming.transform import check_and_pad_tensors

    p = Problem(BY_NAME["nvfp4"], WeightScheme.parse("nvfp4:g16"), 256, 384, dtype, False, 3, stacked=True)
    halves = [random_weight(p.scheme, (3, 128, 384), torch.Generator().manual_seed(seed), dtype) for seed in (1, 2)]
    tensors = stacked_rows([humming_tensors(half, dtype) for half in halves], dtype)
    kept = check_and_pad_tensors(p.configuration(0), dict(tensors))
    assert kept["weight_scale_2"].shape == (3, 256)
    assert kept["weight_scale_2"].dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    legal(p, p.table(p.configuration(0), 0))
