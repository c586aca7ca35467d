"""Where a model lives: on the device that all of its kernels run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.errors import HalError, PolicyError
from hal_core.machine import Machine
from hal_core.registry import default_registry
from hal_core.select import select_from
from hal_core.testing.bench import torch_device

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.plan import PlannedOp
    from hal_core.policy import Policy

__all__ = ["home_of", "placed"]


def home_of(planned: Iterable[PlannedOp], policy: Policy) -> torch.device:
    """The one device of the kernels that ``policy`` chooses for a model's ops; the CPU where these run anywhere.

    Raises:
        PolicyError: the kernels run on several devices.
    """
    registry, machine = default_registry(), Machine.detect()
    found: dict[torch.device, str] = {}
    for op in {each.spec: each for each in planned}.values():
        try:
            name = select_from(op.spec, machine, policy, registry.kernels(), registry.rows()).kernel
        except HalError:
            continue  # told with its layer when that is prepared
        kernel = registry.kernel(name)
        if "any" not in kernel.devices:
            found.setdefault(torch_device(kernel), f"{name} of {op.module}")
    if len(found) > 1:
        told = ", ".join(f"{device} ({who})" for device, who in found.items())
        raise PolicyError("kernels of one model", f"they run on {told}", "require one backend and the reference: require:cpu,reference")
    return next(iter(found), torch.device("cpu"))


def placed(weights: LinearWeights | MoEWeights, device: torch.device) -> LinearWeights | MoEWeights:
    """The same weights on a device; unchanged on the CPU, where they were read."""
    if device.type == "cpu":
        return weights
    from hal_core.bench.contestants import moved

    return moved(weights, device)  # type: ignore[no-any-return]
