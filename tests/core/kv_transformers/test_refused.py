"""What a packed cache cannot serve is an error that says so; nothing is computed from a part of the keys."""

from __future__ import annotations

import pytest
import torch
from core.kv_transformers import models
from golden import goldens
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import hal_core  # noqa: E402
from hal_core.errors import NoKernelError, PolicyError, SettingError, ShapeError, ValueDecodeError  # noqa: E402
from hal_core.integrations.transformers import KVCache  # noqa: E402
from hal_core.kv.op import KVParams  # noqa: E402

POLICY = "require:reference"


@pytest.fixture
def model():
    return models.model("llama")


def test_schemes_policies_and_settings_are_checked_before_anything_runs(model):
    with pytest.raises(ValueDecodeError, match="not understood"):
        KVCache(model, "int5")
    with pytest.raises(PolicyError):
        KVCache(model, "int8", policy="whatever")
    with pytest.raises(SettingError, match="calibrated"):
        KVCache(model, "fp8", scales="calibrated")


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ({"scheme": 4}, "neither a text nor two KVSchemes"), ({"scheme": ("int8", "int8")}, "neither a text"),
        ({"scheme": "int8", "page_size": 20}, "page_size"), ({"page_size": "32"}, "page_size: '32'"), ({"seed": -1}, "seed"),
        ({"params": 3}, "params .*int"), ({"params": {0: 3}}, "0 to int"), ({"params": {99: KVParams()}}, "99 to KVParams, of 3 layers"),
        ({"condition": "no"}, "condition"), ({"policy": 3}, "policy of type int"),
    ],
)  # fmt: skip
def test_arguments_of_another_kind_are_told_when_the_cache_is_made(model, wrong, shown):
    with pytest.raises(hal_core.HalError, match=shown):
        KVCache(model, **wrong)


def test_the_policy_chooses_the_kernel_and_explain_shows_it(model):
    cache = KVCache(model, "turboquant:4", policy="require:kv=reference.*")
    model(torch.tensor([[5, 6, 7]]), cache=cache)
    assert cache.kernels() == {"reference.kv": 3}
    (spec,) = {layer.spec for layer in cache.layers}
    assert cache.layers[0].selection.policy == "require:kv=reference.*"
    explained = str(hal_core.explain(spec, policy="require:kv=reference.*"))
    assert "reference.kv" in explained
    assert "k=turboquant:4" in explained


def test_a_required_kernel_that_is_not_there_is_an_error_with_the_layer(model):
    with pytest.raises((NoKernelError, PolicyError), match="nobody"):
        model(torch.tensor([[5, 6, 7]]), cache=KVCache(model, "int8", policy="require:kv=nobody.*"))


def test_require_refuses_scales_that_nobody_measured(model):
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(NoKernelError, match=r"kv\.scales"):
        model(ids, cache=KVCache(model, "fp8", policy=POLICY, scales="default"))
    computed = KVCache(model, "fp8", policy=POLICY)
    model(ids, cache=computed)
    assert computed.report()["scales"] == {"computed": 3}
    default = KVCache(model, "fp8", policy="auto", scales="default")
    model(ids, cache=default)
    assert default.report()["scales"] == {"default": 3}


@pytest.fixture
def scaled_folder(tmp_path):
    """A quantized model whose checkpoint carries scales of an fp8 cache in one of its layers."""
    import shutil

    place = tmp_path / "model"
    shutil.copytree(goldens.folder("ct_w4a16_channel"), place)
    tensors = load_file(place / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{side}_scale": torch.tensor([value]) for side, value in (("k", 0.03125), ("v", 0.0625))}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


def test_scales_of_a_checkpoint_reach_the_cache_with_their_source(scaled_folder):
    model = hal_core.load(scaled_folder, policy=POLICY)
    assert model.hal_kv_params[0].source == "calibrated"
    cache = KVCache(model, "fp8", policy=POLICY)
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        found = model(ids, cache=cache).logits
    assert cache.report()["scales"] == {"calibrated": 1, "computed": len(cache.layers) - 1}
    params = cache.layers[0]._pages.op.params
    assert (params.key_scale.item(), params.value_scale.item()) == (0.03125, 0.0625)
    assert cache.layers[0].spec.scales == "calibrated"
    with torch.inference_mode():
        other = model(ids, cache=KVCache(model, "fp8", policy="auto", scales="default")).logits
        int8 = KVCache(model, "int8", policy=POLICY)
        model(ids, cache=int8)
    assert not torch.equal(found, other)
    assert int8.report()["scales"] == {}


def test_scales_can_be_given_instead(model):
    params = {layer: KVParams(torch.ones(1), torch.ones(1), "calibrated") for layer in (0, 2)}
    cache = KVCache(model, "fp8:head", policy=POLICY, params=params)
    model(torch.tensor([[5, 6, 7]]), cache=cache)
    assert [layer.scales for layer in cache.layers] == ["calibrated", "computed", "calibrated"]


def test_another_attention_function_is_told_before_it_reads_a_part_of_the_keys(model):
    cache = KVCache(model, "int8", policy=POLICY)
    model.set_attn_implementation("sdpa")
    for ids in ([[5, 6, 7]], [[5]]):
        with pytest.raises(ShapeError, match=r"another function than hal.*set_attn_implementation"):
            model(torch.tensor(ids), cache=cache)
    model.set_attn_implementation("hal")
    model(torch.tensor([[5, 6, 7]]), cache=cache.emptied())


def test_another_batch_or_dtype_is_refused(model):
    cache = KVCache(model, "int8", policy=POLICY)
    model(torch.tensor([[5, 6, 7]]), cache=cache)
    with pytest.raises(ShapeError, match="holds 1 sequences, a call has 2"):
        model(torch.tensor([[5], [6]]), cache=cache)
    cache.reset()
    with pytest.raises(ShapeError, match="one cache for one model and dtype"):
        model.to(torch.bfloat16)(torch.tensor([[5]]), cache=cache)


def test_masks_that_change_their_mind_are_refused(model):
    cache = KVCache(model, "int8", policy=POLICY)
    model(torch.tensor([[5, 6, 7]]), attention_mask=torch.tensor([[0, 1, 1]]), cache=cache)
    with pytest.raises(ShapeError, match="otherwise than when they came"):
        model(torch.tensor([[5]]), attention_mask=torch.tensor([[1, 1, 1, 1]]), cache=cache)
    cache.reset()
    model(torch.tensor([[5, 6, 7]]), cache=cache)
    with pytest.raises(ShapeError, match="otherwise than when they came"):
        model(torch.tensor([[5]]), attention_mask=torch.tensor([[1, 0, 1, 1]]), cache=cache)


def test_masks_of_other_shapes_are_refused(model):
    cache = KVCache(model, "int8", policy=POLICY)
    with pytest.raises(ShapeError, match=r"a mask of shape \[1, 1, 3, 3\]"):
        model(torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool), cache=cache)
    cache.reset()
    with pytest.raises(ShapeError, match=r"attention mask of shape \[1, 2\]"):
        model(torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 2, dtype=torch.int64), cache=cache)


def test_padding_on_the_right_is_served_without_a_window_and_refused_under_one():
    ids, mask = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    model = models.model("llama")
    alone = model(ids[:1, :3], cache=KVCache(model, "int8", policy=POLICY)).logits
    both = model(ids, attention_mask=mask, cache=KVCache(model, "int8", policy=POLICY)).logits
    assert torch.allclose(both[0, :3], alone[0], atol=1e-5)
    windowed = models.model("mistral_window")
    cache = KVCache(windowed, "int8", policy=POLICY)
    with pytest.raises(ShapeError, match="pad on the left"):
        windowed(ids, attention_mask=mask, cache=cache)


def test_a_row_of_padding_alone_touches_no_other(model):
    ids = torch.tensor([[5, 6, 7], [5, 6, 7]])
    alone = model(ids[:1], cache=KVCache(model, "turboquant:4", policy=POLICY)).logits
    both = model(ids, attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]), cache=KVCache(model, "turboquant:4", policy=POLICY)).logits
    assert torch.allclose(both[0], alone[0], atol=1e-5)
    assert bool(both.isfinite().all())


def test_keys_that_are_not_finite_are_refused(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(ShapeError, match="nan at token"):
        model(torch.tensor([[5, 6, 7]]), cache=KVCache(model, "int8", policy=POLICY))


def test_a_call_that_failed_halfway_is_not_continued(model):
    cache = KVCache(model, "int8", policy=POLICY)
    ids = torch.tensor([[5, 6, 7]])
    weight = model.model.layers[1].self_attn.k_proj.weight
    with torch.inference_mode():
        wanted = model(ids, cache=cache).logits
        kept = weight[0, 0].clone()
        weight[0, 0] = float("nan")
        with pytest.raises(ShapeError, match="nan at token"):
            model(ids, cache=cache)
        weight[0, 0] = kept
        with pytest.raises(ShapeError, match=r"failed halfway: reset\(\)"):
            model(ids, cache=cache)
        assert torch.equal(model(ids, cache=cache.emptied()).logits, wanted)


class Attention(torch.nn.Module):
    layer_idx, is_causal = 0, True


def attended(layer, query, key, value):
    return transformers.AttentionInterface()["hal"](Attention(), query, *layer.update(key, value), None, scaling=0.25)[0]


def tensors(batch, tokens, seed):
    """Query, key, value; keys far from zero, so that a wrong shift shows."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, heads, tokens, 16, generator=generator) for heads in (4, 2, 2))
    return query, key + 5, value


@pytest.mark.parametrize("scheme", ["turboquant:4", "int4:token", "int8", "fp8"])
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_first_call_that_failed_leaves_nothing_behind(model, scheme, side, wrong):
    """The error names the token, and the next call is served as by a new cache."""
    cache = KVCache(model, scheme, policy=POLICY)
    layer = cache.layers[0]
    query, key, value = tensors(1, 40, seed=3)
    broken = {"key": key * 7 - 60, "value": value.clone()}
    broken[side][0, 1, 23, 4] = wrong
    with pytest.raises(ShapeError, match=f"{side}s: {wrong} at token 23, head 1, channel 4"):
        attended(layer, query, broken["key"], broken["value"])
    assert (layer.tokens, layer.used_bytes, layer.conditioning, layer.is_initialized) == (0, 0, None, False)
    assert layer._pages.ids == ()
    wanted = attended(KVCache(model, scheme, policy=POLICY).layers[0], query, key, value)
    assert torch.equal(attended(layer, query, key, value), wanted)


@pytest.mark.parametrize("scheme", ["turboquant:4", "int8"])
def test_after_a_first_call_that_failed_another_batch_is_served(model, scheme):
    layer = KVCache(model, scheme, policy=POLICY).layers[0]
    query, key, value = tensors(2, 40, seed=3)
    key[1, 0, 2, 3] = float("nan")
    with pytest.raises(ShapeError, match="keys: nan at token 42, head 0, channel 3"):
        attended(layer, query, key, value)
    query, key, value = tensors(3, 40, seed=4)
    wanted = attended(KVCache(model, scheme, policy=POLICY).layers[0], query, key, value)
    assert torch.equal(attended(layer, query, key, value), wanted)
    assert layer.tokens == 120


def test_a_later_call_that_failed_can_be_made_again(model):
    layers = [KVCache(model, "turboquant:4", policy=POLICY).layers[0] for _ in range(2)]
    for layer in layers:
        attended(layer, *tensors(2, 40, seed=3))
    query, key, value = tensors(2, 3, seed=4)
    broken = key.clone()
    broken[1, 1, 2, 0] = float("inf")
    with pytest.raises(ShapeError, match="keys: inf at token 5, head 1, channel 0"):
        attended(layers[0], query, broken, value)
    assert layers[0].tokens == 80
    assert torch.equal(*(attended(layer, query, key, value) for layer in layers))


def test_tokens_that_were_stored_and_not_attended_are_not_stored_again(model, monkeypatch):
    layer = KVCache(model, "turboquant:4", policy=POLICY).layers[0]
    first, second = tensors(1, 40, seed=3), tensors(1, 1, seed=4)
    attended(layer, *first)
    with monkeypatch.context() as patch:
        patch.setattr(layer._pages, "attend", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no memory")))
        with pytest.raises(MemoryError):
            attended(layer, *second)
    with pytest.raises(ShapeError, match=r"an earlier call failed.*reset\(\)"):
        attended(layer, *second)
    layer.reset()
    attended(layer, *first)
    assert layer.tokens == 40


def test_crops_beyond_what_is_cached_are_refused(model):
    cache = KVCache(model, "int8", policy=POLICY)
    model(torch.tensor([[5, 6, 7]]), cache=cache)
    for count in (-4, 1):
        with pytest.raises(ShapeError, match="from -3 to 0"):
            cache.crop(count)
    cache.crop(-3)
    assert cache.get_seq_length() == 0


def test_models_with_other_layers_are_refused():
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(SettingError, match="attention interface"):
        KVCache(mamba, "int8")
    llama = models.model("llama")
    llama.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(SettingError, match="layers of linear_attention"):
        KVCache(llama, "int8")
    llama.config.layer_types = ["chunked_attention"] * 3
    with pytest.raises(SettingError, match="layers of chunked_attention"):
        KVCache(llama, "int8")
    llama.config.layer_types, llama.config.is_causal = None, False
    with pytest.raises(SettingError, match="not causal"):
        KVCache(llama, "int8")
    llama.config.is_causal, llama.config.num_kv_shared_layers = True, 1
    with pytest.raises(SettingError, match="share keys and values"):
        KVCache(llama, "int8")


def test_dropout_is_refused(model):
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    with pytest.raises(ShapeError, match="dropout"):
        model(torch.tensor([[5, 6, 7]]), cache=KVCache(model, "int8", policy=POLICY))


def test_masks_that_are_not_causal_are_refused(model):
    from transformers.masking_utils import create_causal_mask

    cache = KVCache(model, "int8", policy=POLICY)
    with pytest.raises(ShapeError, match="other than causal"):
        create_causal_mask(model.config, torch.zeros(1, 3, 64), None, cache, or_mask_function=lambda batch, head, query, key: key >= query)
