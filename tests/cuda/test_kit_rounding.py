"""The kit's own e4m3, with which it judges kernels that quantize activations, is torch's."""

from __future__ import annotations

import torch
from hal_backend_cuda.kernels import KERNELS

from hal_core.numerics import numerics_from_word
from hal_core.schemes import WeightScheme
from hal_core.spec import LinearSpec
from hal_core.testing.rounding import rounding_of


def quantized(x, span):
    parts = []
    for part in torch.split(x, span, dim=-1):
        size = part.abs().amax(-1, keepdim=True) / 448
        size = torch.where(size > 0, size, 1.0)
        parts.append((part / size).float().clamp(-448, 448).to(torch.float8_e4m3fn).double() * size)
    return torch.cat(parts, dim=-1)


def rounding(name, scheme):
    kernel = next(k for k in KERNELS if k.name == name)
    return rounding_of(kernel, LinearSpec(64, 300, WeightScheme.parse(scheme), numerics=numerics_from_word("fp8")))


def test_tokens_and_groups_are_rounded_as_torch_rounds_them():
    x = torch.randn(200, 300, dtype=torch.float64) * torch.exp(3 * torch.randn(200, 1, dtype=torch.float64))
    x[0] = 0
    for name, scheme, span in (("linear_fp8_rows_triton", "fp8_e4m3:channel", 300), ("linear_fp8_triton", "fp8_e4m3:b128x128", 128)):
        made = rounding(name, scheme)
        weight = type("Weight", (), {"scheme": WeightScheme.parse(scheme), "g_idx": None})()
        found, wanted = made(x, weight), quantized(x, span)
        # torch rounds to float32 first: of 60,000 numbers one may lie that close to the middle of two codes, and takes the other
        assert int((found != wanted).sum()) <= 3, name
        assert torch.allclose(found, wanted, rtol=1 / 8, atol=0), name


def test_every_binade_and_tie():
    x = torch.cat([torch.linspace(-448, 448, 40_001), torch.arange(-64, 65) * 2.0**-10])[None].double()
    weight = type("Weight", (), {"scheme": WeightScheme.parse("fp8_e4m3:channel"), "g_idx": None})()
    assert torch.equal(rounding("linear_fp8_rows_triton", "fp8_e4m3:channel")(x, weight), x.float().to(torch.float8_e4m3fn).double())
