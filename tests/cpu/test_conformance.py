"""The CPU backend under the conformance kit, as a vendor would have it in its own tests; every pair is in tests/slow."""

from __future__ import annotations

import pytest

from hal_core.testing import BackendConformance

pytest.importorskip("hal_backend_cpu.kernels", reason="the hal-backend-cpu wheel is not installed")


class TestCPU(BackendConformance):
    backend = "cpu"
    short = True
