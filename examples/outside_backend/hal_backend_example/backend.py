"""The object that the entry point names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_backend_example.kernels import ExampleExperts, ExampleLinear
from hal_core.manifest import BackendManifest

if TYPE_CHECKING:
    from hal_core.kernel import Kernel
    from hal_core.machine import Device, Machine

__all__ = ["ExampleBackend", "backend"]


class ExampleBackend:
    """Any processor that torch runs on."""

    manifest = BackendManifest.of_distribution("hal-backend-example")

    def devices(self, machine: Machine) -> tuple[Device, ...]:
        return tuple(device for device in machine.devices if device.kind == "cpu")

    def kernels(self) -> tuple[Kernel, ...]:
        return (ExampleLinear(), ExampleExperts())


backend = ExampleBackend()
