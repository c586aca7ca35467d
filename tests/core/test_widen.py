"""Widening a scheme changes no value."""

from __future__ import annotations

import itertools

import pytest
import torch

from hal_core.canonical import QuantizedTensor, pack_nibbles
from hal_core.errors import ShapeError
from hal_core.schemes import WeightScheme, ZeroKind
from hal_core.widen import common_scheme, widen


def make(text: str, n: int, k: int) -> QuantizedTensor:
    scheme = WeightScheme.parse(text)
    low = -(2 ** (scheme.bits - 1)) if scheme.zero is ZeroKind.NONE else 0
    codes = torch.randint(low, low + 2**scheme.bits, (n, k))
    values = pack_nibbles(codes) if scheme.bits == 4 else codes.to(torch.int8 if low else torch.uint8)
    grid = (n, -(-k // (scheme.granularity.group or k)))
    zeros = torch.randint(0, 2**scheme.bits, grid, dtype=torch.uint8) if scheme.zero is ZeroKind.INTEGER else None
    mins = torch.randn(grid).half() if scheme.zero is ZeroKind.MINIMUM else None
    return QuantizedTensor(scheme, (n, k), values, torch.randn(grid).half(), zeros, mins)


SCHEMES = ["int2:g32", "int3:g32:zero", "int4:g32", "int4:g64:zero", "int4:channel", "int8:g32", "int8:channel:zero", "int8:g96"]


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(SCHEMES, 2)))
def test_both_of_a_pair_keep_their_values(a: str, b: str) -> None:
    for k in (96, 80):
        first, second = make(a, 5, k), make(b, 5, k)
        scheme = common_scheme((first.scheme, second.scheme), k)
        assert scheme is not None
        for tensor in (first, second):
            assert torch.equal(widen(tensor, scheme).dequantize(), tensor.dequantize())


def test_minimum_joins_its_own_kind_only() -> None:
    tensor, scheme = make("int4:g32:min", 5, 64), WeightScheme.parse("int8:g32:min")
    assert torch.equal(widen(tensor, scheme).dequantize(), tensor.dequantize())
    assert common_scheme((tensor.scheme, WeightScheme.parse("int4:g32")), 64) is None
    with pytest.raises(ShapeError, match="exactly"):
        widen(tensor, WeightScheme.parse("int4:g32"))


@pytest.mark.parametrize("other", ["bf16", "fp8_e4m3:channel", "int4:g32:act_order", "int4:tensor"])
def test_what_no_integer_scheme_holds_has_no_common_scheme(other: str) -> None:
    assert common_scheme((WeightScheme.parse("int4:g32"), WeightScheme.parse(other)), 64) is None
