"""What hal-backend-cuda lists: light, and of the kinds that its manifest names. Its wheel is looked at with all others'."""

from __future__ import annotations

import json
import subprocess
import sys


def test_listing_kernels_imports_neither_triton_nor_providers():
    heavy = ("triton", "flashinfer", "humming")
    code = f"import hal_backend_cuda.kernels, hal_backend_cuda.providers.kernels, sys; print([n for n in {heavy} if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_every_kernel_of_the_wheel_is_of_a_kind_that_the_manifest_names(repository):
    from hal_backend_cuda.kernels import KERNELS
    from hal_backend_cuda.providers.kernels import KERNELS as PROVIDED

    from hal_core.contract import kernel_problems

    ops = tuple(json.loads((repository / "backend_cuda" / "hal_backend.json").read_text(encoding="utf-8"))["ops"])
    problems = {kernel.name: kernel_problems(kernel, ops) for kernel in (*KERNELS, *PROVIDED)}
    assert {name: found for name, found in problems.items() if found} == {}
    assert len(problems) == len(KERNELS) + len(PROVIDED), "two kernels of one name"
