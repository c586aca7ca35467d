"""Helpers lie beside the tests; the one that picks cases of the kit beside the CUDA backend's."""

import pathlib
import sys

import pytest

from hal_core.machine import Machine

_HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "cuda")]


@pytest.fixture(scope="session")
def sycl_device() -> None:
    """Skips where Intel's runtime, with its device of processors, is not there."""
    for runtime in ("intel-sycl-rt", "intel-opencl-rt"):
        if Machine.detect().version(runtime) is None:
            pytest.skip(f"{runtime} is not installed; `make test-xpu` brings it")
