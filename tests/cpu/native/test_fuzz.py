"""Native ops on random shapes, ids and addresses: equal to the definition, and, under the sanitizers, within their buffers.

Buffers are as large as the op asks for and no larger, so that a read or a write beyond one is seen.
"""

from __future__ import annotations

import threading

import pytest
import torch
from cpu.native_cases import USABLE, activations, error, linear, make
from cpu.native_layer import Case, Layer, Mlp
from cpu.native_moe import Experts, routing
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_backend_cpu import _native

isas = st.sampled_from(USABLE)
floats = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
groups = st.sampled_from([8, 16, 24, 32, 64, 128])
zeros = st.sampled_from(["none", "zeros", "mins"])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}


def shifted(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """The same values, ``step`` bytes after an address that torch would give."""
    if not tensor.numel():
        return tensor
    raw = tensor.contiguous().flatten().view(torch.uint8)
    data = bytearray(step + raw.numel())
    data[step:] = raw.numpy().tobytes()
    return torch.frombuffer(data, dtype=tensor.dtype, offset=step).view(tensor.shape)


@settings(max_examples=120, deadline=None)
@given(
    isa=isas, n=st.integers(1, 70), k=st.integers(1, 200), rows=st.integers(0, 70), group=groups, bits=st.sampled_from([4, 8]), zero=zeros,
    dtype=floats, step=st.sampled_from([0, 1, 2, 4, 6]), bias=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_linear(isa, n, k, rows, group, bits, zero, dtype, step, bias, seed):
    m = make(n, k, min(group, k) if group >= k else group, bits, zero, seed=seed)
    x = shifted(activations(rows, k, dtype, seed), step)
    b = torch.randn(n) if bias else None
    y = linear(x, m, isa, bias=b)
    assert y.shape == (rows, n)
    truth = x.double() @ m.weight().T + (0 if b is None else b.double())
    assert not rows or error(y, truth) < TOLERANCE[dtype] + 1e-6 * k


@settings(max_examples=60, deadline=None)
@given(
    isa=isas, hidden=st.integers(1, 70), inner=st.integers(1, 70), tokens=st.integers(0, 40), count=st.integers(1, 6),
    bits=st.sampled_from([4, 8]), zero=zeros, gated=st.booleans(), reduce=st.booleans(), skip=st.booleans(),
    step=st.sampled_from([0, 1, 4]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_experts(isa, hidden, inner, tokens, count, bits, zero, gated, reduce, skip, step, seed):
    group = 8
    gate = make(inner, hidden, group, bits, zero, lead=(count,), seed=seed) if gated else None
    up = make(inner, hidden, group, bits, zero, lead=(count,), seed=seed + 1)
    down = make(hidden, inner, group, bits, zero, lead=(count,), seed=seed + 2)
    block = Experts(gate, up, down, activation="silu" if gated else "relu2")
    slots = min(count, 3)
    ids, weights = routing(tokens, count, slots, seed % 1000)
    if skip and tokens:
        ids[0, 0] = -1
    x = shifted(torch.randn(tokens, hidden), step)
    y = block.native(x, ids, weights, reduce=reduce, isa=isa)
    truth = block.truth(x, ids, weights, reduce=reduce)
    assert y.shape == truth.shape
    assert not tokens or error(y, truth) < 1e-4


@settings(max_examples=60, deadline=None)
@given(
    isa=isas, batch=st.integers(1, 3), tokens=st.integers(1, 40), held=st.integers(0, 300), kv_heads=st.integers(1, 3),
    per_kv=st.integers(1, 4), dim=st.sampled_from([16, 32, 80]), hidden=st.integers(8, 70), norms=st.booleans(), dtype=floats,
    step=st.sampled_from([0, 2, 4]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_layer(isa, batch, tokens, held, kv_heads, per_kv, dim, hidden, norms, dtype, step, seed):
    layer = Layer(Case(batch, tokens, held, kv_heads * per_kv, kv_heads, dim, hidden, norms, 0, dtype), seed)
    layer.x, layer.keys, layer.values = (shifted(t, step) for t in (layer.x, layer.keys, layer.values))
    wanted, _ = layer.reference()
    assert error(layer.native(isa), wanted) < 10 * TOLERANCE[dtype]
    mlp, x = Mlp(hidden, hidden + tokens, seed), layer.x
    mlp.norm = mlp.norm.to(dtype).float()
    assert error(mlp.native(x, isa), mlp.reference(x)) < 10 * TOLERANCE[dtype]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 60), k=st.integers(1, 150), count=st.integers(0, 20), bits=st.sampled_from([4, 8]), zero=zeros, dtype=floats,
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_lookup(rows, k, count, bits, zero, dtype, seed):
    m = make(rows, k, 16, bits, zero, seed=seed)
    ids = torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(seed))
    y = _native.ops.lookup(ids, *m.packed, None, m.n, m.k, m.group, m.bits, dtype)
    assert torch.equal(y, m.weight(torch.float32)[ids].to(dtype))


@pytest.mark.parametrize("bad", [-1, 40, 2**31, -(2**40)])
def test_ids_out_of_range_are_told_and_nothing_is_read(bad):
    m = make(40, 16, 16, 4)
    with pytest.raises(RuntimeError, match=str(bad)):
        _native.ops.lookup(torch.tensor([3, bad]), *m.packed, None, m.n, m.k, m.group, m.bits, torch.float32)


@pytest.mark.parametrize("isa", USABLE)
@pytest.mark.parametrize("bad", [-2, 5, 2**31 - 1, -(2**31)])
def test_experts_out_of_range_are_told_and_nothing_is_read(isa, bad):
    up, down = make(24, 16, 8, 4, lead=(5,)), make(16, 24, 8, 4, lead=(5,))
    ids, weights = routing(3, 5, 2)
    ids[1, 1] = bad
    with pytest.raises(RuntimeError, match=str(bad)):
        Experts(None, up, down, activation="relu2").native(torch.randn(3, 16), ids, weights, isa=isa)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 70), k=st.integers(1, 150), bits=st.sampled_from([4, 8]), lead=st.sampled_from([(), (1,), (3,), (2, 2)]),
    step=st.sampled_from([0, 1, 3]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_packing(n, k, bits, lead, step, seed):
    values = torch.randint(0, 256, (*lead, n, -(-k * bits // 8)), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = _native.pack(shifted(values, step), k, bits)
    assert torch.equal(_native.unpack(shifted(packed, step), n, k, bits), values)


@pytest.mark.parametrize("isa", USABLE)
def test_two_threads_call_one_op(isa):
    """Each thread has scratch memory of its own, and both share torch's pool: the bits are those of a call alone."""
    m, count = make(96, 256, 32, 4, "zeros"), 5
    block = Experts(make(48, 64, 8, 4, lead=(6,)), make(48, 64, 8, 4, lead=(6,)), make(64, 48, 8, 4, lead=(6,)))
    xs = [activations(rows, 256, seed=rows) for rows in (1, 7, 40, 130)]
    routed = [(torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)), *routing(rows, 6, 2)) for rows in (1, 9, 64)]
    packed = m.packed

    def all_of_them():
        found = [_native.ops.linear(x, *packed, None, None, m.n, m.k, m.group, m.bits, isa) for x in xs]
        return found + [block.native(*each, isa=isa) for each in routed]

    alone = all_of_them()
    results: dict[int, list[torch.Tensor]] = {}
    errors: list[BaseException] = []
    barrier = threading.Barrier(2)

    def work(index: int) -> None:
        try:
            barrier.wait(30)
            for _ in range(count):
                results[index] = all_of_them()
                assert all(map(torch.equal, results[index], alone))
        except BaseException as failure:  # noqa: BLE001  told below, in the thread that can fail a test
            errors.append(failure)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert not errors, errors[0]
    assert sorted(results) == [0, 1]
