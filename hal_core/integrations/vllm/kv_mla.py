"""vLLM's latent attention on a CPU, which our pages do not hold: its own, or an error where a scheme was asked for."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from hal_core.errors import SettingError
from hal_core.integrations.vllm.kv_request import cache_request

__all__ = ["AMXLatentBackend", "CPULatentBackend"]


def _refuse_a_scheme() -> None:
    request = cache_request(get_current_vllm_config())
    if request is not None:
        raise SettingError(f"kv_cache {request}", "the model caches latent vectors (MLA)", "leave kv_cache out")


class CPULatentBackend(CPUMLABackend):
    """vLLM's, unless a scheme is asked for."""

    @staticmethod
    def get_impl_cls() -> Any:
        _refuse_a_scheme()
        return CPUMLABackend.get_impl_cls()


class AMXLatentBackend(AMXMLABackend):
    """vLLM's, unless a scheme is asked for."""

    @staticmethod
    def get_impl_cls() -> Any:
        _refuse_a_scheme()
        return AMXMLABackend.get_impl_cls()
