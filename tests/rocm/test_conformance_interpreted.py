"""The conformance kit on this backend's Triton kernels without a GPU: Triton's interpreter, repaired, on tensors of the host.

The CUDA backend's tests do the same with the kernels that both share; here are those in e4m3fnuz.
"""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("there is a GPU: `hal verify rocm` runs the kit on it", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed; `make test-rocm` brings it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 must be set before triton is imported; `make test-rocm` does", allow_module_level=True)

import triton_interpreter
from hal_backend_rocm import kernels
from kit_cases import parametrize

from hal_core.testing import BackendConformance
from hal_core.testing.checks.experts import STRAY_IDS

triton_interpreter.repair()


def here(kernel):
    """The same kernel, as one of the host."""
    kind = type(kernel)
    return type(kind.__name__, (kind,), {"devices": ("cpu",), "architectures": (), "__doc__": kind.__doc__, "__module__": __name__})()


#: The interpreter takes seconds for what a GPU does in microseconds: so many cases of each check and kernel, spread evenly.
EACH = {"accuracy": 2, "refusals": 20, "layout": 2}


class TestRocmKernels(BackendConformance):
    backend = "rocm"
    kernels = tuple(here(kernel) for kernel in kernels.KERNELS if "fnuz" in kernel.name)

    unsupported: ClassVar = {
        f"rocm.*/routing/{word}*": "a wrong id raises at once on the host, and in hal.check() here"
        for word in (*STRAY_IDS, "map_past_the_end")
    } | {"rocm.*/threads/*": "Triton's interpreter replaces its own functions while it runs: one thread at a time"}

    def pytest_generate_tests(self, metafunc):
        parametrize(self, metafunc, lambda check: EACH.get(check, 1))
