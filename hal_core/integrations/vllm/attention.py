"""Where vLLM's attention is taken over, for key/value pages of our schemes. vLLM is imported when it is registered and not before."""

from __future__ import annotations

__all__ = ["register_attention"]

_HERE = __name__.rpartition(".")[0]


def register_attention() -> None:
    """Put our backend in the place of vLLM's CPU attention; without a ``kv_cache`` setting it answers with vLLM's own classes."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{_HERE}.kv_attention.HalAttentionBackend")
    register_backend(AttentionBackendEnum.CPU_MLA, f"{_HERE}.kv_mla.CPULatentBackend")
    register_backend(AttentionBackendEnum.AMX_MLA, f"{_HERE}.kv_mla.AMXLatentBackend")
