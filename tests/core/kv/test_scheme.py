"""Schemes as text and as values, what a vector costs in bytes, and the rules of a cache's spec."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core import strategies as gen
from hypothesis import given
from hypothesis import strategies as st

from hal_core.errors import HalError, ValueDecodeError
from hal_core.jsonable import dumps, loads
from hal_core.kv.op import KVParams
from hal_core.kv.scheme import KV_SCHEMES, KVScheme, parse_pair
from hal_core.reference.kv import ReferenceKV
from hal_core.spec import KVCacheSpec

SPEC = KVCacheSpec(8, 2, 128, 32, KVScheme("bf16"), KVScheme("bf16"))


@pytest.mark.parametrize("scheme", KV_SCHEMES, ids=str)
def test_text_and_json_give_the_scheme_back(scheme):
    assert KVScheme.parse(str(scheme)) == scheme
    assert loads(KVScheme, dumps(scheme)) == scheme


@given(
    st.text(max_size=30)
    | st.sampled_from(("int8:", "turboquant", "turboquant:", "turboquant:4:", "turboquant:4:raw:x", "fp8:channel", "bf16:none:x"))
)
def test_other_texts_are_refused_or_round_trip(text):
    try:
        scheme = KVScheme.parse(text)
    except ValueDecodeError:
        return
    assert KVScheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("turboquant:0", "0.0 bits"), ("turboquant:9", "9.0 bits"), ("turboquant:2.3", "steps of a quarter"),
        ("turboquant:2.5:unbiased", "whole bits"), ("int8:raw", "scales per 'raw'"), ("int3", "use one of"), ("fp8:token", "scales per"),
        ("turboquant:4:fast", "variant 'fast'"),
    ],
)  # fmt: skip
def test_the_reason_is_told(text, problem):
    with pytest.raises(ValueDecodeError, match=problem):
        KVScheme.parse(text)


@pytest.mark.parametrize(
    ("text", "keys", "values"),
    [
        ("turboquant:4", "turboquant:4", "turboquant:4"), ("int8", "int8", "int8:token"), ("k4v3", "turboquant:4", "turboquant:3"),
        ("k2.5v3.5", "turboquant:2.5", "turboquant:3.5"), ("k=int8,v=turboquant:4", "int8", "turboquant:4"),
        ("v=int4, k=fp8:head", "fp8:head", "int4:token"), ("int8:token", "int8:token", "int8:token"),
    ],
)  # fmt: skip
def test_pairs(text, keys, values):
    assert tuple(map(str, parse_pair(text))) == (keys, values)
    assert KVScheme.pair(text) == parse_pair(text)


@pytest.mark.parametrize("text", ["", "k=int8", "k=int8,k=int8", "k=int8,v=int8,x=int8", "k4", "k44v4v", "k4v9"])
def test_other_pairs_are_refused(text):
    with pytest.raises(ValueDecodeError):
        parse_pair(text)


@pytest.mark.parametrize(
    ("text", "sections"),
    [("turboquant:4", ((128, 4),)), ("turboquant:2.5", ((64, 3), (64, 2))), ("turboquant:2.25", ((32, 3), (96, 2))),
     ("turboquant:3.75:raw", ((96, 4), (32, 3))), ("turboquant:3:unbiased", ((128, 2),)), ("turboquant:1:unbiased", ((128, 0),))],
)  # fmt: skip
def test_splits_are_named_by_their_true_bits(text, sections):
    scheme = KVScheme.parse(text)
    assert scheme.sections(128) == sections
    spent = sum(channels * bits for channels, bits in sections) / 128 + (1 if scheme.variant == "unbiased" else 0)
    assert spent == scheme.bits


@pytest.mark.parametrize(
    ("text", "size"),
    [("turboquant:4", 66), ("turboquant:3", 50), ("turboquant:2", 34), ("turboquant:2.5", 44), ("turboquant:3:unbiased", 52), ("bf16", 256),
     ("fp32", 512), ("fp8", 128), ("int8", 136), ("int8:token", 130), ("int4", 80), ("int4:token", 68)],
)  # fmt: skip
def test_bytes_of_a_vector_of_128_channels(text, size):
    assert KVScheme.parse(text).vector_bytes(128) == size


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("scheme", KV_SCHEMES, ids=str)
def test_pages_are_within_three_percent_of_the_arithmetic(scheme, dim):
    spec = KVCacheSpec(8, 8, dim, 32, scheme, scheme)
    held = ReferenceKV().prepare(spec, KVParams()).page_bytes / spec.page_size
    assert held == pytest.approx(spec.token_bytes, rel=0.03)


@given(gen.kv_spec())
def test_specs_keep_their_json_and_values_are_never_per_channel(spec):
    assert loads(KVCacheSpec, dumps(spec)) == spec
    assert not spec.values.grouped
    assert str(spec.keys) in str(spec)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"keys": KVScheme("int8"), "page_size": 48}, "not a multiple of 32"), ({"num_heads": 7}, "not a multiple of num_kv_heads"),
        ({"sink_tokens": 4}, "without a window"), ({"soft_cap": 0.0}, "not positive"), ({"window": 0}, "is not between 1"),
        ({"sink_tokens": -1, "window": 8}, "is not between"), ({"scales": "guessed"}, "unknown"), ({"seed": -1}, "not between 0"),
        ({"value_dim": 0}, "is not between 1"), ({"dtype": "fp8"}, "unknown"), ({"keys": "int8"}, "not a KVScheme"),
        ({"head_dim": 90, "keys": KVScheme.parse("turboquant:2.25")}, "22.5 channels at 3 bits"),
        ({"head_dim": 2, "keys": KVScheme.parse("turboquant:2")}, "too few"),
        ({"head_dim": 8, "keys": KVScheme.parse("turboquant:2.25")}, "a part of 2 channels"),
    ],
)  # fmt: skip
def test_specs_that_cannot_be(changes, problem):
    with pytest.raises(HalError, match=problem):
        replace(SPEC, **changes)
