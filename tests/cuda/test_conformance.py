"""This backend's own kernels under the conformance kit, on a CUDA GPU."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("hal_backend_cuda.kernels", reason="the hal-backend-cuda wheel is not installed")

from hal_backend_cuda.kernels import KERNELS
from kit_cases import parametrize

from hal_core.testing import BackendConformance


class TestCuda(BackendConformance):
    backend = "cuda"
    kernels = KERNELS

    def pytest_generate_tests(self, metafunc):
        parametrize(self, metafunc, lambda check: 0)
