"""Codes of float elements."""

from __future__ import annotations

import pytest
import torch

from hal_core.codes import count_fp8_nans


@pytest.mark.parametrize(("dtype", "least"), [(torch.float8_e4m3fn, 0x7F), (torch.float8_e5m2, 0x7C)])
@pytest.mark.parametrize("shape", [(0,), (3, 5), (1000, 700), (262145,), (1 << 18,)])
def test_values_that_are_no_numbers_are_counted(dtype, least, shape):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert count_fp8_nans(codes.view(dtype)) == int(((codes & 0x7F) >= least).sum())


def test_a_single_one_at_the_end_of_many_is_found():
    codes = torch.zeros(600_001, dtype=torch.uint8)
    codes[-1] = 0xFF
    assert count_fp8_nans(codes.view(torch.float8_e4m3fn)) == 1


def test_counting_takes_no_memory_to_speak_of():
    """A checkpoint is loaded within a bound; a mask that is summed takes eight bytes an element."""
    codes = torch.zeros(20_000_000, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        assert count_fp8_nans(codes) == 0
    most = max((event.cpu_memory_usage for event in profile.function_events), default=0)
    assert most < 2_000_000
