"""Every kernel and every tile of the tables compiled for GPUs that are not here: tensor-core instructions, registers, memory."""

from __future__ import annotations

import os
import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; `make test-cuda` brings it")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 interprets kernels instead of compiling them", allow_module_level=True)

import triton_offline

from hal_core.spec import ACTIVATIONS
from hal_core.triton import configs, grouped, launch, ops
from hal_core.triton.launch import FloatMatrix, IntegerMatrix
from hal_core.triton.ops import Experts

META = "meta"
ARCHITECTURES = (80, 90, 100)
E, H, INNER, K = 128, 2048, 768, 8
#: What a product must be made of; fp8 has none before sm_89.
UNITS = {
    80: r"mma\.sync\.aligned\.m16n8k16", 89: r"mma\.sync\.aligned\.m16n8k16", 90: r"wgmma\.mma_async\S*k16\.f32",
    100: r"tcgen05\.mma\S*kind::f16|mma\.sync\.aligned\.m16n8k16",
}  # fmt: skip
UNITS_FP8 = {
    89: r"mma\.sync\S*e4m3\.e4m3", 90: r"wgmma\.mma_async\S*e4m3\.e4m3", 100: r"tcgen05\.mma\S*kind::f8f6f4|mma\.sync\S*e4m3\.e4m3"
}  # fmt: skip
#: Bytes of shared memory of one block, by architecture.
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


def integer(n, k, *, bits=4, group=128, zero="none", lead=(E,), bias=False, perm=False, scales=torch.bfloat16):
    step, pad = 512 // bits, -(-n // 64) * 64
    made = lambda *shape, dtype: torch.empty(*lead, *shape, dtype=dtype, device=META)  # noqa: E731
    grid = (-(-k // group) if group else 1, pad)
    return IntegerMatrix(
        made(-(-k // step), pad, 16, dtype=torch.int32), made(*grid, dtype=scales),
        made(*grid, dtype=torch.uint8) if zero == "integer" else None, made(*grid, dtype=scales) if zero == "minimum" else None,
        made(k, dtype=torch.int32) if perm else None, made(n, dtype=torch.float32) if bias else None, n, k, group, bits,
    )  # fmt: skip


def floats(n: int, k: int, dtype=torch.bfloat16, block=None, lead=(E,), bias=False):
    scales = None
    if dtype == torch.float8_e4m3fn:
        scales = torch.empty(*lead, *((-(-n // 128), -(-k // 128)) if block else (n,)), device=META)
    own = torch.empty(*lead, n, device=META) if bias else None
    return FloatMatrix(torch.empty(*lead, n, k, dtype=dtype, device=META), scales, own, block)


def experts(make, kind="silu", limit=None, gated=True, router=False):
    gate = make(INNER, H) if gated else None
    return Experts(make(INNER, H), make(H, INNER), gate, kind, 1.702, limit, E, E, 1.0, router)


def compiled(arch: int, made: Experts, tokens: int, *, dtype=torch.bfloat16, tiles=None, mapped=False, reduce=True):
    with triton_offline.compiling(arch) as found:
        x = torch.empty(tokens, H, dtype=dtype, device=META)
        ids = torch.empty(tokens, K, dtype=torch.int32, device=META)
        out = torch.empty(tokens, *(() if reduce else (K,)), H, dtype=dtype, device=META)
        mapping = torch.empty(E, dtype=torch.int32, device=META) if mapped else None
        ops.moe(x, ids, torch.empty(tokens, K, device=META), mapping, made, out, tiles)
    return found


def check(found, arch: int, units: str):
    assert found
    for kernel in found:
        used = kernel.resources()
        assert kernel.shared <= SHARED[arch], kernel.label()
        assert used["LOCAL"] == 0, f"{kernel.label()}: registers do not suffice"
        if kernel.name.endswith("_gemm"):
            assert re.search(units, kernel.ptx), f"{kernel.label()} does not use the tensor cores as it should"


@pytest.mark.parametrize(
    ("arch", "kind"), [*((a, k) for a in ARCHITECTURES for k in ("integer", "float")), *((a, "fp8") for a in UNITS_FP8)]
)
def test_every_tile_compiles_to_the_tensor_cores(arch, kind):
    make = {"integer": integer, "float": floats, "fp8": lambda n, k: floats(n, k, torch.float8_e4m3fn, (128, 128))}[kind]
    units = UNITS_FP8 if kind == "fp8" else UNITS
    for tiles in configs.all_tiles(f"sm_{arch}")[kind]:
        check(compiled(arch, experts(make), 64, tiles=tiles), arch, units[arch])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_tile_of_a_linear_compiles(arch):
    for rows in (1, 32, 64, 512):
        with triton_offline.compiling(arch) as found:
            x = torch.empty(rows, 4096, dtype=torch.bfloat16, device=META)
            ops.integer_linear(x, integer(4096, 4096, lead=(), bias=rows == 1), torch.empty(rows, 4096, dtype=x.dtype, device=META))
        check(found, arch, UNITS[arch])


FEATURES = {
    "zero": {"zero": "integer"}, "minimum": {"zero": "minimum", "scales": torch.float16}, "g32": {"group": 32},
    "g64 minimum": {"group": 64, "zero": "minimum"}, "channel": {"group": 0}, "int8": {"bits": 8},
    "int8 g32 zero": {"bits": 8, "group": 32, "zero": "integer"},
    "act-order": {"perm": True}, "bias": {"bias": True}, "float32 scales": {"scales": torch.float32},
}  # fmt: skip


@pytest.mark.parametrize(("arch", "name"), [*((90, name) for name in FEATURES), (80, "zero"), (80, "int8"), (100, "zero"), (100, "int8")])
def test_every_form_of_weights_compiles(arch, name):
    made = experts(lambda n, k: integer(n, k, **FEATURES[name]))
    check(compiled(arch, made, 16), arch, UNITS[arch])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_unpacked_in_registers(dtype):
    for bits in (4, 8):
        found = compiled(90, experts(lambda n, k, bits=bits: integer(n, k, bits=bits)), 16, dtype=dtype)
        for kernel in (k for k in found if k.name == "integer_gemm"):
            loop = kernel.ptx[: kernel.ptx.rindex("wgmma.mma_async")]
            loop = loop[loop.index("wgmma.fence") :] if "wgmma.fence" in loop else loop
            assert "st.shared" not in loop, f"{kernel.label()} sends unpacked weights through shared memory"
            assert "cvt.rn.bf16.s" not in kernel.ptx, f"{kernel.label()} converts codes one by one"


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_activation_compiles(kind):
    gated = kind != "relu2"
    check(compiled(90, experts(integer, kind, 7.0, gated, router=True), 1, mapped=True, reduce=False), 90, UNITS[90])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sorting_and_quantizers_compile(arch):
    experts = {80: 128, 90: 512, 100: 8}[arch]
    with triton_offline.compiling(arch) as found:
        for tokens in (8, 32, 1000):
            ids = torch.empty(tokens, K, dtype=torch.int64, device=META)
            flag = torch.empty(2, dtype=torch.int64, device=META)
            launch.sorted_by_expert(ids, ids, None, experts, experts, 64, flag)
        x = torch.empty(33, 5120, dtype=torch.bfloat16, device=META)
        launch.quantize_int8(x)
        launch.quantize_int8(x[:, 2560:], x[:, :2560], launch.Epilogue("silu"))
        if arch >= 89:
            launch.quantize_fp8(x, 128)
            launch.quantize_fp8(x[:, 2560:], 128, gate=x[:, :2560], epilogue=launch.Epilogue("silu"))
            launch.quantize_fp8(x, None)
        launch.widened(integer(4096, 4096, lead=()), 0, torch.empty(4096, 4096, dtype=torch.bfloat16, device=META))
    check(found, arch, "")
    assert {"sort_slots", "count_slots", "scatter_slots", "int8_tokens", "widen_steps"} <= {kernel.name for kernel in found}


def test_steps_around_the_grouped_product_compile(monkeypatch):
    monkeypatch.setattr(grouped, "_product", lambda rows, matrix, ends: torch.empty(len(rows), matrix.n, dtype=rows.dtype, device=META))
    made = experts(floats)
    found = compiled(90, Experts(made.up, made.down, made.gate, "silu", 1.0, None, E, E, 1.0, False, grouped=True), 64)
    assert {"gather_rows", "activate_rows", "weighted_sum"} <= {kernel.name for kernel in found}
    check(found, 90, "")
