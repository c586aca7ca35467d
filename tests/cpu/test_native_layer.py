"""Native attention and MLP of a decoder layer against float64: dtypes, levels, head counts, caches, joined matrices, bad input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("hal_backend_cpu", reason="the hal-backend-cpu wheel is not installed")
from cpu.native_cases import USABLE, Matrix, make

from hal_backend_cpu import _native

EPS = 1e-5
BOUND = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
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
        self.x[..., 5] *= 20  # an outlier
        self.q_norm, self.k_norm = (random(c.dim), random(c.dim)) if c.norms else (None, None)
        angles = torch.rand(c.batch, c.tokens, c.dim // 2, generator=g).mul(6).repeat(1, 1, 2)
        self.cos, self.sin = angles.cos().to(c.dtype), angles.sin().to(c.dtype)
        room = (c.batch, c.kv_heads, c.held + c.tokens + 3, c.dim)
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


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


CASES = {
    "one token": Case(held=7),
    "one token over several stretches": Case(held=600, heads=6, kv_heads=2, dim=32),
    "a prompt": Case(tokens=150, heads=6, kv_heads=2, dim=48),
    "a prompt behind a cache": Case(tokens=21, held=130),
    "a batch": Case(batch=3, tokens=5, held=4),
    "a batch of one token": Case(batch=3, held=300),
    "norms of heads": Case(tokens=9, held=2, norms=True),
    "as many kv heads, wide": Case(tokens=3, heads=2, kv_heads=2, dim=128),
    "bf16": Case(tokens=70, norms=True, dtype=torch.bfloat16),
    "bf16, one token": Case(held=90, dtype=torch.bfloat16),
    "fp16": Case(tokens=33, dtype=torch.float16),
}


@pytest.mark.parametrize("isa", ["avx2", USABLE[-1] if USABLE[-1] != "amx" else "avx512bf16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_is_that_of_float64(case: Case, isa: str) -> None:
    layer = Layer(case)
    wanted, keys = layer.reference()
    found = layer.native(isa)
    assert found.dtype == case.dtype
    assert error(found, wanted) < BOUND[case.dtype]
    total = case.held + case.tokens
    assert error(layer.keys[:, :, :total], keys) < BOUND[case.dtype]
    assert layer.keys[:, :, total:].isnan().all()
    assert layer.values[:, :, total:].isnan().all()


@pytest.mark.parametrize("isa", ["avx2", "avx512vnni:group"])
@pytest.mark.parametrize("tokens", [1, 30])
def test_joined_matrices_give_the_same_bits(isa: str, tokens: int) -> None:
    if isa.partition(":")[0] not in USABLE:
        pytest.skip(f"this processor has no {isa}")
    case = Case(tokens=tokens, held=3)
    apart, joined = Layer(case), Layer(case)
    parts = [m.packed for m in (joined.q, joined.k, joined.v)]
    codes, scales, mins = (torch.cat([part[i] for part in parts]) for i in (0, 1, 3))
    whole = (codes, scales, None, mins, None, None, joined.q.group, joined.q.bits, isa, *BEHIND, *BEHIND)
    assert torch.equal(apart.native(isa), joined.native(isa, whole))
    assert torch.equal(apart.values[:, :, : 3 + tokens], joined.values[:, :, : 3 + tokens])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_reach_the_numbers(threads: int) -> None:
    before, cases = torch.get_num_threads(), (Case(tokens=100), Case(held=700))
    wanted = [Layer(case).native("avx2") for case in cases]
    try:
        torch.set_num_threads(threads)
        assert all(torch.equal(Layer(case).native("avx2"), one) for case, one in zip(cases, wanted, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("tokens", "intermediate", "dtype"), [(1, 40, torch.float32), (19, 33, torch.float32), (5, 48, torch.bfloat16)])
def test_mlp_is_that_of_float64(tokens: int, intermediate: int, dtype: torch.dtype, activation: str) -> None:
    g = torch.Generator().manual_seed(tokens)
    x, norm = torch.randn(2, tokens, 72, generator=g).to(dtype), torch.randn(72, generator=g).to(dtype)
    gate, up = make(intermediate, 72, 24, 4, "zeros", seed=1), make(intermediate, 72, 72, 8, seed=2)
    down = make(72, intermediate, intermediate, 8, seed=3)
    bias = torch.randn(intermediate, generator=g)
    isa = "avx2"
    found = _native.ops.mlp(x, norm, *argument(gate, isa, bias), *argument(up, isa), *argument(down, isa), intermediate, EPS, activation)
    act = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
           "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh")}[activation]  # fmt: skip
    h = normed(x.double(), norm.double())
    hidden = act(h @ gate.weight().T + bias.double()) * (h @ up.weight().T)
    assert error(found, x.double() + hidden @ down.weight().T) < BOUND[dtype]


def test_a_row_that_is_not_finite_stays_in_its_row() -> None:
    layer = Layer(Case(batch=2, tokens=4))
    clean = layer.native("avx2")
    layer.x[1, 2, 3] = float("inf")
    found = layer.native("avx2")
    assert torch.equal(found[0], clean[0])
    assert found[1, 2].isnan().any()


BAD = {
    "x of two dimensions": ({"x": torch.zeros(4, 72)}, r"x has shape \[4, 72\]; expected \[batch, tokens, hidden\]"),
    "keys of another dtype": ({"keys": torch.zeros(1, 2, 9, 16).half()}, "keys is float16; expected float32"),
    "no room": ({"keys": torch.zeros(1, 2, 3, 16), "values": torch.zeros(1, 2, 3, 16)}, "held is 3; expected 0 to 2"),
    "values of fewer heads": ({"values": torch.zeros(1, 1, 7, 16)}, r"values has shape \[1, 1, 7, 16\]; expected \[1, 2, 7, 16\]"),
    "angles of another length": ({"sin": torch.zeros(1, 2, 16)}, r"sin has shape \[1, 2, 16\]; expected \[1, 1, 16\]"),
    "a norm of another width": ({"norm": torch.zeros(71)}, r"norm has shape \[71\]; expected \[72\]"),
    "heads that do not divide": ({"case": Case(held=3, heads=5)}, "heads is 5; expected a multiple of the 2 of keys"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_with_the_numbers(bad: str) -> None:
    layer = Layer(Case(held=3))
    changes, message = BAD[bad]
    for name, value in changes.items():
        setattr(layer, name, replace(value) if isinstance(value, Case) else value)
    with pytest.raises(RuntimeError, match=message):
        layer.native("avx2")


def test_the_first_matrix_must_be_given() -> None:
    layer = Layer(Case())
    with pytest.raises(RuntimeError, match="q_packed is None"):
        layer.native("avx2", BEHIND * 3)
