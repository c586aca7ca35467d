"""What AITER's attention and its store of tokens are given: the conformance kit's cases, computed by functions with AITER's arithmetic.

It shows that pages, slots, tables and partial sums mean what we read in AITER's source, not that AITER's kernels are right.
"""

from __future__ import annotations

import sys
import types
from typing import ClassVar

import aiter_source
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; `make test-rocm` brings it")

from hal_backend_rocm.aiter_provider.attention import AiterKV, attention_refusals
from hal_backend_rocm.aiter_provider.attention_op import AiterKVOp

from hal_core.errors import ShapeError, UnfitWeightsError
from hal_core.kv.op import KVParams
from hal_core.kv.scheme import KVScheme
from hal_core.machine import Device, Machine, Version
from hal_core.spec import KVCacheSpec
from hal_core.testing import BackendConformance

TARGET = "gfx942"
SOFTWARE = (Version("torch", "2.11.0+rocm7.1"), Version("amd-aiter", aiter_source.RELEASE))


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale=None, v_scale=None, asm_layout=False):
    """Each element to the place that AITER's kernel computes, in the memory that the caches begin at."""
    assert kv_cache_dtype == "auto"
    assert slot_mapping.dtype == torch.int64
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    heads, size = key.shape[1:]
    block, x = key_cache.shape[3:]
    head, at = torch.meshgrid(torch.arange(heads), torch.arange(size), indexing="ij")
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        base, offset = slot // block * heads * size * block, slot % block
        key_cache.view(-1)[base + head * size * block + at // x * block * x + offset * x + at % x] = key[token]
        value_cache.view(-1)[base + head * size * block + at * block + offset] = value[token]


def paged_attention_rocm(
    out, exp_sums, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, context_lens, block_size,
    max_context_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale, fp8_out_scale=None, partition_size=256, mtp=1, q_scale=None,
):  # fmt: skip
    """One query a sequence, in parts of 256 tokens; what no part of a row reaches stays as it was."""
    assert (kv_cache_dtype, partition_size, mtp, alibi_slopes) == ("auto", 256, 1, None)
    assert block_tables.dtype == context_lens.dtype == torch.int32
    assert tmp_out.shape == (*exp_sums.shape, query.shape[2])
    assert exp_sums.shape[2] == -(-max_context_len // 256)
    group = query.shape[1] // num_kv_heads
    for row, length in enumerate(context_lens.tolist()):
        assert 1 <= length <= max_context_len
        blocks = block_tables[row, : -(-length // block_size)].long()
        assert bool(((blocks >= 0) & (blocks < len(value_cache)) & (blocks % 2 == 0)).all())
        k = key_cache[blocks].permute(1, 0, 3, 2, 4).flatten(1, 2).flatten(2)[:, :length].double().repeat_interleave(group, 0)
        v = value_cache[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :length].double().repeat_interleave(group, 0)
        logits = torch.einsum("hd,hld->hl", query[row].double(), k) * scale
        for part in range(-(-length // 256)):
            own = logits[:, part * 256 : (part + 1) * 256]
            max_logits[row, :, part] = own.amax(1).float()
            exp_sums[row, :, part] = (own - own.amax(1, keepdim=True)).exp().sum(1).float()
        out[row] = torch.einsum("hl,hld->hd", logits.softmax(1), v).to(out.dtype)


@pytest.fixture(autouse=True)
def library(monkeypatch):
    made = {name: types.ModuleType(name) for name in ("aiter", "aiter.ops", "aiter.ops.cache", "aiter.ops.attention")}
    made["aiter.ops.cache"].reshape_and_cache = reshape_and_cache
    made["aiter.ops.attention"].paged_attention_rocm = paged_attention_rocm
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)


class Here(AiterKV):
    """The kernel as one of the host, for machines whose AMD GPU and AITER are made up."""

    name = "kv_aiter_here"
    devices = ("cpu",)
    provider = ""

    def refusals(self, spec, machine):
        return (*super(AiterKV, self).refusals(spec, machine), *attention_refusals(spec, TARGET))

    def prepare(self, spec, weights):
        return AiterKVOp(spec, weights, TARGET)


class TestAiterKV(BackendConformance):
    backend = "rocm"
    kernels = (Here(),)

    unsupported: ClassVar = {"rocm.*/compile/*": "AITER's functions here are Python that walks over sequences"}


def spec(**changes):
    given = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "keys": KVScheme("bf16"), "values": KVScheme("bf16")}
    return KVCacheSpec(**{**given, **changes})


FP16 = {"keys": KVScheme("fp16"), "values": KVScheme("fp16")}
REFUSED = [
    ("gfx90a", {}, "device.arch"), ("gfx950", {"head_dim": 96}, "kv.head_dim"), ("gfx950", {"page_size": 64}, "shape.range"),
    ("gfx942", {"num_heads": 34}, "shape.range"), ("gfx942", FP16, "kv.scheme"), ("gfx942", {"window": 64}, "epilogue.window"),
    ("gfx942", {"keys": KVScheme("fp8"), "values": KVScheme("fp8")}, "kv.scheme"), ("gfx942", {"page_size": 24}, "shape.multiple"),
    ("gfx942", {"sinks": True}, "epilogue.sinks"), ("gfx942", {"soft_cap": 30.0}, "epilogue.soft_cap"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "changes", "code"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_aiter_does_not_serve_is_refused(target, changes, code):
    machine = Machine("linux_x86_64", (Device("rocm", "amd", target, "a GPU"),), versions=SOFTWARE)
    assert code in [reason.code for reason in AiterKV().refusals(spec(**changes), machine)]


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("changes", [{}, {"head_dim": 128, "page_size": 32, "num_heads": 32}, {"dtype": "fp16", **FP16}])
def test_what_it_serves_is_accepted(target, changes):
    machine = Machine("linux_x86_64", (Device("rocm", "amd", target, "a GPU"),), versions=SOFTWARE)
    assert AiterKV().refusals(spec(**changes), machine) == ()
    absent = Machine("linux_x86_64", machine.devices, versions=SOFTWARE[:1])
    assert [reason.code for reason in AiterKV().refusals(spec(**changes), absent)] == ["backend.package"]


@pytest.mark.parametrize(("target", "changes"), [("gfx90a", {}), ("gfx942", FP16), ("gfx950", {"num_heads": 34})])
def test_preparation_asks_the_predicate_of_selection(target, changes):
    with pytest.raises(UnfitWeightsError, match="AITER's attention"):
        AiterKVOp(spec(**changes), KVParams(), target)


def test_more_tokens_than_aiter_takes_are_refused():
    op = AiterKVOp(spec(), KVParams(), TARGET)
    pages, table = torch.zeros(1, op.page_bytes, dtype=torch.uint8), torch.zeros(1, 4097, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ShapeError, match="65552 tokens a row"):
        op.attend(torch.zeros(1, 4, 64, dtype=torch.bfloat16), pages, table, torch.tensor([1], dtype=torch.int32), starts)


def test_long_sequences_are_parts_whose_sums_meet(monkeypatch):
    """Several parts of 256 tokens a row, and queries that come in several calls, against one softmax."""
    monkeypatch.setattr("hal_backend_rocm.aiter_provider.attention_op._SCRATCH", 1)
    op, length = AiterKVOp(spec(), KVParams(), TARGET), 600
    pages = torch.full((38, op.page_bytes), 0x7F, dtype=torch.uint8)
    k, v, q = (torch.randn(count, heads, 64).to(torch.bfloat16) for count, heads in ((length, 2), (length, 2), (5, 4)))
    op.append(pages, k, v, torch.arange(length))
    table, starts = torch.arange(38, dtype=torch.int32)[None], torch.tensor([0, 5], dtype=torch.int32)
    out, lse = op.attend(q, pages, table, torch.tensor([length], dtype=torch.int32), starts)
    for row in range(5):
        seen = length - 4 + row
        logits = torch.einsum("hd,lhd->hl", q[row].double(), k[:seen].double().repeat_interleave(2, 1)) / 8
        wanted = torch.einsum("hl,lhd->hd", logits.softmax(1), v[:seen].double().repeat_interleave(2, 1))
        assert float((out[row].double() - wanted).norm() / wanted.norm()) < 4e-3
        assert torch.allclose(lse[row].double(), logits.logsumexp(1), atol=1e-5)
