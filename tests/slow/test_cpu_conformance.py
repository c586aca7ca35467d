"""Every pair of the conformance kit's values on the CPU kernels; `make test` runs those that show every behaviour once."""

from __future__ import annotations

import pytest

from hal_core.testing import BackendConformance

kernels = pytest.importorskip("hal_backend_cpu.kernels_amx", reason="the hal-backend-cpu wheel is not installed")

from cpu.test_conformance_tiles import emulated  # noqa: E402


@pytest.mark.slow
class TestCPU(BackendConformance):
    backend = "cpu"


@pytest.mark.slow
class TestEmulatedTiles(BackendConformance):
    backend = "emulated"
    kernels = tuple(map(emulated, kernels.KERNELS))
