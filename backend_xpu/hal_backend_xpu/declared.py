"""Where this backend's kernels run: Intel GPUs, or by name alone the host's processor. Importing this loads no native code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hal_core import settings
from hal_core.errors import ShapeError
from hal_core.packages import package_refusals
from hal_core.refusal import Refusal

if TYPE_CHECKING:
    from hal_core.machine import Machine

__all__ = ["ARCHITECTURES", "OnXpu", "device_of", "on_host"]

ARCHITECTURES = ("pvc", "dg2", "bmg")
_VERSIONS = ">=2026.2,<2027"
_INSTALL = 'pip install "hal-backend-xpu[runtime]"'


class OnXpu:
    """Mixin of this backend's kernels. Without an Intel GPU they run on the host through OpenCL, for who names them."""

    devices = ("xpu",)
    isa = ()
    architectures = ARCHITECTURES

    def by_name_only(self, spec: Any, machine: Machine) -> bool:
        return "xpu" not in self.devices or not any(device.kind == "xpu" for device in machine.devices)

    def lacks(self, machine: Machine) -> tuple[Refusal, ...]:
        needed = ("intel-sycl-rt",) if "xpu" in self.devices else ("intel-sycl-rt", "intel-opencl-rt")
        return tuple(reason for name in needed for reason in package_refusals(machine, name, _VERSIONS, _INSTALL))

    def _device_refusals(self, machine: Machine) -> tuple[Refusal, ...]:
        runtime = package_refusals(machine, "intel-sycl-rt", _VERSIONS, _INSTALL)
        opencl = package_refusals(machine, "intel-opencl-rt", _VERSIONS, _INSTALL)
        own: tuple[Refusal, ...] = super()._device_refusals(machine)  # type: ignore[misc]
        if "xpu" not in self.devices:
            return (*own, *runtime, *opencl)
        if any(device.kind == "xpu" for device in machine.devices):
            return (*own, *runtime)
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


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device of an op whose weights lie there.

    Raises:
        ShapeError: weights of the host on a machine with Intel GPUs that HAL_XPU_DEVICE does not set aside, or of another vendor's device.
    """
    device = tensor.device
    if device.type in {"xpu", "meta"} or (device.type == "cpu" and (settings.xpu_device() == "cpu" or not torch.xpu.is_available())):
        return device
    raise ShapeError("xpu op", f"weights on {device}", "move them to xpu, or set HAL_XPU_DEVICE=cpu to try the op on the processor")
