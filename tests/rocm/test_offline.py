"""Every kernel and every tile of the tables compiled for AMD GPUs that are not here: matrix instructions, registers, local memory."""

from __future__ import annotations

import os
import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; `make test-rocm` brings it")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 interprets kernels instead of compiling them", allow_module_level=True)

import amd_offline
import triton
from hal_backend_rocm.aiter_provider.entries import MOES, entry_refusals
from hal_backend_rocm.targets import FP8_TYPE, LDS_BYTES, PRODUCTS, TARGETS, target_refusals
from scaled_product import scaled_product

from hal_core.machine import Device, Machine
from hal_core.schemes import WeightScheme
from hal_core.spec import ACTIVATIONS, MoESpec
from hal_core.triton import configs, gemm_float, launch, ops
from hal_core.triton.launch import FloatMatrix, IntegerMatrix
from hal_core.triton.ops import Experts

META = "meta"
E, H, INNER, K = 128, 2048, 768, 8
FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
OLDER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
#: Bytes of a lane's scratch that registers may spill into. None is what the tables are made for.
SCRATCH = 0


def integer(n, k, *, bits=4, group=128, zero="none", lead=(E,), bias=False, perm=False, scales=torch.bfloat16):
    step, pad = 512 // bits, -(-n // 64) * 64
    made = lambda *shape, dtype: torch.empty(*lead, *shape, dtype=dtype, device=META)  # noqa: E731
    grid = (-(-k // group) if group else 1, pad)
    return IntegerMatrix(
        made(-(-k // step), pad, 16, dtype=torch.int32), made(*grid, dtype=scales),
        made(*grid, dtype=torch.uint8) if zero == "integer" else None, made(*grid, dtype=scales) if zero == "minimum" else None,
        made(k, dtype=torch.int32) if perm else None, made(n, dtype=torch.float32) if bias else None, n, k, group, bits,
    )  # fmt: skip


def floats(n, k, dtype=torch.bfloat16, block=None, lead=(E,)):
    scales = torch.empty(*lead, *((-(-n // 128), -(-k // 128)) if block else (n,)), device=META) if dtype.itemsize == 1 else None
    return FloatMatrix(torch.empty(*lead, n, k, dtype=dtype, device=META), scales, None, block)


def experts(make, kind="silu", limit=None, gated=True, router=False):
    gate = make(INNER, H) if gated else None
    return Experts(make(INNER, H), make(H, INNER), gate, kind, 1.702, limit, E, E, 1.0, router)


def compiled(target, made, tokens, *, dtype=torch.bfloat16, tiles=None, mapped=False, reduce=True):
    with amd_offline.compiling(target) as found:
        x = torch.empty(tokens, H, dtype=dtype, device=META)
        ids = torch.empty(tokens, K, dtype=torch.int32, device=META)
        out = torch.empty(tokens, *(() if reduce else (K,)), H, dtype=dtype, device=META)
        mapping = torch.empty(E, dtype=torch.int32, device=META) if mapped else None
        ops.moe(x, ids, torch.empty(tokens, K, device=META), mapping, made, out, tiles)
    return found


def check(found, target, operand=None):
    assert found
    products = [kernel for kernel in found if kernel.name.endswith("_gemm")]
    assert products or operand is None
    for kernel in found:
        assert kernel.shared <= LDS_BYTES[target], kernel.label()
        assert kernel.number("private_segment_fixed_size") <= SCRATCH, f"{kernel.label()}: scratch"
        assert kernel.number("vgpr_spill_count") == 0, f"{kernel.label()}: registers do not suffice"
    for kernel in products:
        assert kernel.options, f"{kernel.label()} is launched without AMD's options"
        assert re.search(PRODUCTS[operand, target].instruction, kernel.assembly), f"{kernel.label()} has no matrix instruction"


def mxfp4_experts(entry):
    s = WeightScheme.parse("mxfp4:g32")
    return MoESpec(E, K, H, INNER, s, s, s, entry.activation, numerics=entry.numerics)


KINDS = (*((target, kind) for target in TARGETS for kind in ("integer", "float")), *((target, "fp8") for target in FP8_TYPE))


@pytest.mark.parametrize(("target", "kind"), KINDS)
def test_every_tile_compiles_to_the_matrix_units(target, kind):
    operand = FP8_TYPE[target] if kind == "fp8" else "bf16"
    make = {"integer": integer, "float": floats, "fp8": lambda n, k: floats(n, k, FP8[operand], (128, 128))}[kind]
    for tiles in configs.all_tiles(target)[kind]:
        check(compiled(target, experts(make), 64, tiles=tiles), target, operand)


@pytest.mark.parametrize("target", TARGETS)
def test_every_tile_of_a_linear_compiles(target):
    for rows in (1, 32, 512):
        with amd_offline.compiling(target) as found:
            x = torch.empty(rows, 4096, dtype=torch.bfloat16, device=META)
            ops.integer_linear(x, integer(4096, 4096, lead=(), bias=rows == 1), torch.empty(rows, 4096, dtype=x.dtype, device=META))
        check(found, target, "bf16")


@pytest.mark.parametrize("target", FP8_TYPE)
def test_fp8_linears_compile(target):
    for block in (None, (128, 128)):
        for rows in (1, 512):
            with amd_offline.compiling(target) as found:
                x = torch.empty(rows, 4096, dtype=torch.bfloat16, device=META)
                weight = floats(4096, 4096, FP8[FP8_TYPE[target]], block, lead=())
                ops.float_linear(x, weight, torch.empty(rows, 4096, dtype=x.dtype, device=META))
            check(found, target, FP8_TYPE[target])


FEATURES = {
    "zero": {"zero": "integer"}, "minimum": {"zero": "minimum", "scales": torch.float16}, "g32": {"group": 32},
    "g64 minimum": {"group": 64, "zero": "minimum"}, "channel": {"group": 0}, "int8": {"bits": 8},
    "int8 g32 zero": {"bits": 8, "group": 32, "zero": "integer"},
    "act-order": {"perm": True}, "bias": {"bias": True}, "float32 scales": {"scales": torch.float32},
}  # fmt: skip
SOME = tuple((target, name) for target in ("gfx90a", "gfx950") for name in ("zero", "int8"))


@pytest.mark.parametrize(("target", "name"), [*(("gfx942", name) for name in FEATURES), *SOME])
def test_every_form_of_weights_compiles(target, name):
    check(compiled(target, experts(lambda n, k: integer(n, k, **FEATURES[name])), 16), target, "bf16")


@pytest.mark.parametrize("target", TARGETS)
def test_fp16_compiles(target):
    check(compiled(target, experts(integer), 16, dtype=torch.float16), target, "fp16")
    check(compiled(target, experts(lambda n, k: floats(n, k, torch.float16)), 16, dtype=torch.float16), target, "fp16")


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_activation_compiles(kind):
    made = experts(integer, kind, 7.0, kind != "relu2", router=True)
    check(compiled("gfx942", made, 1, mapped=True, reduce=False), "gfx942", "bf16")


@pytest.mark.parametrize("target", TARGETS)
def test_sorting_and_quantizers_compile(target):
    with amd_offline.compiling(target) as found:
        for tokens in (32, 1000):
            ids = torch.empty(tokens, K, dtype=torch.int64, device=META)
            flag, places = torch.empty(2, dtype=torch.int64, device=META), torch.empty(tokens * K, dtype=torch.int32, device=META)
            launch.sorted_by_expert(ids, ids, None, 512, 512, 64, flag, places)
        x = torch.empty(33, 5120, dtype=torch.bfloat16, device=META)
        launch.flag_only(launch.direct(ids, ids, None, 512, 512), flag, K)
        launch.quantize_int8(x)
        if target in FP8_TYPE:
            launch.quantize_fp8(x, 128, FP8[FP8_TYPE[target]])
            launch.quantize_fp8(x, None, FP8[FP8_TYPE[target]])
        launch.widened(integer(4096, 4096, lead=()), 0, torch.empty(4096, 4096, dtype=torch.bfloat16, device=META))
    check(found, target)
    wanted = {"count_slots", "sort_slots", "scatter_slots", "flag_slots", "int8_tokens", "widen_steps"}
    assert {kernel.name for kernel in found} == wanted | ({"fp8_groups"} if target in FP8_TYPE else set())


@pytest.mark.parametrize("target", TARGETS)
def test_products_with_scales_of_blocks_are_what_the_table_says(target):
    """No kernel of ours has them; AITER's are refused with this table's reason where the instruction is not there."""
    product = PRODUCTS["mxfp4", target]
    refused = not product.instruction
    machine = Machine("linux_x86_64", (Device("rocm", "amd", target, "a GPU"),))
    assert [reason.found for reason in target_refusals(machine, "mxfp4")] == [f"{target}: {product.why}"] * refused
    for entry in MOES[-2:]:
        reasons = entry_refusals(entry, mxfp4_experts(entry), target)
        assert bool(reasons) == refused
        assert all(product.why in reason.found for reason in reasons)
    pointers = {"a_ptr": torch.uint8, "as_ptr": torch.uint8, "b_ptr": torch.uint8, "bs_ptr": torch.uint8, "c_ptr": torch.float32}
    values = {name: torch.empty(1 << 14, dtype=dtype, device=META) for name, dtype in pointers.items()}
    made = lambda: amd_offline.compile_kernel(scaled_product, values, target, 4, 1)  # noqa: E731
    if OLDER and refused:
        with pytest.raises(RuntimeError, match="PassManager::run failed"):
            made()
        return
    assembly = made().assembly
    assert bool(re.search(r"v_mfma_scale_f32", assembly)) != refused
    assert re.search(product.instruction or r"v_mfma_f32_\w*bf16", assembly)


@pytest.mark.parametrize(("operand", "target"), [pair for pair in PRODUCTS if pair[0] in FP8])
def test_pairs_are_what_the_table_says(operand, target):
    """What refused pairs compile to shows why they are refused: no instruction of 8-bit floats is in them."""
    tile = configs.all_tiles(target)["fp8"][0][0]
    try:
        found = compiled(target, experts(lambda n, k: floats(n, k, FP8[operand])), 4, tiles=(tile, tile))
    except RuntimeError as error:
        # Triton 3.6 keeps the conversions of the first target of a process, and fails on those of a target without e4m3fnuz
        if not (OLDER and operand == "e4m3fnuz" and PRODUCTS[operand, target].why and "PassManager::run failed" in str(error)):
            raise
        return
    (kernel, *_) = (kernel for kernel in found if kernel.name == gemm_float.float_gemm.__name__)
    product = PRODUCTS[operand, target]
    assert bool(product.instruction) != bool(product.why)
    assert bool(re.search(r"v_mfma_\w*(fp8|f8f6f4)", kernel.assembly)) == bool(product.instruction)
    if product.why:
        instead = r"v_mfma_f32_\w*f16" if "float16" in product.why else r"v_pk_fma_f32|v_fma_f32|v_fmac_f32"
        assert re.search(instead, kernel.assembly), product.why
        assert ("v_mfma" in kernel.assembly) == ("float16" in product.why)
