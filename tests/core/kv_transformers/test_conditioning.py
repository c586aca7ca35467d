"""Shifted and scaled keys: the same attention, less lost by quantizers with one scale a vector."""

from __future__ import annotations

import pytest
import torch
from core.kv_transformers import models

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from hal_core.integrations.transformers import KVCache  # noqa: E402
from hal_core.integrations.transformers_kv_conditioning import LEAST_TOKENS, Conditioning  # noqa: E402
from hal_core.integrations.transformers_kv_simulated import simulated_cache  # noqa: E402
from hal_core.kv.scheme import parse_pair  # noqa: E402

POLICY = "require:reference"


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_it_leaves_attention_as_it_is(name):
    """Also under sinks and soft caps, where the mean stays, and for the tokens of later calls."""
    model = models.model(name)
    ids, mask = models.prompts((40, 33))
    options = {"do_sample": False, "max_new_tokens": 20, "output_logits": True, "return_dict_in_generate": True}
    with torch.inference_mode():
        wanted = model.generate(ids, attention_mask=mask, **options)
        cache = KVCache(model, "fp32", policy=POLICY, condition=True)
        found = model.generate(ids, attention_mask=mask, cache=cache, **options)
    found, wanted = torch.stack(found.logits), torch.stack(wanted.logits)
    assert cache.report()["conditioned"] == 3
    assert float((found - wanted).norm() / wanted.norm()) < 2e-5
    shifts = [bool(layer.conditioning.shift.any()) for layer in cache.layers]
    assert shifts == [name not in ("gemma2", "gpt_oss")] * 3


def skewed(tokens, heads=2, dim=64):
    """Keys with a common offset and channels of unlike sizes, and queries that weigh the small ones."""
    sizes = torch.logspace(-1, 1, dim)[torch.randperm(dim)]
    keys = (torch.randn(tokens, heads, dim) + 3 * torch.randn(heads, dim)) * sizes
    return keys, torch.randn(tokens, 2 * heads, dim) / sizes


def test_errors_of_logits_are_several_times_smaller():
    keys, queries = skewed(200)
    conditioning = Conditioning.measured(keys[:64], queries[:64], shifted=True)

    def error(k, q):
        from hal_core.kv.quantizer import quantizer
        from hal_core.spec import KVCacheSpec

        of_keys = quantizer(KVCacheSpec(4, 2, 64, 32, *parse_pair("turboquant:4")), "keys")
        wrong = of_keys.error(k)
        return float(torch.einsum("nhgd,mhd->hgnm", q.reshape(len(q), 2, 2, 64), wrong).square().mean())

    assert error(conditioning.keys(keys), conditioning.queries(queries)) < 0.2 * error(keys, queries)


def test_logits_differ_by_a_constant_of_each_query():
    keys, queries = skewed(90)
    conditioning = Conditioning.measured(keys, queries, shifted=True)

    def logits(k, q):
        return torch.einsum("nhgd,mhd->hgnm", q.double().reshape(90, 2, 2, 64), k.double())

    difference = logits(conditioning.keys(keys), conditioning.queries(queries)) - logits(keys, queries)
    assert float((difference - difference.mean(-1, keepdim=True)).abs().max()) < 1e-4 * float(difference.abs().max())


def test_few_tokens_and_dead_channels_are_left_alone():
    keys, queries = skewed(LEAST_TOKENS)
    assert Conditioning.measured(keys[:-1], queries, shifted=True) is None
    keys[:, :, 3], queries[:, :, 5] = 0, 0
    keys[:, :, 7] = 2.0
    made = Conditioning.measured(keys, queries, shifted=True)
    assert bool(torch.isfinite(made.scale).all() and (made.scale > 0).all())
    assert bool(torch.isfinite(made.keys(keys)).all() and torch.isfinite(made.queries(queries)).all())


def test_it_is_measured_again_for_another_batch_and_kept_while_tokens_are():
    model = models.model("llama")
    cache = KVCache(model, "turboquant:4", policy=POLICY)
    with torch.inference_mode():
        model(models.prompts((50,))[0], cache=cache)
        first = cache.layers[0].conditioning
        model(models.prompts((40,), 9)[0], cache=cache)
        assert cache.layers[0].conditioning is first
        model(models.prompts((50,), 3)[0], cache=cache.emptied())
        assert not torch.equal(cache.layers[0].conditioning.shift, first.shift)
        model(models.prompts((5,), 3)[0], cache=cache.emptied())
        assert cache.report()["conditioned"] == 0


@pytest.mark.parametrize(("scheme", "conditioned"), [("turboquant:4", 3), ("int4:token", 3), ("int4", 0), ("fp8", 0), ("bf16", 0)])
def test_it_is_for_keys_with_one_scale_a_vector(scheme, conditioned):
    model = models.model("llama")
    cache = KVCache(model, scheme, policy=POLICY)
    with torch.inference_mode():
        model(models.prompts((50,))[0], cache=cache)
    assert cache.report()["conditioned"] == conditioned


def test_the_simulation_does_the_same():
    class Attention(torch.nn.Module):
        layer_idx, is_causal = 0, True

    model = models.model("llama")
    query, key, value = (torch.randn(2, heads, 70, 16) for heads in (4, 2, 2))
    key[..., 5] += 6
    with simulated_cache(model, *parse_pair("turboquant:4"), prompt=40):
        wanted = transformers.AttentionInterface()["hal_simulated"](Attention(), query, key, value, None, scaling=0.3)[0]
    layer, found = KVCache(model, "turboquant:4", policy=POLICY).layers[0], []
    sizes = [40, *([1] * 30)]
    for q, k, v in zip(*(x.split(sizes, dim=2) for x in (query, key, value)), strict=True):
        found.append(transformers.AttentionInterface()["hal"](Attention(), q, *layer.update(k, v), None, scaling=0.3)[0])
    found = torch.cat(found, dim=1)
    assert float((found - wanted).norm() / wanted.norm()) < 2e-6
