"""Layers that goldens do not have: biases, quantized heads and embeddings, modules fused in the file, other names."""

import pytest
import torch
import vllm_models
from vllm_models import SIZES
from vllm_ranks import Job, on_ranks, prompt_logits

LINEARS = r"_proj$|\.w[123]$"
FAMILIES = ("qwen2", "tied", "phi3", "mixtral")


def family(name):
    """A config of transformers, which modules are quantized, and which of them have act-order."""
    from transformers import LlamaConfig, MixtralConfig, Phi3Config, Qwen2Config

    return {
        # q, k and v have biases; the rows of head and table do not fill both ranks
        "qwen2": (Qwen2Config(**SIZES, tie_word_embeddings=False), f"{LINEARS}|lm_head|embed_tokens", "self_attn"),
        "tied": (LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True), f"{LINEARS}|embed_tokens", "$^"),
        "phi3": (Phi3Config(**SIZES, tie_word_embeddings=False), LINEARS, "qkv_proj"),
        "mixtral": (
            MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2, tie_word_embeddings=False), LINEARS, r"layers\.1\..*w[123]",
        ),
    }[name]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    found = {name: family(name) for name in FAMILIES}
    return {name: vllm_models.write(folder / name, config, which, ordered=order) for name, (config, which, order) in found.items()}


def job(served):
    return Job(str(served.folder), served.ids, {"hal": {"numerics": "exact"}})


def check(found, wanted):
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families(models, name):
    check(prompt_logits(job(models[name])), models[name].logits)


@pytest.fixture(scope="module")
def on_two_ranks(models, tmp_path_factory):
    return dict(zip(models, on_ranks(tmp_path_factory.mktemp("ranks"), list(map(job, models.values()))), strict=True))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_on_two_ranks(models, on_two_ranks, name):
    check(on_two_ranks[name], models[name].logits)
