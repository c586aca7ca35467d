"""Orders of rows, columns and scales: bijections, and the same bytes as FlashInfer's own functions where those need no GPU."""

from __future__ import annotations

import pytest
import torch
from hal_backend_cuda.providers.flashinfer.moe_layouts import (
    blocked,
    deinterleaved,
    first_rows,
    gated_order,
    interleaved,
    inverse,
    padded_halves,
    padded_to,
    shuffle_order,
    unblocked,
    up,
)


def bytes_of(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.fixture(scope="module")
def core():
    pytest.importorskip("flashinfer", reason="needs flashinfer-python")
    import flashinfer.fused_moe.core

    return flashinfer.fused_moe.core


@pytest.mark.parametrize("rows", [32, 128, 416, 1536])
@pytest.mark.parametrize("tile", [64, 128, 256])
def test_shuffled_rows_equal_flashinfers(core, rows, tile):
    import flashinfer

    matrix = bytes_of(rows, 48)
    assert torch.equal(matrix[shuffle_order(rows, tile)], flashinfer.shuffle_matrix_a(matrix, tile))


@pytest.mark.parametrize("rows", [32, 416, 1536])
def test_halves_in_turn_equal_flashinfers(core, rows):
    matrix = bytes_of(rows, 48)
    assert torch.equal(matrix[gated_order(rows)], core.reorder_rows_for_gated_act_gemm(matrix))


@pytest.mark.parametrize("rows", [128, 1536])
@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_the_first_product_equal_flashinfers(core, rows, gated):
    matrix = bytes_of(rows, 48)
    order = core._maybe_get_cached_w3_w1_permute_indices({}, matrix, 128, is_gated_act_gemm=gated)
    assert torch.equal(first_rows(rows, 128, gated=gated), order)
    scales = core._maybe_get_cached_w3_w1_permute_indices({}, matrix, 128, num_elts_per_sf=16, is_gated_act_gemm=gated)
    assert torch.equal(first_rows(rows, 128, gated=gated), scales), "weights and scales go together"
    assert torch.equal(shuffle_order(rows, 128), core.get_w2_permute_indices_with_cache({}, matrix, 128))


@pytest.mark.parametrize(("m", "k", "columns"), [(32, 128, 64), (96, 640, 128), (7, 12, 4)])
def test_blocks_of_columns_equal_flashinfers(core, m, k, columns):
    matrix = bytes_of(m, k)
    assert torch.equal(blocked(matrix, columns), core.convert_to_block_layout(matrix, columns))


@pytest.mark.parametrize("order", [shuffle_order(96, 128), shuffle_order(48, 64), gated_order(30), first_rows(160, 128, gated=True)])
def test_orders_are_permutations(order):
    matrix = bytes_of(len(order), 5)
    assert torch.equal(order.sort().values, torch.arange(len(order)))
    assert torch.equal(matrix[order][inverse(order)], matrix)


def test_blocks_come_back():
    matrix = bytes_of(3, 24, 60)
    assert torch.equal(unblocked(blocked(matrix, 12)), matrix)


@pytest.mark.parametrize(("n", "g"), [(128, 4), (256, 12), (100, 3), (130, 9)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16])
def test_interleaved_scales_come_back(n, g, dtype):
    scales = bytes_of(2, n, g * (2 if dtype == torch.bfloat16 else 1)).view(dtype)
    found = interleaved(scales)
    assert tuple(found.shape) == (2, up(n, 128), up(g, 4))
    assert torch.equal(deinterleaved(found, n, g).view(torch.uint8), scales.view(torch.uint8))


def test_the_place_of_a_scale():
    """By the formula alone: tiles of 512, rows of 32 together."""
    n, g = 256, 8
    scales = torch.arange(n * g, dtype=torch.int32).view(n, g).to(torch.int16).view(torch.bfloat16)
    flat = interleaved(scales).reshape(-1).view(torch.int16)
    for r in (0, 1, 31, 32, 127, 128, 200, 255):
        for c in (0, 3, 4, 7):
            place = (r // 128 * (g // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            assert flat[place] == r * g + c


@pytest.mark.parametrize(
    ("dtype", "value", "byte"), [(torch.uint8, 127, 127), (torch.float8_e4m3fn, 1.0, 0x38), (torch.float8_e4m3fn, 0, 0)]
)
def test_padding_has_its_value_in_every_type(dtype, value, byte):
    tensor = bytes_of(2, 3, 5).view(dtype)
    found = padded_to(tensor, 4, 8, value).view(torch.uint8)
    assert torch.equal(found[:, :3, :5], tensor.view(torch.uint8))
    assert (found[:, 3:] == byte).all()
    assert (found[:, :, 5:] == byte).all()


def test_halves_are_padded_apart():
    one, two = torch.ones(1, 3, 4), torch.full((1, 3, 4), 2.0)
    found = padded_halves([one, two], 4, 4, 0)[0, :, 0]
    assert found.tolist() == [1, 1, 1, 0, 2, 2, 2, 0]


@pytest.mark.parametrize("call", [lambda: shuffle_order(40, 128), lambda: gated_order(3), lambda: blocked(torch.zeros(2, 5), 2)])
def test_sizes_that_do_not_divide_are_refused(call):
    with pytest.raises(ValueError, match="not a multiple|no halves"):
        call()
