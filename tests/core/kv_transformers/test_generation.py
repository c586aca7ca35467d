"""``generate`` through packed pages: float32 pages equal transformers' own cache, packed ones are asked for no prefix."""

from __future__ import annotations

import pytest
import torch
from core.kv_transformers import models

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from hal_core.integrations.transformers import KVCache  # noqa: E402
from hal_core.kv.cache import PagedKVCache  # noqa: E402
from hal_core.reference.kv import ReferenceKVOp  # noqa: E402

NEW = 24
POLICY = "require:reference"


def generated(model, ids, mask, cache=None, **options):
    options = {"do_sample": False, "max_new_tokens": NEW, **options}
    torch.manual_seed(5)
    with torch.inference_mode():
        return model.generate(ids, attention_mask=mask, cache=cache, output_logits=True, return_dict_in_generate=True, **options)


def relative(found, wanted):
    found, wanted = torch.stack(found.logits).double(), torch.stack(wanted.logits).double()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", models.ARCHITECTURES)
@pytest.mark.parametrize("lengths", [(37,), (37, 20, 5)], ids=["one", "padded"])
def test_greedy_search_equals_transformers_own_cache(name, lengths):
    model = models.model(name)
    ids, mask = models.prompts(lengths)
    wanted = generated(model, ids, mask)
    cache = KVCache(model, "fp32", policy=POLICY)
    found = generated(model, ids, mask, cache)
    assert torch.equal(found.sequences, wanted.sequences)
    assert relative(found, wanted) < 1e-5
    # the last token is only predicted; padding takes no room
    assert [layer.tokens for layer in cache.layers] == [int(mask.sum()) + len(lengths) * (NEW - 1)] * 3


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 1.3, "top_p": 0.9},
        {"num_beams": 4},
        {"num_beams": 3, "do_sample": True},
        {"num_return_sequences": 3, "do_sample": True},
        {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True},
    ],
    ids=["sampling", "beams", "sampled_beams", "several", "all_beams"],
)
def test_sampling_and_beams_equal_transformers_own_cache(name, options):
    model = models.model(name)
    ids, mask = models.prompts((19, 30))
    wanted = generated(model, ids, mask, **options)
    found = generated(model, ids, mask, KVCache(model, "fp32", policy=POLICY), **options)
    assert torch.equal(found.sequences, wanted.sequences)


def test_beams_share_pages_until_they_part():
    model = models.model("llama")
    ids, mask = models.prompts((100,))
    cache = KVCache(model, "turboquant:4", policy=POLICY)
    with torch.inference_mode():
        model(ids, attention_mask=mask, cache=cache)
    alone = cache.used_bytes
    cache.batch_repeat_interleave(8)
    assert cache.used_bytes == alone
    with torch.inference_mode():
        model(torch.full((8, 1), 7), attention_mask=torch.ones(8, 101, dtype=torch.int64), cache=cache)
    pages = alone / cache.layers[0]._pages.op.page_bytes / 3
    assert cache.used_bytes / alone == pytest.approx((pages - 1 + 8) / pages)


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_assisted_decoding_crops_and_equals_greedy_search(name):
    model, assistant = models.model(name), models.model(name)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
    ids, mask = models.prompts((30,))
    wanted = generated(model, ids, mask)
    cache = KVCache(model, "fp32", policy=POLICY)
    crops = []
    crop = cache.crop
    cache.crop = lambda count: crops.append(count) or crop(count)
    found = generated(model, ids, mask, cache, assistant_model=assistant)
    assert torch.equal(found.sequences, wanted.sequences)
    assert any(count < 0 for count in crops)


def test_lookup_decoding_equals_greedy_search():
    model = models.model("llama")
    ids, mask = models.prompts((30,))
    ids = torch.cat((ids, ids), dim=1)
    mask = torch.ones_like(ids)
    wanted = generated(model, ids, mask)
    found = generated(model, ids, mask, KVCache(model, "fp32", policy=POLICY), prompt_lookup_num_tokens=4)
    assert torch.equal(found.sequences, wanted.sequences)


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "turboquant:4", "turboquant:2.5", "k4v3", "k=int8,v=turboquant:4", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_packed_schemes_generate_near_the_unquantized_cache(name, scheme):
    """The first step's logits, which no choice of token has parted yet; coarse schemes are held to their own error."""
    model = models.model(name)
    ids, mask = models.prompts((40, 33))
    wanted = generated(model, ids, mask, max_new_tokens=1)
    cache = KVCache(model, scheme, policy=POLICY)
    found = generated(model, ids, mask, cache, max_new_tokens=1)
    bound = {"int8": 0.05, "bf16": 0.02, "fp8": 0.15}.get(scheme, 0.8)
    assert 0 < relative(found, wanted) < bound
    wide = 3 * 2 * 2 * 16 * 2
    assert cache.token_bytes == wide if scheme == "bf16" else cache.token_bytes < 0.75 * wide


def test_no_step_asks_for_the_prefix_or_hands_it_to_the_model(monkeypatch):
    """What the integration asks of a kernel is counted. What a kernel does inside attend is its own: the reference reads a row's pages."""
    model = models.model("llama")
    ids, mask = models.prompts((50, 41))
    counts = {"materialize": 0, "attend": 0}
    given = []

    def counted(owner, name):
        method = getattr(owner, name)

        def call(self, *arguments, **options):
            counts[name] += 1
            return method(self, *arguments, **options)

        monkeypatch.setattr(owner, name, call)

    for owner in (PagedKVCache, ReferenceKVOp):
        counted(owner, "materialize")
    counted(ReferenceKVOp, "attend")
    monkeypatch.setattr(PagedKVCache, "materialize_pages", lambda *_, **__: pytest.fail("a prefix was asked for"))
    cache = KVCache(model, "turboquant:4", policy=POLICY)
    for layer in cache.layers:
        update = layer.update

        def watched(key, value, *rest, update=update, **options):
            found = update(key, value, *rest, **options)
            given.append((key.shape[2], found[0].shape[2], found[1].shape[2]))
            return found

        layer.update = watched
    generated(model, ids, mask, cache)
    assert counts == {"materialize": 0, "attend": 3 * NEW}
    assert given == [(50, 50, 50)] * 3 + [(1, 1, 1)] * 3 * (NEW - 1)


def test_a_model_that_has_held_a_packed_cache_serves_other_calls_as_before():
    for name in ("llama", "gemma2", "gpt_oss", "mistral_window"):
        model = models.model(name)
        ids, mask = models.prompts((25, 14))
        wanted = generated(model, ids, mask)
        KVCache(model, "int8")
        found = generated(model, ids, mask)
        assert torch.equal(found.sequences, wanted.sequences)
        assert relative(found, wanted) < 1e-5


def test_a_prompt_in_chunks_equals_the_whole():
    """Token-local schemes store a token the same way whatever comes with it."""
    model = models.model("llama")
    ids, _ = models.prompts((70,))
    with torch.inference_mode():
        whole = model(ids, cache=KVCache(model, "turboquant:4", policy=POLICY, condition=False)).logits
        cache = KVCache(model, "turboquant:4", policy=POLICY, condition=False)
        parts = torch.cat([model(part, cache=cache).logits for part in ids.split((33, 1, 30, 6), dim=1)], dim=1)
    assert float((parts - whole).norm() / whole.norm()) < 1e-5


def test_a_cache_that_was_reset_holds_another_batch():
    model = models.model("llama")
    cache = KVCache(model, "int8", policy=POLICY)
    found = [generated(model, *models.prompts(lengths), cache.emptied()).sequences for lengths in ((20, 9), (31,), (20, 9))]
    assert torch.equal(found[0], found[2])
    assert len(found[1]) == 1


def test_bfloat16_models_are_served():
    model = models.model("llama", dtype=torch.bfloat16)
    ids, mask = models.prompts((40, 21))
    found = generated(model, ids, mask, KVCache(model, "bf16", policy=POLICY), max_new_tokens=1)
    wanted = generated(model, ids, mask, max_new_tokens=1)
    assert relative(found, wanted) < 0.03
