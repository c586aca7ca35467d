"""The AVX2 path on an emulated processor that has nothing above AVX2: an illegal instruction would end the process."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

QEMU = shutil.which("qemu-x86_64")
TESTS = pathlib.Path(__file__).parents[2]
PROGRAM = """
import json, warnings
warnings.simplefilter("ignore")
import torch
from cpu.native_cases import activations, error, linear, make
from cpu.native_layer import Case, Layer, Mlp
from cpu.native_moe import Experts, experts, routing
from hal_backend_cpu import _native
from hal_core.formats.unpack import torch_codes

found = {"usable": _native.usable_isa(), "preferred": _native.preferred_isa()}
for bits in (4, 8):
    for zero in ("none", "zeros", "mins"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            m, x = make(37, 72, 24, bits, zero), activations(19, 72, dtype)
            found[f"linear {bits} {zero} {dtype}"] = error(linear(x, m), x.double() @ m.weight().T)
            ids = torch.tensor([0, 36, 5])
            row = _native.ops.lookup(ids, *m.packed, None, m.n, m.k, m.group, m.bits, dtype)
            found[f"lookup {bits} {zero} {dtype}"] = error(row, m.weight()[ids])
        ids, weights = routing(9, 6, 2)
        block, x = experts(bits=bits, zero=zero), activations(9, 96)
        found[f"experts {bits} {zero}"] = error(block.native(x, ids, weights), block.truth(x, ids, weights))
for case in (Case(held=9), Case(tokens=30, norms=True), Case(tokens=20, held=3, dtype=torch.float16)):
    layer, mlp = Layer(case), Mlp(72, 40)
    found[f"attention {case}"] = error(layer.native("auto"), layer.reference()[0])
    mlp.norm = mlp.norm.to(case.dtype).float()
    found[f"mlp {case}"] = error(mlp.native(layer.x, "auto"), mlp.reference(layer.x))
words = torch.randint(-(2**31), 2**31, (96, 40), dtype=torch.int32)
for order, bits, count in (("rows", 4, 319), ("columns", 4, 768), ("columns", 3, 1024), ("awq", 4, 96)):
    same = torch.equal(_native.unpack_words(words, order, bits, count), torch_codes(words, order, bits, count, False))
    found[f"unpack {order} {bits}"] = 0.0 if same else 1.0
found["turn"] = 0.0 if torch.equal(_native.turn(words), words.t()) else 1.0

import hal_core as hal
scheme = hal.WeightScheme.parse("int4:g32")
found["selected"] = hal.select(hal.LinearSpec(64, 128, scheme)).kernel
print("FOUND " + json.dumps(found))
"""


def haswell(code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"}
    command = [str(QEMU), "-cpu", "Haswell", sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)


@pytest.mark.timeout(900)  # the interpreter and torch are emulated too
@pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 (Debian: qemu-user) is not installed")
def test_every_op_runs_on_a_processor_with_avx2_alone():
    done = haswell(PROGRAM)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))[6:])
    assert (found.pop("usable"), found.pop("preferred")) == ("avx2", "avx2")
    assert found.pop("selected") == "cpu.linear_avx2"
    assert len(found) > 40
    assert {name: value for name, value in found.items() if not value < 5e-3} == {}


@pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 (Debian: qemu-user) is not installed")
def test_the_emulator_does_stop_a_wider_instruction(tmp_path):
    """Else the test above would show nothing."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    source = tmp_path / "wide.cpp"
    source.write_text('int main() { asm volatile("vpternlogd $255, %zmm0, %zmm0, %zmm0"); }')
    subprocess.run([compiler, "-o", str(tmp_path / "wide"), str(source)], check=True)
    done = subprocess.run([str(QEMU), "-cpu", "Haswell", str(tmp_path / "wide")], capture_output=True, check=False, timeout=60)
    assert done.returncode in (-4, 132), "SIGILL"
