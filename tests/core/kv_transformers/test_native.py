"""The CPU backend's KV kernels behind the same cache: chosen by the policy, equal to the reference within their bound."""

from __future__ import annotations

import pytest
import torch
from core.kv_transformers import models

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("hal_backend_cpu", reason="the hal-backend-cpu wheel is not installed")

from hal_core.integrations.transformers import KVCache  # noqa: E402


@pytest.fixture(scope="module")
def model():
    models.ARCHITECTURES["llama_64"] = ("LlamaForCausalLM", {"hidden_size": 128, "head_dim": 64, "num_key_value_heads": 2})
    yield models.model("llama_64")
    del models.ARCHITECTURES["llama_64"]


def logits(model, scheme, policy):
    """Logits of a padded prompt, a chunk and single tokens, through one cache."""
    ids, mask = models.prompts((90, 61))
    cache, found = KVCache(model, scheme, policy=policy), []
    with torch.inference_mode():
        start = 0
        for part in ids.split((70, 15, 1, 1, 1, 1, 1), dim=1):
            start += part.shape[1]
            found.append(model(part, attention_mask=mask[:, :start], cache=cache).logits)
    return torch.cat(found, dim=1)[mask.bool()], cache


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int8", "int4", "turboquant:4", "k4v3"])
def test_native_kernels_serve_where_they_can_and_agree_with_the_reference(model, scheme):
    found, cache = logits(model, scheme, "auto")
    assert all(name.startswith("cpu.kv") for name in cache.kernels()), cache.kernels()
    wanted, _ = logits(model, scheme, "require:reference")
    exact, _ = logits(model, "fp32", "require:reference")
    # some codes fall otherwise where sums do: a part of what the scheme itself changes
    assert float((found - wanted).norm()) < 0.1 * float((wanted - exact).norm()) + 1e-5 * float(wanted.norm())


def test_a_scheme_that_they_do_not_serve_goes_to_the_reference(model):
    _, cache = logits(model, "turboquant:2.5", "auto")
    assert cache.kernels() == {"reference.kv": 3}
    refused = [candidate for candidate in cache.layers[0].selection.candidates if candidate.kernel.startswith("cpu.kv")]
    assert refused
    assert all("kv.scheme" in {refusal.code for refusal in candidate.refusals} for candidate in refused)


def test_beams_go_through_native_pages(model):
    ids, mask = models.prompts((40, 33))
    options = {"attention_mask": mask, "max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    with torch.inference_mode():
        wanted = model.generate(ids, **options)
        found = model.generate(ids, **options, cache=KVCache(model, "fp32", policy="require:cpu"))
    assert torch.equal(found, wanted)
