"""``hal.check``: what a device wrote becomes an error, once."""

from __future__ import annotations

import pytest
import torch

import hal_core as hal
from hal_core.check import device_flag

CPU = torch.device("cpu")


def test_nothing_found_is_no_error():
    device_flag(CPU).zero_()
    hal.check()
    hal.check("cpu")


@pytest.mark.parametrize(("index", "expert", "top_k"), [(0, 9, 1), (17, -5, 8), (2**31 - 2, 2**31 - 1, 8), (559_999, -(2**31), 8)])
def test_a_report_names_token_slot_and_id_and_is_forgotten(index, expert, top_k):
    flag = device_flag(CPU)
    flag.copy_(torch.tensor([((index + 1) << 32) | (expert & 0xFFFFFFFF), top_k]))
    with pytest.raises(hal.ShapeError, match=f"^topk id: {expert} at token {index // top_k}, slot {index % top_k} on cpu"):
        hal.check()
    hal.check()


def test_another_device_is_not_looked_at():
    flag = device_flag(CPU)
    flag.copy_(torch.tensor([1 << 32, 1]))
    hal.check("cuda")
    with pytest.raises(hal.ShapeError):
        hal.check("cpu")


def test_the_word_stays_where_it_is():
    assert device_flag(CPU).data_ptr() == device_flag(torch.device("cpu")).data_ptr()
