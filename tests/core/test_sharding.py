"""Which ranks a layer can be cut for, and what one rank asks for; refusals name layer, dimension and group."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal_core.errors import SettingError
from hal_core.kv.scheme import KVScheme
from hal_core.refusal import Refusal
from hal_core.schemes import WeightScheme
from hal_core.sharding import Heads, Shard, check_degree, legal_degrees, shard
from hal_core.spec import EmbeddingSpec, KVCacheSpec, LinearSpec, MoESpec

ORDERED, LEVELS = WeightScheme.parse("int4:g32:act_order"), WeightScheme.parse("int4:g32/256:min")
G128, BLOCK = WeightScheme.parse("int4:g128"), WeightScheme.parse("fp8_e4m3:b128x128")
HEADS = Heads(32, 4)


def linear(n, k, scheme=G128, **more):
    return LinearSpec(n, k, scheme, **more)


def sizes(found):
    assert isinstance(found, Shard), found
    spec = found.spec
    return (spec.n, spec.k) if isinstance(spec, LinearSpec) else (spec.hidden, spec.intermediate)


@pytest.mark.parametrize(
    ("module", "spec", "degree", "expected"),
    [
        ("m.self_attn.q_proj", linear(4096, 4096), 4, (1024, 4096)),
        ("m.self_attn.k_proj", linear(512, 4096), 4, (128, 4096)),
        ("m.self_attn.v_proj", linear(512, 4096), 8, (128, 4096)),  # four key heads, each on two ranks
        ("m.self_attn.o_proj", linear(4096, 4096), 4, (4096, 1024)),
        ("m.mlp.gate_proj", linear(11008, 4096), 2, (5504, 4096)),
        ("m.mlp.gate_up_proj", linear(22016, 4096), 4, (5504, 4096)),
        ("m.mlp.down_proj", linear(4096, 11008), 2, (4096, 5504)),
        ("lm_head", linear(32000, 4096), 4, (8000, 4096)),
        ("m.mlp.router", linear(64, 4096), 4, (64, 4096)),
    ],
)
def test_the_ordinary_rules(module, spec, degree, expected):
    assert sizes(shard(module, spec, degree, HEADS)) == expected
    assert shard(module, spec, 1, HEADS).spec == spec


@pytest.mark.parametrize(
    ("module", "spec", "degree", "asked", "found", "legal"),
    [
        (
            "l.mlp.down_proj",
            linear(4096, 650),
            2,
            "l.mlp.down_proj: k=650 in 2 shards",
            "parts of 325 cut groups of 128 into groups of 1",
            "1 ",
        ),
        ("l.mlp.up_proj", linear(200, 4096, BLOCK), 4, "n=200 in 4", "parts of 50 cut groups of 128 into groups of 2", "1, 2, 5, 10"),
        ("l.mlp.up_proj", linear(100, 4096), 3, "n=100 in 3", "100 is not a multiple of 3", "1, 2, 4, 5, 10"),
        ("l.self_attn.q_proj", linear(4096, 4096), 3, "n=4096 in 3", "32 heads are not a multiple of 3", "1, 2, 4, 8, 16"),
        ("l.self_attn.o_proj", linear(4096, 4096), 3, "k=4096 in 3", "32 heads", "1, 2, 4, 8, 16"),
        ("l.self_attn.k_proj", linear(512, 4096), 6, "n=512 in 6", "4 key heads neither divide 6", "1, 2, 4, 8, 12, 16"),
        ("l.mlp.down_proj", linear(64, 96, ORDERED), 16, "k=96 in 16", "parts of 6 cut groups of 32 into groups of 2", "1, 2, 3, 4, 6, 8"),
        ("l.mlp.down_proj", linear(64, 768, LEVELS), 16, "k=768 in 16", "parts of 48 cut groups of 32", "1, 2, 3, 4, 6, 8, 12"),
    ],
)
def test_illegal_degrees_name_dimension_and_group_and_the_legal_ones(module, spec, degree, asked, found, legal):
    refusal = shard(module, spec, degree, HEADS)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "shape.shard"
    assert asked in refusal.asked
    assert found in refusal.found
    assert f"degrees {legal}" in refusal.fix


@pytest.mark.parametrize(
    ("module", "spec", "degree", "held"),
    [
        ("l.mlp.down_proj", linear(4096, 640), 2, "int4:g64"),
        ("l.mlp.down_proj", linear(4096, 640), 5, "int4:g128"),
        ("l.mlp.up_proj", linear(896, 4096, BLOCK), 2, "fp8_e4m3:b64x128"),
        ("l.mlp.down_proj", linear(4096, 4096, WeightScheme.parse("int4:g128:act_order")), 2, "int4:g64:act_order"),
        ("l.mlp.down_proj", linear(4096, 2560, LEVELS), 4, "int4:g32/128:min"),
        ("l.mlp.down_proj", linear(4096, 96, WeightScheme.parse("int4:channel")), 2, "int4:channel"),
    ],
)
def test_a_cut_through_a_group_makes_finer_groups_and_says_so(module, spec, degree, held):
    found = shard(module, spec, degree, HEADS)
    assert isinstance(found, Shard), found
    assert str(found.spec.weights) == held
    assert bool(found.notes) == (found.spec.weights != spec.weights)
    assert all(f"held as {held} (exact)" in note for note in found.notes)


def test_experts_are_cut_at_the_intermediate_size():
    spec = MoESpec(128, 8, 2048, 768, up=G128, down=G128, gate=G128)
    assert sizes(shard("l.mlp.experts", spec, 2)) == (2048, 384)
    assert legal_degrees("l.mlp.experts", spec, Heads()) == (1, 2, 3, 4, 6, 8, 12, 16)
    quarter = shard("l.mlp.experts", spec, 4)
    assert (str(quarter.spec.up), str(quarter.spec.down)) == ("int4:g128", "int4:g64")
    assert quarter.notes == ("int4:g128 cut through groups, held as int4:g64 (exact)",)
    odd = replace(spec, intermediate=6 * 128 + 2, gate=None, down=replace(G128, act_order=True))
    refusal = shard("l.mlp.experts", replace(odd, down=G128), 2)
    assert refusal.asked == "l.mlp.experts down: intermediate=770 in 2 shards"
    assert refusal.found == "parts of 385 cut groups of 128 into groups of 1"
    assert str(shard("l.mlp.experts", odd, 2).spec.down) == "int4:g55:act_order"


def test_tables_are_padded_and_what_has_no_rule_stays_whole():
    table = shard("model.embed_tokens", EmbeddingSpec(257, 64, G128), 2)
    assert (table.spec.rows, table.notes) == (129, ("257 rows padded to 258",))
    cache = KVCacheSpec(8, 2, 64, 16, KVScheme("bf16"), KVScheme("bf16"))
    assert shard("l.self_attn.cache", cache, 2) == Shard(cache, "whole on each rank", ("no rule for cache",))


def test_heads_of_a_config():
    assert Heads.of_config({"num_attention_heads": 32, "num_key_value_heads": 4}) == HEADS
    assert Heads.of_config({"num_attention_heads": 32}) == Heads(32, 32)
    assert Heads.of_config({"num_attention_heads": "32", "num_key_value_heads": -1}) == Heads()


@pytest.mark.parametrize("degree", [0, -1, 1025, 1 << 80])
def test_degrees_that_are_none(degree):
    with pytest.raises(SettingError, match="not between 1 and 1024"):
        check_degree(degree)


@given(
    st.sampled_from(("q_proj", "k_proj", "o_proj", "down_proj", "up_proj", "gate_up_proj", "other")),
    st.integers(1, 64), st.integers(1, 64), st.sampled_from((32, 64, 128)), st.integers(1, 64),
)  # fmt: skip
def test_a_cut_holds_all_in_whole_groups(role, n, k, group, degree):
    spec = linear(n * 64, k * 64, WeightScheme.parse(f"int4:g{group}"))
    found = shard(f"l.{role}", spec, degree, Heads())
    if isinstance(found, Refusal):
        assert str(degree) not in found.fix.partition("degrees ")[2].partition(" (")[0].split(", ")
        return
    part = found.spec
    assert (part.n * degree, part.k) == (spec.n, spec.k) or (part.n, part.k * degree) == (spec.n, spec.k) or part == spec
    assert part.k == spec.k or part.k % part.weights.granularity.group == 0
    assert group % part.weights.granularity.group == 0
