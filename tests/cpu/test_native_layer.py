"""Native attention and MLP of a decoder layer against float64: dtypes, levels, head counts, caches, joined matrices, bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("hal_backend_cpu", reason="the hal-backend-cpu wheel is not installed")
from cpu.native_cases import USABLE, error
from cpu.native_layer import BEHIND, Case, Layer, Mlp

from hal_backend_cpu import _native

BOUND = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}

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
    mlp, x = Mlp(72, intermediate), torch.randn(2, tokens, 72).to(dtype)
    mlp.norm = mlp.norm.to(dtype).float()
    assert error(mlp.native(x, "avx2", activation), mlp.reference(x, activation)) < BOUND[dtype]


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


def test_joined_packed_tensors_stand_one_behind_the_other() -> None:
    parts = [torch.randint(-9, 9, (tiles, 3, 16), dtype=torch.int32) for tiles in (2, 0, 5)]
    assert torch.equal(_native.join(parts), torch.cat(parts))
    with pytest.raises(RuntimeError, match=r"parts have shapes \[2, 3, 16\] and \[2, 4, 16\]"):
        _native.join([parts[0], torch.zeros(2, 4, 16, dtype=torch.int32)])
    with pytest.raises(RuntimeError, match="parts is int64; expected int32"):
        _native.join([parts[0], parts[0].long()])
