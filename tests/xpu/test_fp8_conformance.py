"""The conformance kit on linears of narrow floats and on W8A8, on the SYCL device of the host."""

from __future__ import annotations

import torch
from hal_backend_xpu import fp8_kernels
from kit_cases import parametrize

from hal_core.testing import BackendConformance


def here(kernel):
    """The same kernel, as one of the host."""

    def prepare(self, spec, weights):
        from hal_backend_xpu.fp8_linear import Int8Linear, NarrowLinear

        op = Int8Linear if kernel.schemes.dtypes == ("int8",) else NarrowLinear
        return op(spec, weights, torch.device("cpu"))

    kind = type(kernel)
    return type(kind.__name__, (kind,), {"devices": ("cpu",), "prepare": prepare, "__doc__": kind.__doc__, "__module__": __name__})()


#: Each op is computed in software: so many cases of each check and kernel, spread evenly.
EACH = {"accuracy": 4, "refusals": 20}


class TestXpuLinears(BackendConformance):
    backend = "xpu"
    kernels = tuple(here(kernel) for kernel in fp8_kernels.KERNELS)

    def pytest_generate_tests(self, metafunc):
        parametrize(self, metafunc, lambda check: EACH.get(check, 2))
