"""hal-core inside vLLM: an entry point of ``vllm.general_plugins``, which every process of the engine calls.

Nothing of vLLM is imported before :func:`register` is called, and nothing changes until ``quantization="hal"`` (or ``HAL_VLLM_AUTO=1``)
or a hal key/value cache is asked for.
"""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

__all__ = ["TESTED", "register"]

#: First release that this was tested with, and the first that it was not: vLLM's plugin points move with every minor release.
TESTED = ("0.32", "0.33")


def register() -> None:
    """Make the quantization method ``hal``, the load format ``hal`` and our attention known to vLLM. May be called any number of times.

    With a release outside :data:`TESTED` the method is known and refuses to serve, naming the release found.
    """
    import vllm

    found = str(vllm.__version__)
    if is_tested(found):
        from hal_core.integrations.vllm.attention import register_attention
        from hal_core.integrations.vllm.setup import register_all

        register_all()
        register_attention()
    else:
        from hal_core.integrations.vllm.untested import register_refusal

        register_refusal(found)


def is_tested(found: str) -> bool:
    """Whether a release of vLLM lies in :data:`TESTED`; pre-releases of it count."""
    try:
        release = Version(Version(found).base_version)
    except InvalidVersion:
        return False
    return Version(TESTED[0]) <= release < Version(TESTED[1])
