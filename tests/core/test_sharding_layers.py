"""A rank's ops, from planned layers of a checkpoint: weights are the whole layer's bit for bit, and so are, up to rounding, the outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hal_core.canonical import QuantizedTensor
from hal_core.errors import FormatError, HalError, ShapeError
from hal_core.formats.base import Checkpoint, Entry
from hal_core.integrations.vllm.options import HalOptions
from hal_core.integrations.vllm.served import ServedCheckpoint, fused_parts
from hal_core.ops import Routed
from hal_core.plan import plan_checkpoint
from hal_core.reference.linear import ReferenceEmbeddingOp, ReferenceLinearOp
from hal_core.reference.moe import ReferenceMoEOp
from hal_core.schemes import WeightScheme
from hal_core.sharding import Cut, ExpertsShare, RowsPart, rank_cut, rank_embedding, rank_experts, rank_linears
from hal_core.testing.data import random_weight

K, HEADS, KEYS, SIZE = 128, 4, 2, 32
INNER, EXPERTS = 96, 5


class InMemory(Checkpoint):
    """Canonical tensors and plain ones by published name."""

    format, path, files = "memory", Path("memory"), ()

    def __init__(self, tensors, **config):
        self.tensors = tensors
        self.config = {"num_hidden_layers": 1, "num_experts_per_tok": 2, "num_experts": EXPERTS, **config}
        self.entries = {
            name: Entry(name, tuple(t.shape), getattr(t, "scheme", None) or WeightScheme("fp32"), 1) for name, t in tensors.items()
        }  # fmt: skip

    def read(self, name):
        return self.tensors[name]

    def load(self, name):
        held = self.tensors[name]
        return held.values if isinstance(held, QuantizedTensor) else held


def weights(scheme, *shape, seed=0):
    return random_weight(WeightScheme.parse(scheme), shape, torch.Generator().manual_seed(seed))


def attention(schemes=("int4:g32:zero",) * 3, prefix="model.layers.0.self_attn"):
    rows = (HEADS * SIZE, KEYS * SIZE, KEYS * SIZE)
    return {f"{prefix}.{r}_proj.weight": weights(s, n, K, seed=i) for i, (r, s, n) in enumerate(zip("qkv", schemes, rows, strict=True))}


def block(scheme="int4:g32:zero", prefix="model.layers.0.mlp.experts"):
    shapes = {"gate_proj": (INNER, K), "up_proj": (INNER, K), "down_proj": (K, INNER)}
    return {f"{prefix}.{e}.{r}.weight": weights(scheme, *s, seed=e) for e in range(EXPERTS) for r, s in shapes.items()}


def outputs(asked, x):
    return torch.cat([ReferenceLinearOp(spec, w).apply(x) for spec, w in asked], dim=-1)


@pytest.mark.parametrize(
    "schemes", [("int4:g32:zero",) * 3, ("int4:g32:zero:act_order",) * 3, ("int8:tensor",) * 3, ("int4:g32", "int8:channel", "fp32")]
)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_columns_of_all_ranks_are_those_of_the_whole(schemes, degree):
    served = ServedCheckpoint(InMemory(attention(schemes)), "fp32", "exact")
    parts = served.take("model.layers.0.self_attn.qkv_proj", [f"model.layers.0.self_attn.{r}_proj" for r in "qkv"])
    x = torch.randn(5, K)
    whole = [outputs(rank_linears(served.checkpoint, [RowsPart(p, Cut.all_of(p.spec.n))], Cut.all_of(K), "exact", None), x) for p in parts]
    for rank in range(degree):
        sizes = (HEADS * SIZE // degree, max(SIZE, KEYS * SIZE // degree), max(SIZE, KEYS * SIZE // degree))
        cuts = [rank_cut(p.module, p.spec.n, size, rank, degree) for p, size in zip(parts, sizes, strict=True)]
        bias = torch.arange(float(sum(sizes)))
        mine = [RowsPart(p, c) for p, c in zip(parts, cuts, strict=True)]
        asked = rank_linears(served.checkpoint, mine, Cut.all_of(K), "exact", bias)
        wanted = torch.cat([w[:, c.start : c.stop] for w, c in zip(whole, cuts, strict=True)], dim=-1)
        assert torch.allclose(outputs(asked, x), wanted + bias, rtol=1e-6, atol=1e-5)
        assert len(asked) == (1 if schemes[0] == "int4:g32:zero" else 3)
        stored = [served.checkpoint.tensors[p.names("weight")[0]].dequantize()[c.start : c.stop] for p, c in zip(parts, cuts, strict=True)]
        assert torch.equal(torch.cat([w.weight.dequantize() for _, w in asked]), torch.cat(stored))


def test_numerics_of_a_rank_name_its_own_groups():
    (planned,) = plan_checkpoint(InMemory({"model.layers.0.mlp.down_proj.weight": weights("int4:g128", 64, 192)}), "bf16", "int8")
    ((spec, _),) = rank_linears(
        InMemory({"model.layers.0.mlp.down_proj.weight": weights("int4:g128", 64, 192)}),
        [RowsPart(planned, Cut.all_of(64))],
        Cut(96, 192, 192, 96),
        "int8",
        None,
    )
    assert (spec.k, str(spec.weights)) == (96, "int4:g32")
    assert {str(a) for a in spec.numerics.activations} == {"int8:token", "int8:g128", "int8:g32"}


def experts(share):
    checkpoint = InMemory(block())
    (planned,) = plan_checkpoint(checkpoint, "fp32", "exact")
    return rank_experts(checkpoint, planned, share, "exact", torch.float32)


def summed(found, x, routing, expert_map=None):
    spec, held = found
    return ReferenceMoEOp(spec, held).apply(x, routing, expert_map=expert_map)


def test_experts_of_all_ranks_add_up_to_the_whole():
    x, ids = torch.randn(7, K), torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(7)]).to(torch.int32)
    routing = Routed(ids, torch.rand(7, 2))
    whole = summed(experts(ExpertsShare(tuple(range(EXPERTS)), Cut.all_of(INNER))), x, routing)
    halves = [experts(ExpertsShare(tuple(range(EXPERTS)), rank_cut("i", INNER, 48, rank, 2))) for rank in range(2)]
    assert [str(half[0].down) for half in halves] == ["int4:g16:zero"] * 2
    assert torch.allclose(sum(summed(half, x, routing) for half in halves), whole, rtol=1e-5, atol=1e-5)
    # shares of another order than the global one
    spread = 0
    for held in ((4, 0), (1, 3, 2)):
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[list(held)] = torch.arange(len(held), dtype=torch.int32)
        spread = spread + summed(experts(ExpertsShare(held, Cut.all_of(INNER))), x, routing, expert_map)
    assert torch.allclose(spread, whole, rtol=1e-6, atol=1e-6)
    with pytest.raises(ShapeError, match="at most the number of experts"):
        experts(ExpertsShare((), Cut.all_of(INNER)))


def test_the_bias_of_down_is_added_by_one_rank_alone():
    fused = {
        "model.layers.0.mlp.experts.gate_up_proj": weights("mxfp4:g32", EXPERTS, 2 * INNER, K),
        "model.layers.0.mlp.experts.down_proj": weights("mxfp4:g32", EXPERTS, K, INNER),
    }
    checkpoint = InMemory(
        fused
        | {
            "model.layers.0.mlp.experts.gate_up_proj_bias": torch.randn(EXPERTS, 2 * INNER),
            "model.layers.0.mlp.experts.down_proj_bias": torch.randn(EXPERTS, K),
        }
    )
    for name, held in fused.items():
        e, n, k = held.shape
        checkpoint.entries[name] = Entry(name, (e, k, n), held.scheme, 1, fused=True)
    (planned,) = plan_checkpoint(checkpoint, "fp32", "exact")
    x, routing = torch.randn(3, K), Routed(torch.tensor([[0, 1], [2, 3], [4, 0]], dtype=torch.int32), torch.rand(3, 2))
    everyone = tuple(range(EXPERTS))
    whole = summed(rank_experts(checkpoint, planned, ExpertsShare(everyone, Cut.all_of(INNER)), "exact", torch.float32), x, routing)
    shares = [ExpertsShare(everyone, rank_cut("i", INNER, 32, rank, 3), adds_bias=rank == 0) for rank in range(3)]
    parts = [rank_experts(checkpoint, planned, share, "exact", torch.float32) for share in shares]
    assert [bool(weights.down_bias.any()) for _, weights in parts] == [True, False, False]
    assert torch.allclose(sum(summed(part, x, routing) for part in parts), whole, rtol=1e-5, atol=1e-5)


def test_rows_of_a_table():
    checkpoint = InMemory({"model.embed_tokens.weight": weights("int4:g32:zero", 50, K)})
    (planned,) = plan_checkpoint(checkpoint, "fp32", "exact")
    spec, table = rank_embedding(checkpoint, planned, Cut(32, 50, 50, 32), "exact")
    assert torch.equal(ReferenceEmbeddingOp(spec, table).lookup(torch.arange(18)), table.weight.dequantize())
    assert torch.equal(table.weight.dequantize(), checkpoint.tensors["model.embed_tokens.weight"].dequantize()[32:])
    with pytest.raises(ShapeError, match="a linear in the engine, embedding in the checkpoint"):
        rank_linears(checkpoint, [RowsPart(planned, Cut.all_of(50))], Cut.all_of(K), "exact", None)


# The checkpoint as an engine sees it


def test_layers_are_found_under_the_engines_names():
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    served = ServedCheckpoint(
        InMemory(attention(prefix="lm.layers.0.self_attn")), "fp32", "exact", lambda name: name.replace("lm.", "model.", 1)
    )
    parts = fused_parts("model.layers.0.self_attn.qkv_proj", packed)
    assert parts[0] == "model.layers.0.self_attn.q_proj"
    assert fused_parts("model.layers.0.mlp.down_proj", packed) == ("model.layers.0.mlp.down_proj",)
    assert served.take("model.layers.0.mlp.down_proj", ("model.layers.0.mlp.down_proj",)) == ()
    with pytest.raises(FormatError, match=r"parameter lm\.layers\.0\.self_attn\.q_proj\.weight: quantized, and the engine's model has no"):
        served.check_all_taken(whole_model=True)
    served.check_all_taken(whole_model=False)
    assert [op.spec.n for op in served.take("model.layers.0.self_attn.qkv_proj", parts)] == [128, 64, 64]
    served.check_all_taken(whole_model=True)
    assert served.hidden_names() == {f"lm.layers.0.self_attn.{r}_proj.weight" for r in "qkv"}


def test_a_part_that_is_missing_and_one_that_is_plain():
    tensors = attention(("int4:g32", "fp32", "int4:g32"))
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"].values
    served = ServedCheckpoint(InMemory(tensors), "fp32", "exact")
    parts = [f"model.layers.0.self_attn.{r}_proj" for r in "qkv"]
    found = served.take("model.layers.0.self_attn.qkv_proj", parts)
    assert [op.spec.weights.quantized for op in found] == [True, False, True]
    assert "model.layers.0.self_attn.k_proj.weight" in served.hidden_names()
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(FormatError, match=r"k_proj\.weight: missing"):
        ServedCheckpoint(InMemory(tensors), "fp32", "exact").take("model.layers.0.self_attn.qkv_proj", parts)


def test_surplus_and_missing_experts_are_named():
    tensors = block()
    extra = tensors | {"model.layers.0.mlp.experts.3.up_proj.bias": torch.zeros(INNER)}
    with pytest.raises(FormatError, match=r"experts\.3\.up_proj\.bias: of quantized experts, which have no place for it"):
        ServedCheckpoint(InMemory(extra), "fp32", "exact")
    del tensors["model.layers.0.mlp.experts.2.down_proj.weight"]
    with pytest.raises(FormatError, match=r"experts\.2\.down_proj"):
        ServedCheckpoint(InMemory(tensors), "fp32", "exact")


def test_layers_beyond_the_model_and_of_other_ranks_are_passed_over():
    served = ServedCheckpoint(InMemory(attention(prefix="model.layers.7.self_attn")), "fp32", "exact")
    served.check_all_taken(whole_model=True)  # a drafting head
    assert served.below("model.layers.7") == "model.layers.7.self_attn.q_proj"
    assert served.below("model.layers.70") is None
    assert served.tied_embedding() is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hal": {"polcy": "auto"}}, "'polcy'.*unknown; use policy, numerics, kv_cache"), ({"hal": 3}, "give a mapping"),
        ({"hal": {"numerics": None}}, "not a text"), ({"hal": {"numerics": "int7"}}, "int7"), ({"hal": {"policy": "demand:cpu"}}, "demand"),
    ],
)  # fmt: skip
def test_options_that_are_none(given, words):
    with pytest.raises(HalError, match=words):
        HalOptions.of(given)


def test_options(monkeypatch):
    assert HalOptions.of(None) == HalOptions.of({"other": 1}) == HalOptions()
    options = HalOptions.of({"hal": {"policy": "require:reference", "numerics": "exact", "kv_cache": "int8:token"}})
    assert (str(options.chosen_policy), options.kv_cache) == ("require:reference", "int8:token")
    monkeypatch.setenv("HAL_POLICY", "prefer:reference")
    assert (str(options.chosen_policy), str(HalOptions().chosen_policy)) == ("require:reference", "prefer:reference")
