"""What the native KV ops refuse: each with the numbers, before anything is written."""

from __future__ import annotations

import re

import pytest
import torch
from cpu.kv_cases import LEVELS, both, ints, queries, spec_of, tokens

from hal_backend_cpu import _native, kv_kernels
from hal_backend_cpu.kv_ops import CpuKV
from hal_core.errors import HalError, ShapeError
from hal_core.kv.op import KVParams
from hal_core.machine import Machine


def given(pair: str = "int8"):
    spec = spec_of(pair)
    native, _ = both(spec, [70, 40])
    k, v = tokens(spec, 4)
    append = {
        "pages": native.pages,
        "k": k,
        "v": v,
        "slots": native.rows[1][1] * 32 + torch.arange(8, 12),
        "tails": native.tails,
        "tail_ids": ints(1, 1, 1, 1),
    }
    attend = {
        "q": queries(spec, 3), "pages": native.pages, "block_table": native.table(), "lengths": ints(70, 40), "query_starts": ints(0, 2, 3),
        "tails": native.tails, "tail_ids": ints(0, 1),
    }  # fmt: skip
    return native, append, attend


APPEND = {
    "a page too small": ({"pages": lambda a: a["pages"][:, :-1].contiguous()}, r"pages has shape \[\d+, \d+\]; expected \[pages, 8576\]"),
    "pages that are not bytes": ({"pages": lambda a: a["pages"].to(torch.int16)}, "pages is .*; expected uint8"),
    "strided pages": ({"pages": lambda a: a["pages"].repeat(1, 2)[:, ::2]}, "pages of shape .* is not contiguous"),
    "head dimension": ({"k": lambda a: a["k"][..., :32]}, r"k has shape \[4, 2, 32\]; expected \[4, 2, 64\]"),
    "heads of v": ({"v": lambda a: a["v"][:, :1]}, r"v has shape \[4, 1, 64\]; expected \[4, 2, 64\]"),
    "another dtype": ({"k": lambda a: a["k"].float()}, "keys.*torch.float32"),
    "another dtype of v": ({"v": lambda a: a["v"].half()}, "values.*torch.float16"),
    "a slot beyond the pages": ({"slots": lambda a: a["slots"] + 10_000}, r"slots\[0\] is \d+; expected -1 or 0 to \d+"),
    "a negative slot": ({"slots": lambda a: torch.full_like(a["slots"], -2)}, r"slots\[0\] is -2"),
    "a slot twice": ({"slots": lambda a: a["slots"][[0, 1, 2, 0]]}, r"slot \d+ is given twice"),
    "slots that are int32": ({"slots": lambda a: a["slots"].int()}, "slots is int32; expected int64"),
    "a token left out of a group": (
        {"slots": lambda a: a["slots"] + torch.tensor([0, 0, 0, 1])},
        r"slots\[3\] is \d+ after slot \d+ of tail 1",
    ),
    "no tails": ({"tails": lambda a: None}, "tails and tail_ids must be given"),
    "a tail too small": (
        {"tails": lambda a: a["tails"][:, :-1].contiguous()},
        r"tails has shape \[2, 8191\]; expected \[sequences, 8192\]",
    ),
    "a tail that is not there": ({"tail_ids": lambda a: ints(1, 1, 1, 2)}, r"tail_ids\[3\] is 2; expected 0 to 1"),
    "a tail beyond 32 bits": ({"tail_ids": lambda a: torch.tensor([1, 1, 1, 2**32])}, r"tail_ids\[3\]: 4294967296"),
    "a slot beyond 32 bits": ({"slots": lambda a: a["slots"] + 2**32}, r"slots\[0\] is 42\d+; expected -1 or 0 to \d+"),
    "too few tail ids": ({"tail_ids": lambda a: ints(1)}, r"tail_ids has shape \[1\]; expected \[4\], one a token"),
}


@pytest.mark.parametrize("what", APPEND)
def test_append_refuses(what):
    native, append, _ = given()
    change, message = APPEND[what]
    pages, tails = native.pages.clone(), native.tails.clone()
    with pytest.raises(ShapeError, match=message):
        native.op.append(**append | {name: make(append) for name, make in change.items()})
    assert torch.equal(pages, native.pages)
    assert torch.equal(tails, native.tails)
    native.op.append(**append)
    assert not torch.equal(tails, native.tails)


ATTEND = {
    "other heads": ({"q": lambda a: a["q"][:, :4]}, r"queries.*\[3, 4, 64\]"),
    "another dimension": ({"q": lambda a: a["q"][..., :32]}, r"q has shape \[3, 8, 32\]"),
    "another dtype": ({"q": lambda a: a["q"].float()}, "queries.*torch.float32"),
    "a length beyond the table": ({"lengths": lambda a: ints(70, 97)}, r"lengths\[1\] is 97; its 3 pages hold 0 to 96"),
    "a negative length": ({"lengths": lambda a: ints(-1, 40)}, r"lengths\[0\] is -1"),
    "a page that is not there": ({"block_table": lambda a: a["block_table"] + 99}, r"block_table\[0, 0\] is \d+; expected 0 to \d+"),
    "a negative page": ({"lengths": lambda a: ints(70, 70)}, r"block_table\[1, 2\] is -7"),
    "more queries than tokens": ({"lengths": lambda a: ints(1, 40)}, "sequence 0 has 2 query rows and 1 cached tokens"),
    "falling query starts": ({"query_starts": lambda a: ints(0, 4, 3)}, r"query_starts\[2\] is 3, below 4"),
    "query starts of other rows": ({"query_starts": lambda a: ints(0, 2, 5)}, "query_starts runs from 0 to 5; expected 0 to 3"),
    "a page beyond 32 bits": ({"block_table": lambda a: a["block_table"].long() + 2**32}, r"block_table\[0, 0\]: 42949\d+"),
    "a page below 32 bits": ({"block_table": lambda a: a["block_table"].long() - 2**32}, r"block_table\[0, 0\]: -42949\d+"),
    "a length beyond 32 bits": ({"lengths": lambda a: torch.tensor([70, 2**32 + 40])}, r"lengths\[1\]: 4294967336"),
    "query starts beyond 32 bits": ({"query_starts": lambda a: torch.tensor([0, 2**32 + 2, 3])}, r"query_starts\[1\]: 4294967298"),
    "a tail beyond 32 bits": ({"tail_ids": lambda a: torch.tensor([0, 2**32 + 1])}, r"tail_ids\[1\]: 4294967297"),
    "too few lengths": ({"lengths": lambda a: ints(70)}, r"lengths has shape \[1\]; expected \[2\]"),
    "floats for a table": ({"block_table": lambda a: a["block_table"].float()}, "block_table is float32; expected int32"),
    "a table of one dimension": ({"block_table": lambda a: a["block_table"][0]}, r"block_table has shape \[3\]"),
    "no tails": ({"tails": lambda a: None}, "tails and tail_ids must be given"),
    "a tail that is not there": ({"tail_ids": lambda a: ints(0, -1)}, r"tail_ids\[1\] is -1"),
    "sinks that the spec has not": ({"sinks": lambda a: torch.zeros(8)}, "sinks.*given"),
    "another output": (
        {"out": lambda a: torch.empty(3, 8, 32, dtype=torch.bfloat16)},
        r"out has shape \[3, 8, 32\]; expected \[3, 8, 64\]",
    ),
    "an output of another dtype": ({"out": lambda a: torch.empty(3, 8, 64)}, "out is float32; expected bfloat16"),
    "a scale that is no number": ({"scale": lambda a: float("nan")}, "scale is nan"),
}


@pytest.mark.parametrize("what", ATTEND)
def test_attend_refuses(what):
    native, _, attend = given()
    change, message = ATTEND[what]
    with pytest.raises(ShapeError, match=message):
        native.op.attend(**attend | {name: make(attend) for name, make in change.items()})
    assert bool(torch.isfinite(native.op.attend(**attend)[0]).all())


def test_sinks_must_be_given_where_the_spec_says():
    spec = spec_of("bf16", sinks=True)
    native, _ = both(spec, [9])
    for sinks, message in ((None, "sinks.*missing"), (torch.zeros(2), r"sinks has shape \[2\]; expected \[8\]")):
        with pytest.raises(ShapeError, match=message):
            native.attend(queries(spec, 1), [9], [1], sinks=sinks)


def test_reading_refuses():
    native, _, _ = given()
    row = native.rows[0]
    for change, message in (
        ({"length": 97}, "positions 0 to 97; the row has 3 pages of 32 tokens"),
        ({"length": 2**40}, "positions 0 to 1099511627776; the row has 3 pages"),  # half a pebibyte, were it allocated
        ({"length": 2**70}, "positions 0 to 1180591620717411303424"),
        ({"start": 71}, "positions 71 to 70"),
        ({"start": -1}, "positions -1 to 70"),
        ({"block_row": row.long() + 2**32}, r"block_row\[0\]: 42949\d+"),
        ({"block_row": row[None]}, r"block_row: \[1, 3\]"),
        ({"tail_id": 2**32}, "tail_id: 4294967296"),
        ({"tail_id": 2**70}, "tail_id: 1180591620717411303424"),
        ({"block_row": row + 99}, r"block_row\[0\] is \d+"),
        ({"tail_id": 2}, r"tail_ids\[0\] is 2; expected 0 to 1"),
        ({"tails": None}, "tails and tail_ids must be given"),
    ):
        arguments = {"pages": native.pages, "block_row": row, "length": 70, "tails": native.tails, "tail_id": 0} | change
        with pytest.raises(ShapeError, match=message):
            native.op.materialize(**arguments)
    with pytest.raises(ShapeError, match="tails"):
        native.op.reopen(native.pages, row, 70, None, None)
    for change, message in (
        ({"length": 97}, "positions 0 to 97"),
        ({"block_row": row.long() + 2**32}, r"block_row\[0\]: 42949\d+"),
        ({"tail_id": 2**32}, "tail_id: 4294967296"),
    ):
        with pytest.raises(ShapeError, match=message):
            native.op.reopen(**{"pages": native.pages, "block_row": row, "length": 45, "tails": native.tails, "tail_id": 0} | change)
    native.op.reopen(native.pages, row, 64, None, None)


def test_entries_behind_the_last_page_may_be_anything():
    native, _, attend = given()
    wanted = native.op.attend(**attend)
    table = attend["block_table"].long()
    table[1, 2] = 2**40
    assert all(map(torch.equal, native.op.attend(**attend | {"block_table": table}), wanted))
    read = native.op.materialize(native.pages, table[1], 40, native.tails, 1)
    assert all(map(torch.equal, read, native.op.materialize(native.pages, native.rows[1], 40, native.tails, 1)))


def test_compiled_calls_refuse_what_does_not_fit_too():
    native, _, attend = given()
    lengths = attend["lengths"].long()

    def step(q, table, lengths):
        return native.op.attend(**attend | {"q": q, "block_table": table, "lengths": lengths})[0]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    table = attend["block_table"].long()
    assert torch.equal(compiled(attend["q"], table, lengths), native.op.attend(**attend)[0])
    for wrong in ((table + 2**32, lengths), (table, lengths + 2**32)):
        with pytest.raises(RuntimeError, match="is -2147483648"):
            compiled(attend["q"], *wrong)


@pytest.mark.parametrize("cap", [1e-60, 1e-40, 1e39])
def test_a_cap_that_float32_cannot_hold(cap):
    native, _ = both(spec_of("bf16", soft_cap=cap), [9])
    with pytest.raises(ShapeError, match=re.escape(f"soft_cap is {cap:g}")):
        native.attend(queries(native.op.spec, 1), [9], [1])


def test_skipped_tokens_change_nothing():
    native, append, _ = given()
    pages, tails = native.pages.clone(), native.tails.clone()
    native.op.append(**append | {"slots": torch.full((4,), -1)})
    assert torch.equal(pages, native.pages)
    assert torch.equal(tails, native.tails)


def test_gradients_are_refused():
    native, _, attend = given()
    with pytest.raises(ShapeError, match="no backward"):
        native.op.attend(**attend | {"q": attend["q"].clone().requires_grad_()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: 24}, "page_size is 24; expected a multiple of 16"),
        ({0: 48}, "page_size is 48; keys with scales per channel need a multiple of 32"),
        ({1: 0}, "kv_heads is 0; expected 1 to"),
        ({2: 72}, "key_dim is 72; expected a multiple of 16 from 16 to 256"),
        ({3: 272}, "value_dim is 272"),
        ({4: "int7"}, "key scheme is 'int7'; this backend has no such"),
        ({8: "int8:channel"}, "values have scales per token"),
        ({4: "turboquant:4"}, "key_codebook is missing"),
        ({4: "turboquant:4", 5: torch.full((16,), torch.nan), 6: torch.zeros(2, 64, 64)}, r"key_codebook\[0\] is nan"),
        ({4: "turboquant:4", 5: torch.zeros(8), 6: torch.zeros(2, 64, 64)}, r"key_codebook has shape \[8\]; expected \[16\]"),
        ({8: "fp8", 11: torch.tensor([1.0, -1.0])}, r"value_scale\[1\] is -1; expected a positive number"),
    ],
)
def test_the_native_ops_check_what_a_cache_is(change, message):
    arguments = [32, 2, 64, 64, "int8:channel", None, None, None, "int8:token", None, None, None, torch.bfloat16]
    assert _native.ops.kv_sizes(*arguments).tolist() == [8576, 8192]
    for at, value in change.items():
        arguments[at] = value
    with pytest.raises(RuntimeError, match=re.escape(message) if "\\" not in message else message):
        _native.ops.kv_sizes(*arguments)


@pytest.mark.parametrize(
    ("pair", "more", "code"),
    [
        ("turboquant:4", {"page": 24}, "shape.multiple"),
        ("bf16", {"dim": 112}, "kv.head_dim"),
        ("turboquant:2.5", {}, "kv.scheme"),
        ("turboquant:3:unbiased", {}, "kv.scheme"),
        ("turboquant:5", {}, "kv.scheme"),
    ],
)
def test_kernels_refuse_what_they_do_not_serve(pair, more, code):
    machine = Machine.detect()
    for kernel in kv_kernels.KERNELS:
        if kernel._level in LEVELS:
            assert code in {refusal.code for refusal in kernel.refusals(spec_of(pair, **more), machine)}
            assert kernel.refusals(spec_of("k4v3"), machine) == ()


def test_a_cache_for_another_dtype_is_told():
    op = CpuKV(spec_of("bf16", dtype="fp16"), KVParams(), LEVELS[-1])
    k, v = tokens(spec_of("bf16"), 3)
    with pytest.raises(HalError, match="prepared for torch.float16"):
        op.append(torch.zeros(1, op.page_bytes, dtype=torch.uint8), k, v, torch.arange(3))
