"""Tiny random models of several architectures, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 96
_SHARED = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
#: Architecture, its causal class, and what its configuration has besides the shared fields.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama_mha": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mistral_window": ("MistralForCausalLM", {"sliding_window": 11}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 9, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 1,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_scaling": {"rope_type": "default"}},
    ),
}  # fmt: skip


def model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights whose attention is far from uniform."""
    import transformers

    kind, extra = ARCHITECTURES[name]
    causal = getattr(transformers, kind)
    torch.manual_seed(seed)
    made = causal(causal.config_class(**{**_SHARED, **extra})).to(dtype).eval()
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if "sinks" in parameter_name:
                parameter.copy_(torch.randn_like(parameter))
            elif parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * (2.0 if "q_proj" in parameter_name else 1.0) / parameter.shape[-1] ** 0.5)
    made.generation_config.eos_token_id = None
    return made


def prompts(lengths: tuple[int, ...], seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask ``[B, longest]``, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids, mask = torch.zeros(len(lengths), longest, dtype=torch.int64), torch.zeros(len(lengths), longest, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(3, VOCAB, (length,), generator=generator)
        mask[row, longest - length :] = 1
    return ids, mask
