"""The cache on the SYCL device of the host: pages of the definition, attention over every scheme."""

from __future__ import annotations

import pytest
import torch
from hal_backend_xpu.kv_op import XpuKVOp

from hal_core.errors import ShapeError
from hal_core.kv.op import KVParams
from hal_core.kv.scheme import KVScheme
from hal_core.reference.kv import ReferenceKVOp
from hal_core.spec import KVCacheSpec

pytestmark = pytest.mark.usefixtures("sycl_device")
PAGES, SIZE = 9, 32
SCHEMES = ("bf16", "fp8", "fp8:head", "int8", "int8:token", "turboquant:4", "turboquant:3:raw", "turboquant:1", "turboquant:8")


def rng():
    return torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())


def cache(keys, values, dtype="bf16", **more):
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 48, "value_dim": 40, "page_size": SIZE, "dtype": dtype, **more}
    return KVCacheSpec(keys=KVScheme.parse(keys), values=KVScheme.parse(values), **shape)


def filled(spec, op, generator, lengths):
    """Pages and tails of both ops with the same tokens, and what attention takes."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[spec.dtype]
    pages = torch.full((PAGES, op.page_bytes), 0xA5, dtype=torch.uint8)
    tails = torch.full((len(lengths), op.tail_bytes), 0xA5, dtype=torch.uint8) if op.tail_bytes else None
    table = torch.randperm(PAGES, generator=generator)[: len(lengths) * 3].view(len(lengths), 3).int()
    for row, length in enumerate(lengths):
        k = torch.randn(length, spec.num_kv_heads, spec.head_dim, generator=generator)
        k[:, :, 3] *= 20
        v = torch.randn(length, spec.num_kv_heads, spec.v_dim, generator=generator)
        at = torch.arange(length)
        slots = table[row].long()[at // SIZE] * SIZE + at % SIZE
        owners = torch.full((length,), row, dtype=torch.int32) if op.tail_bytes else None
        op.append(pages, k.to(dtype), v.to(dtype), slots, tails, owners)
    return pages, tails, table


def params(spec):
    one = torch.tensor([0.03, 0.05]) if spec.keys.granularity == "head" else torch.tensor(0.04)
    two = torch.tensor([0.02, 0.01]) if spec.values.granularity == "head" else torch.tensor(0.02)
    return KVParams(key_scale=one if spec.keys.scaled else None, value_scale=two if spec.values.scaled else None, source="calibrated")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pages_are_bit_for_bit_those_of_the_definition(scheme):
    spec = cache(scheme, scheme)
    seed = torch.randint(1 << 30, ()).item()
    both = [filled(spec, kind(spec, params(spec)), torch.Generator().manual_seed(seed), (70, 33)) for kind in (XpuKVOp, ReferenceKVOp)]
    assert torch.equal(both[0][0], both[1][0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_attention_is_that_of_the_definition(scheme):
    spec = cache(scheme, scheme, "fp32", window=50, sink_tokens=3, sinks=True, soft_cap=30.0)
    lengths, generator = (70, 0, 33), rng()
    own, reference = XpuKVOp(spec, params(spec)), ReferenceKVOp(spec, params(spec))
    pages, tails, table = filled(spec, reference, generator, lengths)
    q = torch.randn(8, 6, 48, generator=generator)
    given = (q, pages, table, torch.tensor(lengths).int(), torch.tensor([0, 5, 7, 8]).int())
    more = {"sinks": torch.randn(6, generator=generator), "tails": tails, "tail_ids": torch.arange(3).int() if tails is not None else None}
    out = torch.full((8, 6, 40), float("nan"))
    found, lse = own.attend(*given, out=out, **more)
    wanted, wanted_lse = reference.attend(*given, **more)
    assert found is out
    assert float((found - wanted).norm() / wanted.norm()) < 2e-5
    assert float((lse - wanted_lse).abs().max()) < 1e-4
    assert not found[5:7].any()  # a sequence without tokens


def test_a_stored_nan_reaches_those_who_see_it():
    spec = cache("int8:token", "fp8", "fp32")
    op = XpuKVOp(spec, params(spec))
    pages = torch.zeros(2, op.page_bytes, dtype=torch.uint8)
    k, v = torch.ones(4, 2, 48), torch.ones(4, 2, 40)
    k[2, 0, 5], v[3, 1, 7] = float("nan"), float("inf")
    op.append(pages, k, v, torch.arange(4))
    table, count = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4]).int()
    found, _ = op.attend(torch.ones(4, 6, 48), pages, table, count, torch.tensor([0, 4]).int())
    assert found[:, :3].isnan().flatten(1).any(1).tolist() == [False, False, True, True]
    assert found[:, 3:, 7].isnan().any(1).tolist() == [False, False, False, True]
    assert not found[:, 3:, :7].isnan().any()


def test_a_result_that_does_not_fit_is_an_error_under_compile_too():
    spec = cache("bf16", "bf16")
    op, generator = XpuKVOp(spec, params(spec)), rng()
    pages, tails, table = filled(spec, op, generator, (40,))
    q = torch.randn(2, spec.num_heads, spec.head_dim, generator=generator).bfloat16()
    lengths, starts = torch.tensor([40], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    graph = torch.compile(lambda out: op.attend(q, pages, table, lengths, starts, tails=tails, out=out), backend="eager")
    with pytest.raises(ShapeError, match="out"):
        graph(torch.empty(2, spec.num_heads, spec.v_dim, dtype=torch.float64))
