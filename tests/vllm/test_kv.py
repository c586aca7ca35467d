"""Our key/value pages under vLLM's scheduler: batches, prefix cache, chunks and preemption change nothing; numbers are our own cache's."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_engine import CARRIED, VOCABULARY, ask, carried_model, counter, elsewhere, engine, write_model

from hal_core.errors import HalError, SettingError
from hal_core.kv.scheme import parse_pair

#: With the relative L2 error against our own cache of the same scheme. A code that rounds the other way, since the engine's products differ
#: in the last bit, weighs more where there are fewer codes.
SCHEMES = {"int8:token": 2e-3, "fp8": 5e-3, "turboquant:4": 5e-3, "k=int8:token,v=turboquant:3": 5e-3}
LENGTHS = (7, 150, 300)
REFERENCE_ONLY = "require:kv=reference"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("kv") / "moe")


@pytest.fixture(scope="module")
def prompts():
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY, (length,), generator=draw).tolist() for length in LENGTHS]


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def attention(llm):
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return [layer.impl for layer in layers if hasattr(layer, "impl")]


def same(some, others):
    """Equal tokens, and logits that only the batch's shape rounds differently."""
    return all(a.tokens == b.tokens and relative(a.logits, b.logits) < 1e-5 for a, b in zip(some, others, strict=True))


def through_our_cache(model, scheme, prompt, tokens):
    """Logits of transformers with our own cache (or with its own, for None), fed the same tokens one after another."""
    from transformers import Qwen3MoeForCausalLM

    from hal_core.integrations.transformers_kv import KVCache

    network = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    name = KVCache.argument(network)
    cache = None if scheme is None else KVCache(network, scheme, condition=False, scales="default")
    rows = []
    with torch.no_grad():
        for ids in (prompt, *([token] for token in tokens[:-1])):
            out = network(torch.tensor([ids]), use_cache=True, **{name: cache})
            cache = getattr(out, name) if scheme is None else cache
            rows.append(out.logits[0, -1])
    return torch.stack(rows)


def stacked(model, prompts, answers):
    """Logits of all answers, and those of float32 without quantization for the same tokens."""
    wanted = [through_our_cache(model, None, prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
    return torch.cat([answer.logits for answer in answers]), torch.cat(wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_however_the_scheduler_cuts_and_shares_the_numbers_are_those_of_our_own_cache(model, prompts, scheme):
    # 64 tokens a step: a prompt of 300 comes in five chunks, with decoding requests between
    with engine(model, hal={"kv_cache": scheme}, max_num_batched_tokens=64, block_size=32) as llm:
        single = [ask(llm, [prompt])[0] for prompt in prompts]
        shared = ask(llm, prompts)
        assert llm.reset_prefix_cache()
        batch = ask(llm, prompts)
    assert [answer.cached for answer in single + batch] == [0] * 6
    assert [answer.cached for answer in shared] == [(length - 1) // 32 * 32 for length in LENGTHS]
    assert same(single, batch)
    assert same(single, shared)
    wanted = [through_our_cache(model, scheme, prompt, answer.tokens) for prompt, answer in zip(prompts, single, strict=True)]
    exact = [through_our_cache(model, None, prompt, answer.tokens) for prompt, answer in zip(prompts, single, strict=True)]
    found, wanted, exact = torch.cat([answer.logits for answer in single]), torch.cat(wanted), torch.cat(exact)
    print(f"{scheme}: {relative(found, wanted):.2e} from our cache, {relative(found, exact):.2e} from no quantization")
    assert relative(found, wanted) < SCHEMES[scheme]
    assert relative(found, exact) > 1.5 * relative(found, wanted)  # pages are quantized, and by this scheme


def test_bf16_models_have_integer_products_of_the_same_codes(model, prompts):
    with engine(model, hal={"kv_cache": "int8:token", "policy": "require:kv=cpu"}, dtype="bfloat16", block_size=32) as llm:
        found = ask(llm, prompts)
    with engine(model, dtype="bfloat16") as llm:
        own = ask(llm, prompts)
    error, owns = (relative(*stacked(model, prompts, answers)) for answers in (found, own))
    print(f"bf16: {error:.2e} from no quantization over int8:token pages, {owns:.2e} over vLLM's own")
    assert error < 2 * owns + 0.1


def test_requests_that_lost_their_pages_go_on_as_if_nothing_had_happened(model):
    draw = torch.Generator().manual_seed(6)
    prompts = [torch.randint(0, VOCABULARY, (60,), generator=draw).tolist() for _ in range(4)]
    options = {"hal": {"kv_cache": "turboquant:4"}, "block_size": 32, "max_model_len": 256}
    with engine(model, **options) as llm:
        single = [ask(llm, [prompt], 100)[0] for prompt in prompts]
    with engine(model, **options, num_gpu_blocks_override=15) as llm:
        crowded = ask(llm, prompts, 100)
        preempted = counter(llm, "vllm:num_preemptions")
    assert preempted > 0
    assert same(single, crowded)


def test_a_gigabyte_holds_as_many_tokens_as_the_scheme_says(model):
    tokens = {}
    for scheme in (None, "int8:token", "turboquant:4", "k=turboquant:4,v=turboquant:2"):
        with engine(model, hal=None if scheme is None else {"kv_cache": scheme}, dtype="bfloat16") as llm:
            cache = llm.llm_engine.vllm_config.cache_config
            tokens[scheme] = cache.num_gpu_blocks * cache.block_size
            each = 2 * 2 * 2 * 64 * 2 if scheme is None else 2 * 2 * sum(s.vector_bytes(64) for s in parse_pair(scheme))
            assert abs(tokens[scheme] * each / 2**30 - 1) < 1e-3, scheme  # layers, heads; the space is 1 GiB
    for scheme, count in tokens.items():
        print(f"{scheme or 'vLLM, bf16'}: {count} tokens in 1 GiB, {count / tokens[None]:.2f} times vLLM's own")


def test_without_a_scheme_vllms_own_attention_serves_though_ours_did_before(model, prompts):
    with engine(model, hal={"kv_cache": "int8:token"}) as llm:
        assert {type(layer).__name__ for layer in attention(llm)} == {"HalAttention"}
    with engine(model) as llm:
        assert {type(layer).__name__ for layer in attention(llm)} == {"CPUAttentionBackendImpl"}
        found = ask(llm, prompts[:1])[0]
    assert relative(found.logits, through_our_cache(model, None, prompts[0], found.tokens)) < 1e-5


def test_heads_of_a_size_that_vllm_does_not_serve_on_a_cpu(tmp_path, prompts):
    model = write_model(tmp_path / "narrow", head_dim=16)
    with engine(model, hal={"kv_cache": "int8:token", "policy": REFERENCE_ONLY}, block_size=32) as llm:
        found = ask(llm, prompts[1:2])[0]
    assert relative(found.logits, through_our_cache(model, "int8:token", prompts[1], found.tokens)) < 2e-3


@pytest.mark.parametrize(
    ("hal", "options", "words"),
    [
        ({"kv_cache": "int8"}, {}, "wait outside the pages"),
        ({"kv_cache": "int9"}, {}, "int9"),
        ({"kv_cache": "turboquant:4", "policy": "require:kv=cuda.*"}, {}, "require:kv=cuda"),
        ({"kv_cache": "fp8", "policy": "require:kv=cpu"}, {}, "kv.scales"),
        ({"kv_cache": "int8:token"}, {"kv_cache_dtype": "fp8"}, "leave vLLM's setting at auto"),
        ({"kv_cache": "turboquant:4", "policy": "require:kv=cpu"}, {"block_size": 24}, "page_size|block"),
    ],
)
def test_what_cannot_be_served_is_an_error_before_anything_is(model, hal, options, words):
    with pytest.raises((HalError, ValueError), match=words), engine(model, hal=hal, **options):
        pytest.fail("the engine was made")


def test_latent_caches_are_refused(tmp_path):
    from transformers import DeepseekV2Config

    DeepseekV2Config(
        architectures=["DeepseekV2ForCausalLM"], vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, kv_lora_rank=64, q_lora_rank=None, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=64, first_k_dense_replace=1,
    ).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(HalError, match="latent"), engine(tmp_path, hal={"kv_cache": "int8:token"}, load_format="dummy"):
        pytest.fail("the engine was made")


def test_on_another_device_the_setting_is_an_error(monkeypatch):
    from hal_core.integrations.vllm import kv_request

    monkeypatch.setattr(kv_request, "current_platform", SimpleNamespace(is_cpu=lambda: False, device_type="cuda"))
    assert kv_request.cache_request(SimpleNamespace(additional_config={"hal": {"policy": "auto"}})) is None
    with pytest.raises(SettingError, match="the device is cuda"):
        kv_request.cache_request(SimpleNamespace(additional_config={"hal": {"kv_cache": "fp8"}}))


def test_a_window_reaches_the_pages(tmp_path, prompts):
    model = write_model(tmp_path / "window", use_sliding_window=True, sliding_window=40, max_window_layers=0)
    with engine(model, hal={"kv_cache": "int8:token"}, block_size=32, max_num_batched_tokens=64) as llm:
        assert {layer.spec.window for layer in attention(llm)} == {40}
        answers = ask(llm, prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert relative(answer.logits, through_our_cache(model, "int8:token", prompt, answer.tokens)) < 2e-3


def test_fp8_pages_take_the_scales_of_the_checkpoint(tmp_path):
    model = carried_model(tmp_path)
    tensors = load_file(model / "model.safetensors")
    scales = {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor(0.01 * (layer + 1) * (2 if side == "v" else 1))
        for layer in range(2)
        for side in "kv"
    }
    save_file(tensors | scales, model / "model.safetensors", metadata={"format": "pt"})
    with engine(model, **CARRIED | {"hal": {"numerics": "exact", "kv_cache": "fp8", "policy": "require:kv=reference"}}) as llm:
        found = [layer.pages.op.params for layer in attention(llm)]
        answer = ask(llm, [[1, 17, 42, 99]])[0]
    assert [params.source for params in found] == ["calibrated"] * 2
    assert torch.allclose(torch.stack([params.key_scale for params in found]).flatten(), torch.tensor([0.01, 0.02]))
    assert torch.allclose(torch.stack([params.value_scale for params in found]).flatten(), torch.tensor([0.02, 0.04]))
    assert bool(answer.logits.isfinite().all())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_model_reads_the_same_pages(model, prompts):
    with engine(model, hal={"kv_cache": "turboquant:4"}, block_size=32) as llm:
        eager = ask(llm, prompts)
    with engine(model, hal={"kv_cache": "turboquant:4"}, block_size=32, enforce_eager=False) as llm:
        compiled = ask(llm, prompts)
    for each, other in zip(eager, compiled, strict=True):
        assert each.tokens == other.tokens
        assert relative(other.logits, each.logits) < 5e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_share_the_heads(tmp_path, model, prompts):
    with engine(model, hal={"kv_cache": "turboquant:4"}, block_size=32) as llm:
        one = ask(llm, prompts)
    two, ranks = elsewhere(tmp_path, model, prompts, hal={"kv_cache": "turboquant:4"}, block_size=32, tensor_parallel_size=2)
    for each, other in zip(one, two, strict=True):
        assert each.tokens == other.tokens
        assert relative(other.logits, each.logits) < 5e-3
    for number, layers in enumerate(ranks):
        assert [layer["rank"] for layer in layers] == [[number, 2]] * 2
        assert all(spec.startswith("kv 2/1 heads x64 page 32 k=turboquant:4") for layer in layers for spec in layer["specs"])
        assert all(layer["calls"] > 0 and layer["kernels"] for layer in layers)
