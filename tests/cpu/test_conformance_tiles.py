"""The kernels of matrix tiles under the conformance kit, on emulated tiles where the processor has none of its own."""

from __future__ import annotations

import pytest

from hal_core.testing import BackendConformance

kernels = pytest.importorskip("hal_backend_cpu.kernels_amx", reason="the hal-backend-cpu wheel is not installed")


def emulated(kernel: object) -> object:
    """The same declaration, on tiles in plain memory."""
    base = type(kernel)
    needed = tuple(feature for feature in base.isa if not feature.startswith("amx"))
    return type(f"Emulated{base.__name__}", (base,), {"isa": needed, "_level": base._level.replace("amx", "emulated")})()


class TestEmulatedTiles(BackendConformance):
    backend = "emulated"
    short = True
    kernels = tuple(map(emulated, kernels.KERNELS))
