"""The conformance kit on the ops over AITER's experts, computed by the functions of test_aiter_ops.py: some cases of each check."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; `make test-rocm` brings it")

from hal_backend_rocm.aiter_provider.entries import MOES, entry_refusals
from hal_backend_rocm.aiter_provider.kernels import MoEAiter
from hal_backend_rocm.aiter_provider.ops import AiterExperts
from kit_cases import parametrize
from test_aiter_ops import library  # noqa: F401 - a fixture, used by every test

from hal_core.kernel import MoEKernel
from hal_core.testing import BackendConformance
from hal_core.testing.checks.experts import STRAY_IDS


class Here(MoEAiter):
    """A kernel as one of the host, for the first of its targets."""

    devices = ("cpu",)
    provider = ""

    def refusals(self, spec, machine):
        return (*MoEKernel.refusals(self, spec, machine), *entry_refusals(self._entry, spec, self._entry.targets[0]))

    def prepare(self, spec, weights):
        return AiterExperts(spec, weights, self._entry, torch.device("cpu"), self._entry.targets[0])


class TestAiterExperts(BackendConformance):
    backend = "rocm"
    kernels = tuple(Here(entry) for entry in MOES)

    unsupported: ClassVar = {f"rocm.*/routing/{word}*": "wrong ids are reported on a GPU, by hal.check()" for word in STRAY_IDS} | {
        "rocm.*/compile/*": "AITER's functions here are Python that walks over tokens",
        **{f"rocm.moe_aiter_{e.name}/accuracy/*": "the functions here do not quantize activations" for e in MOES if e.quant is not None},
    }

    def pytest_generate_tests(self, metafunc):
        parametrize(self, metafunc, lambda check: {"accuracy": 6, "routing": 12}.get(check, 2))
