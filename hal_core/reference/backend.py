"""The reference backend object. It is built into hal-core, so it is there even when nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.kernel import CONTRACT, Kernel
from hal_core.manifest import BackendManifest
from hal_core.reference.kv import ReferenceKV
from hal_core.reference.linear import ReferenceEmbedding, ReferenceLinear
from hal_core.reference.moe import ReferenceMoE

if TYPE_CHECKING:
    from hal_core.machine import Device, Machine

__all__ = ["ReferenceBackend", "backend"]


class ReferenceBackend:
    """Plain torch on whatever device the tensors live on."""

    manifest = BackendManifest(
        name="reference",
        distribution="hal-core",
        contract=CONTRACT,
        torch=">=2.11",
        ops=("linear", "moe", "embedding", "kv"),
        install="pip install hal-core",
    )

    def devices(self, machine: Machine) -> tuple[Device, ...]:
        return machine.devices

    def kernels(self) -> tuple[Kernel[object], ...]:  # type: ignore[type-var]
        return (ReferenceLinear(), ReferenceMoE(), ReferenceEmbedding(), ReferenceKV())  # type: ignore[return-value]


backend = ReferenceBackend()
