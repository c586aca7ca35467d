"""The object behind the entry point. Importing it loads no native code, so listing kernels is safe on any machine."""

from __future__ import annotations

from importlib.metadata import distribution
from typing import TYPE_CHECKING, Any

from hal_backend_xpu import fp8_kernels, kernels, kv_kernels
from hal_backend_xpu.declared import on_host
from hal_backend_xpu.engine import expected
from hal_backend_xpu.providers import kernels as provided
from hal_core import settings
from hal_core.manifest import FILE_NAME, BackendManifest

if TYPE_CHECKING:
    from hal_core.kernel import Kernel
    from hal_core.machine import Device, Machine

__all__ = ["XpuBackend", "backend"]

#: This backend's own.
OWN: tuple[Any, ...] = (*kernels.KERNELS, *fp8_kernels.KERNELS, *kv_kernels.KERNELS)


class XpuBackend:
    """Intel GPUs; with HAL_XPU_DEVICE=cpu the host's own processor, for tests."""

    def __init__(self) -> None:
        self.manifest = BackendManifest.parse(distribution("hal-backend-xpu").read_text(FILE_NAME) or "")

    def devices(self, machine: Machine) -> tuple[Device, ...]:
        kind = settings.xpu_device() or "xpu"
        return tuple(device for device in machine.devices if device.kind == kind)

    def remarks(self, machine: Machine) -> tuple[str, ...]:
        return tuple(dict.fromkeys(expected(device, machine) for device in self.devices(machine)))

    def kernels(self) -> tuple[Kernel[Any], ...]:
        if settings.xpu_device() == "cpu":
            return tuple(map(on_host, OWN))
        return (*OWN, *provided.KERNELS)


backend = XpuBackend()
