"""Where a case runs: the kernel, the machine, the device, the run's seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hal_core.testing.subjects import ExpertsSubject, subject_of

if TYPE_CHECKING:
    from hal_core.kernel import Kernel
    from hal_core.machine import Machine
    from hal_core.refusal import Refusal
    from hal_core.testing.case import Case
    from hal_core.testing.subject import Subject

__all__ = ["Bench", "device_refusals", "of_machine", "torch_device"]

_TORCH_NAMES = {"any": "cpu", "cpu": "cpu", "cuda": "cuda", "rocm": "cuda", "xpu": "xpu"}


def torch_device(kernel: Kernel[Any]) -> torch.device:
    """Where the kernel's tensors live; the CPU if it serves that."""
    names = [_TORCH_NAMES[kind] for kind in kernel.devices]
    return torch.device("cpu" if "cpu" in names else names[0])


def of_machine(reason: Refusal) -> bool:
    """Whether a reason lies in the machine: a device, or a library that is not installed; nothing runs there, and nothing is wrong."""
    return reason.code.startswith("device.") or reason.code == "backend.package"


def device_refusals(kernel: Kernel[Any], spec: Any, machine: Machine) -> tuple[Refusal, ...]:
    """The reasons that lie in the machine and not in the spec."""
    return tuple(reason for reason in kernel.refusals(spec, machine) if of_machine(reason))


@dataclass(frozen=True)
class Bench:
    """One case about to run. ``accepted``: distinct accepted specs of the kernel, for checks over all of them."""

    kernel: Kernel[Any]
    case: Case
    machine: Machine
    seed: int = 0
    accepted: tuple[Any, ...] = ()

    @property
    def device(self) -> torch.device:
        return torch_device(self.kernel)

    def subject(self, spec: Any = None) -> Subject:
        """Fresh weights of the case's spec, or of another one with the same random numbers."""
        case = self.case if spec is None else replace(self.case, spec=spec)
        return subject_of(self.kernel, case, self.seed, self.device)

    def experts(self, spec: Any = None) -> ExpertsSubject:
        """The same, where the case is one of experts."""
        subject = self.subject(spec)
        assert isinstance(subject, ExpertsSubject)  # the plan makes such cases for experts only
        return subject
