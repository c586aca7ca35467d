"""A cache that is appended in place gives what transformers' own gives, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from core.kv_transformers import models

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from hal_core.integrations.transformers_growing import growing_cache  # noqa: E402

OPTIONS = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 4, "do_sample": False},
    "several": {"num_return_sequences": 3, "do_sample": True},
}


def generated(model, ids, mask, cache, options):
    torch.manual_seed(5)
    with torch.inference_mode():
        return model.generate(
            ids, attention_mask=mask, cache=cache, output_logits=True, return_dict_in_generate=True, max_new_tokens=300, **options
        )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generation_is_equal_beyond_the_first_buffers(name, options):
    model = models.model(name)
    ids, mask = models.prompts((19, 30))
    wanted = generated(model, ids, mask, None, OPTIONS[options])
    found = generated(model, ids, mask, growing_cache(model), OPTIONS[options])
    assert torch.equal(found.sequences, wanted.sequences)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.logits, wanted.logits, strict=True))


def test_cropped_copied_and_reset_caches_hold_their_own_tokens():
    model = models.model("llama")
    ids, _ = models.prompts((40,))
    with torch.inference_mode():
        whole = model(ids).logits
        cache = growing_cache(model)
        model(ids[:, :30], cache=cache)
        twin = copy.deepcopy(cache)
        cache.crop(-10)
        held = cache.layers[0].keys
        model(ids[:, :10], cache=cache)  # overwrites what was cropped, in this cache alone
        assert held.shape[-2] == 20
        assert cache.get_seq_length() == 30
        torch.testing.assert_close(model(ids[:, 30:], cache=twin).logits, whole[:, 30:], rtol=1e-4, atol=1e-4)
        twin.reset()
        torch.testing.assert_close(model(ids, cache=twin).logits, whole, rtol=1e-4, atol=1e-4)


def test_keys_that_want_gradients_are_not_written_in_place():
    model = models.model("llama")
    ids, _ = models.prompts((12,))
    cache = growing_cache(model)
    model(ids[:, :8], cache=cache)
    model(ids[:, 8:], cache=cache).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
