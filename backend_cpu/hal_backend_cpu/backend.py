"""The object behind the entry point. Importing it loads no native code, so listing kernels is safe on any processor."""

from __future__ import annotations

from importlib.metadata import distribution
from typing import TYPE_CHECKING

from hal_backend_cpu import kernels, kernels_amx, kernels_int8, kv_kernels
from hal_backend_cpu.unpack import CpuUnpacker
from hal_core.manifest import FILE_NAME, BackendManifest

if TYPE_CHECKING:
    from hal_core.kernel import Kernel
    from hal_core.machine import Device, Machine

__all__ = ["CpuBackend", "backend"]


class CpuBackend:
    """x86-64 processors with AVX2 or AVX-512."""

    def __init__(self) -> None:
        self.manifest = BackendManifest.parse(distribution("hal-backend-cpu").read_text(FILE_NAME) or "")

    def devices(self, machine: Machine) -> tuple[Device, ...]:
        return tuple(device for device in machine.devices if device.kind == "cpu" and device.architecture == "x86_64")

    def kernels(self) -> tuple[Kernel, ...]:
        return (*kernels.KERNELS, *kernels_int8.KERNELS, *kernels_amx.KERNELS, *kv_kernels.KERNELS)

    def unpackers(self) -> tuple[CpuUnpacker, ...]:
        return (CpuUnpacker(),)


backend = CpuBackend()
