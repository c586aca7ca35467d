"""What hal-backend-rocm lists: light, of the kinds that its manifest names, and beside the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def test_listing_kernels_imports_neither_triton_nor_aiter():
    both = "hal_backend_rocm.kernels, hal_backend_rocm.aiter_provider.kernels"
    code = f"import {both}, sys; print([n for n in ('triton', 'aiter') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_every_kernel_of_the_wheel_is_of_a_kind_that_the_manifest_names(repository):
    from hal_backend_rocm.aiter_provider.kernels import KERNELS as PROVIDED
    from hal_backend_rocm.kernels import KERNELS

    from hal_core.contract import kernel_problems

    ops = tuple(json.loads((repository / "backend_rocm" / "hal_backend.json").read_text(encoding="utf-8"))["ops"])
    problems = {kernel.name: kernel_problems(kernel, ops) for kernel in (*KERNELS, *PROVIDED)}
    assert {name: found for name, found in problems.items() if found} == {}
    assert len(problems) == len(KERNELS) + len(PROVIDED), "two kernels of one name"


@pytest.mark.skipif(not os.environ.get("HAL_TEST_INSTALLED"), reason="needs the installed wheels; `make test-rocm` installs them")
def test_probe_says_that_it_never_ran_and_every_wheel_beside_it_is_listed():
    code = "import hal_core; print(hal_core.probe())"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    lines = told.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.strip().startswith("rocm ")]
    assert "linear_triton" in lines[at]
    assert lines[at + 1].strip() == "compiled and interpreted, never run"
    assert any(line.strip().startswith("cuda ") for line in lines)
