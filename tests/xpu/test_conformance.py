"""The conformance kit on this backend's own kernels, on the SYCL device of the host: some cases of each check, spread evenly."""

from __future__ import annotations

import pytest
from hal_backend_xpu.backend import OWN
from hal_backend_xpu.declared import on_host
from kit_cases import parametrize

from hal_core.machine import Machine
from hal_core.testing import BackendConformance

for _runtime in ("intel-sycl-rt", "intel-opencl-rt"):
    if Machine.detect().version(_runtime) is None:
        pytest.skip(f"{_runtime} is not installed; `make test-xpu` brings it", allow_module_level=True)

#: Of each check and kernel.
EACH = {"accuracy": 12, "refusals": 20, "rows": 6, "routing": 16, "layout": 4, "effects": 12}


class TestXpuKernels(BackendConformance):
    backend = "xpu"
    kernels = tuple(map(on_host, OWN))

    def pytest_generate_tests(self, metafunc):
        parametrize(self, metafunc, lambda check: EACH.get(check, 3))
