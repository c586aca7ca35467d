"""Random halves of a decoder layer for the tests of its native ops, with their meaning in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cpu.native_cases import Matrix, make
from torch import Tensor

from hal_backend_cpu import _native

EPS = 1e-5
BEHIND = (*(None,) * 6, 0, 0, "")


@dataclass(frozen=True)
class Case:
    batch: int = 1
    tokens: int = 1
    held: int = 0
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    hidden: int = 72
    norms: bool = False
    spare: int = 3
    dtype: torch.dtype = torch.float32


def argument(matrix: Matrix, isa: str, bias: Tensor | None = None) -> tuple[object, ...]:
    codes, scales, zeros, mins = matrix.packed
    return (codes, scales, zeros, mins, None, bias, matrix.group, matrix.bits, isa)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos[:, :, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * sin[:, :, None]


class Layer:
    """Random weights and inputs of one case, and the attention half in float64."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case, c = case, case
        g = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).to(c.dtype)

        self.q = make(c.heads * c.dim, c.hidden, 24, 4, "mins", seed=seed)
        self.k, self.v = (make(c.kv_heads * c.dim, c.hidden, 24, 4, "mins", seed=seed + i) for i in (1, 2))
        self.o = make(c.hidden, c.heads * c.dim, 32, 8, seed=seed + 3)
        self.x, self.norm = random(c.batch, c.tokens, c.hidden), random(c.hidden)
        if not c.norms:
            self.norm /= 8  # logits in the hundreds would let one rounding of a query change who is attended to
        self.x[..., 5] *= 20  # an outlier
        self.q_norm, self.k_norm = (random(c.dim) / 2, random(c.dim) / 2) if c.norms else (None, None)
        angles = torch.rand(c.batch, c.tokens, c.dim // 2, generator=g).mul(6).repeat(1, 1, 2)
        self.cos, self.sin = angles.cos().to(c.dtype), angles.sin().to(c.dtype)
        room = (c.batch, c.kv_heads, c.held + c.tokens + c.spare, c.dim)
        self.keys, self.values = (torch.full(room, float("nan"), dtype=c.dtype) for _ in range(2))
        for cache in (self.keys, self.values):
            cache[:, :, : c.held] = random(c.batch, c.kv_heads, c.held, c.dim)

    def native(self, isa: str, matrices: tuple[object, ...] | None = None) -> Tensor:
        c = self.case
        three = matrices or tuple(part for matrix in (self.q, self.k, self.v) for part in argument(matrix, isa))
        return _native.ops.attention(
            self.x, self.cos, self.sin, self.keys, self.values, c.held, self.norm, self.q_norm, self.k_norm, *three,
            *argument(self.o, isa), c.heads, EPS, c.dim**-0.5,
        )  # fmt: skip

    def reference(self) -> tuple[Tensor, Tensor]:
        """The result and all keys."""
        c, x = self.case, self.x.double()
        h = normed(x, self.norm.double())
        q, k, v = ((h @ m.weight().T).unflatten(-1, (-1, c.dim)) for m in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = normed(q, self.q_norm.double()), normed(k, self.k_norm.double())
        q, k = (rotated(t, self.cos.double(), self.sin.double()).transpose(1, 2) for t in (q, k))
        keys = torch.cat((self.keys[:, :, : c.held].double(), k), 2)
        values = torch.cat((self.values[:, :, : c.held].double(), v.transpose(1, 2)), 2)
        seen = torch.ones(c.tokens, c.held + c.tokens, dtype=torch.bool).tril(c.held)
        attended = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        return x + attended.transpose(1, 2).flatten(2) @ self.o.weight().T, keys


class Mlp:
    """Random weights of an MLP whose matrices have different schemes, and its half of a layer in float64."""

    def __init__(self, hidden: int, intermediate: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        # a quarter, so that fp16 holds what comes out
        self.norm, self.bias = torch.randn(hidden, generator=g) / 4, torch.randn(intermediate, generator=g)
        self.gate, self.up = make(intermediate, hidden, 24, 4, "zeros", seed=seed), make(intermediate, hidden, hidden, 8, seed=seed + 1)
        self.down = make(hidden, intermediate, intermediate, 8, seed=seed + 2)

    def native(self, x: Tensor, isa: str, activation: str = "silu") -> Tensor:
        three = (*argument(self.gate, isa, self.bias), *argument(self.up, isa), *argument(self.down, isa))
        return _native.ops.mlp(x, self.norm.to(x.dtype), *three, len(self.bias), EPS, activation)

    def reference(self, x: Tensor, activation: str = "silu") -> Tensor:
        x, approximate = x.double(), "tanh" if activation == "gelu_tanh" else "none"
        h = normed(x, self.norm.to(x.dtype).double())
        gate = h @ self.gate.weight().T + self.bias.double()
        act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate=approximate)
        return x + (act * (h @ self.up.weight().T)) @ self.down.weight().T
