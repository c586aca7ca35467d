"""Checkpoints of AutoRound and GPTQ: what the XPU's four-bit ops hold and compute is what the file says."""

from __future__ import annotations

import pytest
import torch
from golden import goldens
from hal_backend_xpu.ops import Int4Linear

import hal_core as hal
from hal_core.kernel import LinearWeights
from hal_core.machine import Machine
from hal_core.spec import LinearSpec
from hal_core.testing import truth

pytestmark = pytest.mark.usefixtures("sycl_device")

#: Both group orders, and a zero point stored less one.
NAMES = ("ar_sym_int4_g32_moe", "gptq_v1_descact_int4_g32")


def held(name: str):
    """Some linears of a checkpoint that the kernel accepts: name and canonical weight."""
    from hal_backend_xpu.declared import on_host
    from hal_backend_xpu.kernels import LinearInt4

    checkpoint, kernel, found = hal.open_checkpoint(goldens.folder(name)), on_host(LinearInt4()), []
    for key, entry in checkpoint.entries.items():
        if entry.quantized and len(entry.shape) == 2 and entry.scheme.dtype == "int4":
            spec = LinearSpec(*entry.shape, entry.scheme)
            if not kernel.refusals(spec, Machine.detect()):
                found.append((key, spec))
    return checkpoint, found


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_comes_back_bit_for_bit_and_multiplies_as_its_canonical_weights(name):
    checkpoint, found = held(name)
    assert found
    for key, spec in found[:: max(1, len(found) // 6)]:
        weight = checkpoint.read(key)
        op = Int4Linear(spec, LinearWeights(weight))
        back = op.weight.unpack()
        assert all(torch.equal(getattr(back, n), t) for n, t in weight.tensors().items() if n in {"values", "scales", "zeros", "g_idx"})
        for rows in (1, 40):
            x = torch.randn(rows, spec.k).bfloat16()
            wanted = truth.linear(LinearWeights(weight), x)
            assert float((op.apply(x).double() - wanted).norm() / wanted.norm()) < (2.5e-3 if rows == 1 else 5e-3), key
