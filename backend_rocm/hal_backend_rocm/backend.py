"""The object behind the entry point. Importing it imports no Triton and no AITER, so listing kernels is safe on any machine."""

from __future__ import annotations

from importlib.metadata import distribution
from typing import TYPE_CHECKING, Any

from hal_backend_rocm.aiter_provider.kernels import KERNELS as PROVIDED
from hal_backend_rocm.kernels import KERNELS
from hal_core.manifest import FILE_NAME, BackendManifest

if TYPE_CHECKING:
    from hal_core.kernel import Kernel
    from hal_core.machine import Device, Machine

__all__ = ["RocmBackend", "backend"]


class RocmBackend:
    """AMD GPUs."""

    def __init__(self) -> None:
        self.manifest = BackendManifest.parse(distribution("hal-backend-rocm").read_text(FILE_NAME) or "")

    def devices(self, machine: Machine) -> tuple[Device, ...]:
        return tuple(device for device in machine.devices if device.kind == "rocm")

    def kernels(self) -> tuple[Kernel[Any], ...]:
        return (*KERNELS, *PROVIDED)


backend = RocmBackend()
