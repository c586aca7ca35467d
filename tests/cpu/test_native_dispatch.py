"""Instruction-set selection, torch.compile and the operators' schemas."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from cpu.native_cases import USABLE, activations, make
from cpu.native_moe import experts, routing

from hal_backend_cpu import _native


def run(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


NATIVE = "from hal_backend_cpu import _native; "
CALL = "import torch; p = torch.zeros(1, 1, 16, dtype=torch.int32); s = torch.zeros(1, 1, 16); "


def test_environment_lowers_and_never_raises_the_level():
    assert run(NATIVE + "print(_native.usable_isa(), _native.preferred_isa())", HAL_CPU_ISA="avx2") == "avx2 avx2"
    assert run(NATIVE + "print(_native.usable_isa())", HAL_CPU_ISA="amx") == _native.usable_isa()


@pytest.mark.parametrize(("level", "beyond"), [("avx2", "avx512"), ("avx512", "vnni"), ("avx512vnni", "bf16"), ("avx512bf16", "amx")])
def test_a_lowered_level_has_no_probe_beyond_it(level, beyond):
    names = run(NATIVE + "print(_native.ops.probe_peaks())", HAL_CPU_ISA=level)
    assert names.startswith("float:avx2 fp32 fma")
    assert beyond not in names


def test_unknown_level_in_the_environment_raises():
    assert "HAL_CPU_ISA is 'sse9'" in run(NATIVE + "print(_native.usable_isa())", HAL_CPU_ISA="sse9")


def test_asking_above_the_usable_level_raises():
    call = "_native.ops.linear(torch.zeros(1, 8), p, s, None, None, None, None, 16, 8, 8, 4, 'avx512')"
    assert "isa 'avx512' is above the usable 'avx2'" in run(NATIVE + CALL + call, HAL_CPU_ISA="avx2")


def test_importing_the_package_loads_no_library():
    assert run("import sys, hal_backend_cpu; print('torch' in sys.modules)") == "False"


def test_levels_agree_closely():
    m, x = make(64, 256, 32, 4, "zeros"), activations(5, 256)
    results = [_native.ops.linear(x, *m.packed, None, None, 64, 256, 32, 4, isa) for isa in USABLE]
    for y in results:
        torch.testing.assert_close(y, results[0], rtol=1e-5, atol=1e-3)
    assert _native.preferred_isa() in USABLE


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(compiler):
    m, block = make(64, 96, 32, 4, "zeros"), experts()
    packed = m.packed
    ids, weights = routing(7, 6, 2)

    x = activations(7, 96)
    fixed = block.arguments(x, ids, weights)[3:]

    def step(x, ids, weights):
        y = _native.ops.moe(x, ids, weights, *fixed)
        out = torch.empty(7, 64)
        _native.ops.linear_out(y, *packed, None, None, 64, 96, 32, 4, "auto", out)
        table = _native.ops.lookup(ids.long(), *packed, None, 64, 96, 32, 4, torch.float32)
        return _native.ops.linear(y, *packed, None, None, 64, 96, 32, 4, "auto") + out, table.sum()

    found = torch.compile(step, fullgraph=True, backend=compiler)(x, ids, weights)
    for a, b in zip(found, step(x, ids, weights), strict=True):
        assert torch.equal(a, b)


def test_schemas_and_fake_kernels_are_sound():
    m, block = make(32, 64, 32, 4, "zeros"), experts()
    x, ids = activations(3, 64), torch.tensor([[1, 2]])
    common = (*m.packed, None, None, 32, 64, 32, 4, "auto")
    moe = block.arguments(activations(3, 96), *routing(3, 6, 2))
    cases = [
        (_native.ops.linear, (x, *common)),
        (_native.ops.linear_out, (x, *common, torch.empty(3, 32))),
        (_native.ops.lookup, (ids, *m.packed, None, 32, 64, 32, 4, torch.bfloat16)),
        (_native.ops.moe, tuple(moe)),
        (_native.ops.moe, tuple(block.arguments(activations(3, 96), *routing(3, 6, 2), reduce=False))),
        (_native.ops.moe_out, (*moe, torch.empty(3, 96))),
        (_native.ops.pack, (m.values, 64, 4)),
        (_native.ops.unpack, (m.packed[0], 32, 64, 4, False)),
        (_native.ops.pack_groups, (m.scales,)),
        (_native.ops.unpack_groups, (m.packed[1], 32)),
    ]
    for op, arguments in cases:
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_repeated_calls_do_not_grow_memory():
    code = NATIVE + CALL + (
        "import resource\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "def calls(n):\n"
        "    x = torch.zeros(1, 8)\n"
        "    for _ in range(n): _native.ops.linear(x, p, s, None, None, None, None, 16, 8, 8, 4, 'auto')\n"
        "calls(2000); before = peak(); calls(40000); print(peak() - before < 512)"
    )  # fmt: skip
    assert run(code) == "True"
