"""The only reader of the environment. Every variable is read when it is needed, never at import, and is checked."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hal_core.errors import SettingError

__all__ = ["CPU_ISA_LEVELS", "DEVICE_MASKS", "cache_folder", "cpu_isa", "debug", "device_masks", "policy_text", "vllm_auto", "xpu_device"]

#: Variables of the vendors' runtimes that hide devices from a process.
DEVICE_MASKS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

#: Values of HAL_CPU_ISA, lowest first. A level lowers what may be used; it never adds what the machine lacks.
CPU_ISA_LEVELS = ("avx2", "avx512", "avx512vnni", "avx512bf16", "amx")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def policy_text() -> str | None:
    """``HAL_POLICY``: a policy in its text form (``auto``, ``prefer:NAME``, ``require:NAME``), or None when unset or empty."""
    return _read("HAL_POLICY")


def cpu_isa() -> str | None:
    """``HAL_CPU_ISA``: the highest instruction set level that may be used, or None for all that the machine has.

    Raises:
        SettingError: not a level; a misspelt limit must not silently run at full speed.
    """
    level = os.environ.get("HAL_CPU_ISA") or None  # as it stands: native code reads the same variable
    if level is not None and level not in CPU_ISA_LEVELS:
        raise SettingError(f"HAL_CPU_ISA={level!r}", "unknown level", f"use one of {', '.join(CPU_ISA_LEVELS)}, or unset it")
    return level


def debug() -> bool:
    """``HAL_DEBUG``: show tracebacks of plugins and of user errors."""
    return _yes("HAL_DEBUG")


def vllm_auto() -> bool:
    """``HAL_VLLM_AUTO``: take over, inside vLLM, every quantized checkpoint for which no quantization method was asked."""
    return _yes("HAL_VLLM_AUTO")


def xpu_device() -> str | None:
    """``HAL_XPU_DEVICE``: ``cpu`` for the host's processor in place of Intel GPUs, for tests; None where unset.

    Raises:
        SettingError: another word.
    """
    word = _read("HAL_XPU_DEVICE")
    if word not in (None, "cpu"):
        raise SettingError(f"HAL_XPU_DEVICE={word!r}", "unknown", "use cpu, or unset it")
    return word


def device_masks() -> tuple[str | None, ...]:
    """The values of :data:`DEVICE_MASKS`; None where unset. An empty value counts: it hides every device."""
    return tuple(map(os.environ.get, DEVICE_MASKS))


def cache_folder() -> Path:
    """``HAL_CACHE_DIR``, or the user's cache folder of this operating system; it need not exist.

    Raises:
        SettingError: ``HAL_CACHE_DIR`` is not an absolute path; a relative one would move with the working folder.
    """
    given = _read("HAL_CACHE_DIR")
    if given is not None:
        if not Path(given).is_absolute():
            raise SettingError(f"HAL_CACHE_DIR={given!r}", "not an absolute path", "give one that starts at the root")
        return Path(given)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "hal-core"
    return (Path(xdg) if Path(xdg).is_absolute() else home / ".cache") / "hal-core"


def _yes(name: str) -> bool:
    word = (_read(name) or "").lower()
    if word not in _TRUE + _FALSE:
        raise SettingError(f"{name}={word!r}", "not a yes or no", "use 1 or 0")
    return word in _TRUE


def _read(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None
