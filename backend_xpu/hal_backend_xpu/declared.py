"""Where this backend's kernels run: Intel GPUs, or by name alone the host's processor. Importing this loads no native code."""

from __future__ import annotations

from typing import Any

import torch

from hal_core import settings
from hal_core.errors import ShapeError
from hal_core.machine import Machine
from hal_core.packages import package_refusals, torch_build_refusals
from hal_core.refusal import Refusal

__all__ = ["ARCHITECTURES", "OnXpu", "device_of", "on_host", "torch_refusals"]

ARCHITECTURES = ("pvc", "dg2", "bmg")
_VERSIONS = ">=2026.2,<2027"
_INSTALL = 'pip install "hal-backend-xpu[runtime]"'


def torch_refusals(machine: Machine) -> tuple[Refusal, ...]:
    """An Intel GPU beside a torch that cannot hold tensors there: kernels would read those of the host."""
    return torch_build_refusals(machine, "xpu", "install torch from the xpu folder of its own package index")


class OnXpu:
    """Mixin of this backend's kernels. Without an Intel GPU they run on the host through OpenCL, for who names them."""

    devices = ("xpu",)
    isa = ()
    architectures = ARCHITECTURES

    def by_name_only(self, spec: Any, machine: Machine) -> bool:
        return "xpu" not in self.devices or not any(device.kind == "xpu" for device in machine.devices)

    def lacks(self, machine: Machine) -> tuple[Refusal, ...]:
        needed = ("intel-sycl-rt",) if "xpu" in self.devices else ("intel-sycl-rt", "intel-opencl-rt")
        packages = tuple(reason for name in needed for reason in package_refusals(machine, name, _VERSIONS, _INSTALL))
        return (*packages, *torch_refusals(machine)) if "xpu" in self.devices else packages

    def _device_refusals(self, machine: Machine) -> tuple[Refusal, ...]:
        runtime = package_refusals(machine, "intel-sycl-rt", _VERSIONS, _INSTALL)
        opencl = package_refusals(machine, "intel-opencl-rt", _VERSIONS, _INSTALL)
        own: tuple[Refusal, ...] = super()._device_refusals(machine)  # type: ignore[misc]
        if "xpu" not in self.devices:
            return (*own, *runtime, *opencl)
        if any(device.kind == "xpu" for device in machine.devices):
            return (*own, *torch_refusals(machine), *runtime)
        if not runtime and not opencl:
            return ()
        seen = ", ".join(sorted({device.kind for device in machine.devices})) or "none"
        fix = "run on a machine with an Intel GPU, or install the runtime to try it on the processor"
        return (Refusal("device.missing", "an xpu device", f"devices: {seen}", fix), *runtime, *opencl)


def on_host(kernel: Any) -> Any:
    """The same kernel as one of the host's processor: what HAL_XPU_DEVICE=cpu registers."""
    kind = type(kernel)
    body = {"devices": ("cpu",), "architectures": (), "__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), body)()


def _processor_serves() -> bool:
    """Whether it is this machine's device: set aside for it, or named by a policy where there is no Intel GPU."""
    return settings.xpu_device() == "cpu" or not any(device.kind == "xpu" for device in Machine.detect().devices)


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device of an op whose weights lie there.

    Raises:
        ShapeError: weights of the host on a machine with Intel GPUs that HAL_XPU_DEVICE does not set aside, or of another vendor's device.
    """
    device = tensor.device
    if device.type in {"xpu", "meta"} or (device.type == "cpu" and _processor_serves()):
        return device
    raise ShapeError("xpu op", f"weights on {device}", "move them to xpu, or set HAL_XPU_DEVICE=cpu to try the op on the processor")
