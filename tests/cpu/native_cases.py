"""Random quantized matrices for the tests of the native CPU ops, with their meaning in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hal_backend_cpu import _native

USABLE = _native.ISA_LEVELS[: _native.ISA_LEVELS.index(_native.usable_isa()) + 1]


@dataclass
class Matrix:
    """Canonical tensors of [lead, n, k] and their packed form."""

    n: int
    k: int
    group: int
    bits: int
    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    mins: Tensor | None
    codes: Tensor

    @property
    def packed(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        groups = (self.scales, self.zeros, self.mins)
        return (_native.pack(self.values, self.k, self.bits), *(None if t is None else _native.pack_groups(t) for t in groups))

    def weight(self, dtype: torch.dtype = torch.float64) -> Tensor:
        at = torch.arange(self.k) // self.group
        codes, scales = self.codes, self.scales.to(dtype)[..., at]
        if self.zeros is not None:
            return (codes - self.zeros.to(torch.int64)[..., at]).to(dtype) * scales
        if self.mins is not None:
            return codes.to(dtype) * scales + self.mins.to(dtype)[..., at]
        half = 1 << (self.bits - 1)
        return ((codes ^ half) - half).to(dtype) * scales


def make(n, k, group, bits, zero="none", *, scale_dtype=torch.float32, lead=(), seed=0) -> Matrix:
    g = torch.Generator().manual_seed(seed)
    groups, top = -(-k // group), 1 << bits
    codes = torch.randint(0, top, (*lead, n, k), generator=g)
    # Both signs: symmetric formats store negative scales.
    scales = (torch.randn(*lead, n, groups, generator=g) * 0.05).to(scale_dtype)
    zeros = torch.randint(0, top, (*lead, n, groups), generator=g).to(torch.uint8) if zero == "zeros" else None
    mins = (torch.randn(*lead, n, groups, generator=g) * 0.2).to(scale_dtype) if zero == "mins" else None
    if bits == 4:
        even = torch.nn.functional.pad(codes, (0, k % 2))
        values = (even[..., 0::2] | even[..., 1::2] << 4).to(torch.uint8)
    else:
        values = codes.to(torch.uint8)
    return Matrix(n, k, group, bits, values, scales, zeros, mins, codes)


def activations(rows, k, dtype=torch.float32, seed=1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=g)
    x[:, 0] *= 100  # an outlier channel, as trained models have
    return x.to(dtype)


def linear(x, m: Matrix, isa="auto", *, perm=None, bias=None) -> Tensor:
    return _native.ops.linear(x, *m.packed, perm, bias, m.n, m.k, m.group, m.bits, isa)


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))
