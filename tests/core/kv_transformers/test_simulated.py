"""One forward with simulated quantization equals a decode of one token at a time through the packed pages."""

from __future__ import annotations

import pytest
import torch
from core.kv_transformers import models

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from hal_core.errors import SettingError  # noqa: E402
from hal_core.integrations.transformers import KVCache  # noqa: E402
from hal_core.integrations.transformers_kv_simulated import simulated_cache  # noqa: E402
from hal_core.kv.op import KVParams  # noqa: E402
from hal_core.kv.scheme import parse_pair  # noqa: E402
from hal_core.perplexity import cached_logits, measure  # noqa: E402

#: Two complete groups of 32 tokens and an open one.
TOKENS = 75
SCHEMES = (
    "fp32", "bf16", "int8", "int4", "int8:token", "int4:token", "turboquant:4", "turboquant:2.5", "turboquant:3:unbiased", "k4v3",
    "k=int4,v=turboquant:4",
)  # fmt: skip


def simulated(model, ids, scheme, **options):
    with torch.inference_mode(), simulated_cache(model, *parse_pair(scheme), **options):
        return model(input_ids=ids, use_cache=False).logits


def decoded(model, ids, scheme, step=1, **options):
    with torch.inference_mode():
        return cached_logits(model, ids, KVCache(model, scheme, policy="require:reference", **options), step)


class Attention(torch.nn.Module):
    """What an attention module tells of itself."""

    layer_idx, is_causal = 0, True


def attended(scheme, query, key, value, step):
    """Outputs ``[B, T, Hq, Dv]`` of one layer, ``step`` tokens at a time, through a cache or (step None) simulated."""
    model = models.model("llama")
    if step is None:
        with simulated_cache(model, *parse_pair(scheme)):
            function = transformers.AttentionInterface()["hal_simulated"]
            return function(Attention(), query, key, value, None, scaling=0.3)[0]
    layer, found = KVCache(model, scheme, policy="require:reference").layers[0], []
    function = transformers.AttentionInterface()["hal"]
    for q, k, v in zip(*(x.split(step, dim=2) for x in (query, key, value)), strict=True):
        found.append(function(Attention(), q, *layer.update(k, v), None, scaling=0.3)[0])
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_attention_equals_that_of_a_decode_token_by_token(scheme):
    """On the same queries, keys and values, some channels of them large: no rounding can fall otherwise."""
    query, key, value = (torch.randn(2, heads, TOKENS, 16) for heads in (4, 2, 2))
    key[..., 3] *= 8
    key[:, :, :, 5] += 6
    value[:, 1] *= 20
    found = attended(scheme, query, key, value, None)
    wanted = attended(scheme, query, key, value, 1)
    assert float((found - wanted).norm() / wanted.norm()) < 2e-6


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_predicts_as_in_a_decode_token_by_token(name, scheme):
    """Products of one row and of many differ in their last bits, and some codes with them: a part of what the scheme does."""
    model = models.model(name)
    ids = torch.randint(3, models.VOCAB, (2, TOKENS))
    plain = decoded(model, ids, "fp32", TOKENS)
    found, wanted = simulated(model, ids, scheme), decoded(model, ids, scheme)
    assert float((found - wanted).norm()) <= 0.1 * float((plain - wanted).norm()) + 1e-5 * float(wanted.norm())


def test_static_scales_reach_it():
    model = models.model("llama")
    ids = torch.randint(3, models.VOCAB, (1, TOKENS))
    params = {layer: KVParams(torch.tensor(0.02), torch.tensor(3.0), "calibrated") for layer in range(3)}
    found, wanted = simulated(model, ids, "fp8", params=params), decoded(model, ids, "fp8", params=params)
    assert torch.allclose(found, wanted, atol=1e-4 * float(wanted.abs().max()))
    assert not torch.allclose(found, simulated(model, ids, "fp8"), atol=1e-2 * float(wanted.abs().max()))


def test_scales_that_are_not_given_are_computed_from_the_same_tokens():
    model = models.model("llama")
    ids = torch.randint(3, models.VOCAB, (1, TOKENS))
    wanted = decoded(model, ids, "fp8", TOKENS)
    assert torch.allclose(simulated(model, ids, "fp8"), wanted, atol=1e-4 * float(wanted.abs().max()))


def test_groups_that_close_inside_a_forward_are_seen_quantized_by_it():
    """What a decode sees unquantized: a whole window in one forward is the harder case for keys scaled per channel."""
    model = models.model("llama")
    ids = torch.randint(3, models.VOCAB, (1, TOKENS))
    plain, stepped, whole = (decoded(model, ids, *given) for given in (("fp32",), ("int4",), ("int4", TOKENS)))
    assert float((whole - plain).norm()) > 1.02 * float((stepped - plain).norm())


def test_the_loss_of_a_text_is_the_same_by_either_path():
    model = models.model("llama")
    ids = torch.randint(3, models.VOCAB, (200,))
    cache = KVCache(model, "turboquant:3", policy="require:reference", condition=False)
    through = [measure(model, ids, 64, cache=cache.emptied, step=step) for step in (1, None, 16)]
    with simulated_cache(model, *parse_pair("turboquant:3")):
        through.append(measure(model, ids, 64))
    assert max(abs(loss.nll - through[0].nll) for loss in through) < 1e-5
    assert abs(measure(model, ids, 64).nll - through[0].nll) > 1e-3


def test_what_it_does_not_serve_is_refused():
    ids = torch.randint(3, models.VOCAB, (1, 20))
    for name, words in (("mistral_window", "sliding_window"), ("gemma2", "softcap"), ("gpt_oss", "s_aux")):
        with pytest.raises(SettingError, match=words):
            simulated(models.model(name), ids, "int8")
    model = models.model("llama")
    with pytest.raises(SettingError, match="mask or a cache"), simulated_cache(model, *parse_pair("int8")):
        model(ids[:, :1], cache=filled(model), use_cache=True)
    assert model.config._attn_implementation == "sdpa"


def filled(model):
    cache = transformers.DynamicCache(config=model.config)
    shape = (1, 2, 5, 16)
    for layer in range(3):
        cache.update(torch.zeros(shape), torch.zeros(shape), layer)
    return cache
