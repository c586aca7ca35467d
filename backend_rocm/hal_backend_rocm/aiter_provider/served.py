"""Why a kernel of AITER is not called on a machine: what is missing there, and what none of its GPUs is served with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_backend_rocm.aiter_provider import DISTRIBUTION, INSTALL
from hal_backend_rocm.targets import torch_refusals
from hal_core.packages import package_refusals

if TYPE_CHECKING:
    from collections.abc import Callable

    from hal_core.machine import Machine
    from hal_core.refusal import Refusal

__all__ = ["missing", "provider_refusals"]


def missing(machine: Machine, versions: str) -> tuple[Refusal, ...]:
    """AITER or torch's ROCm build, where an AMD GPU is there to need them."""
    return _software(machine, versions) if any(device.kind == "rocm" for device in machine.devices) else ()


def _software(machine: Machine, versions: str) -> tuple[Refusal, ...]:
    return (*package_refusals(machine, DISTRIBUTION, versions, INSTALL), *torch_refusals(machine))


def provider_refusals(machine: Machine, versions: str, on: Callable[[str], tuple[Refusal, ...]]) -> tuple[Refusal, ...]:
    """Reasons of AITER's version, of torch, and those that ``on`` has for each architecture, where it has some for all."""
    targets = sorted({device.architecture for device in machine.devices if device.kind == "rocm"})
    each = [on(target) for target in targets]
    own = () if not each or not all(each) else tuple(dict.fromkeys(reason for reasons in each for reason in reasons))
    return (*_software(machine, versions), *own)
