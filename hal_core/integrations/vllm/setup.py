"""Everything of the plugin that registers itself with vLLM on import."""

from __future__ import annotations

__all__ = ["register_all"]


def register_all() -> None:
    """Import what registers itself: the quantization method and the load format."""
    from hal_core.integrations.vllm import config, loader  # noqa: F401
