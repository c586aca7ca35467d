"""Which matrix instruction Triton makes of a product, by type and target; where it makes none, why a kernel refuses the target.

A product without its instruction still compiles: Triton widens the operands and multiplies in another unit, several times slower and with
other rounding, and mostly without saying so. Every pair here is compiled and looked at by tests/rocm/test_offline.py, with Triton 3.9
and 3.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.packages import torch_build_refusals
from hal_core.refusal import Refusal

if TYPE_CHECKING:
    from hal_core.machine import Machine

__all__ = ["FP8_TYPE", "LDS_BYTES", "PRODUCTS", "TARGETS", "Product", "target_refusals", "torch_refusals"]

TARGETS = ("gfx90a", "gfx942", "gfx950")
#: Local memory of one workgroup.
LDS_BYTES = {"gfx90a": 64 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
#: The 8-bit float that matrix units multiply: the one of e4m3fnuz and e4m3fn that AMD built.
FP8_TYPE = {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn"}


@dataclass(frozen=True)
class Product:
    """instruction: pattern of the matrix instruction, empty where there is none. why: what happens instead."""

    instruction: str
    why: str = ""


_WIDENED = "no MFMA of it: Triton widens it to float16"
_UNSCALED = "no MFMA with scales of blocks: Triton 3.9 widens to bfloat16, Triton 3.6 does not compile it"
PRODUCTS: dict[tuple[str, str], Product] = {
    ("bf16", "gfx90a"): Product(r"v_mfma_f32_(16x16x16|32x32x8)bf16_1k"),
    ("bf16", "gfx942"): Product(r"v_mfma_f32_(16x16x16|32x32x8)_bf16"),
    ("bf16", "gfx950"): Product(r"v_mfma_f32_(16x16x32|32x32x16)_bf16"),
    ("fp16", "gfx90a"): Product(r"v_mfma_f32_(16x16x16|32x32x8)f16"),
    ("fp16", "gfx942"): Product(r"v_mfma_f32_(16x16x16|32x32x8)_f16"),
    ("fp16", "gfx950"): Product(r"v_mfma_f32_(16x16x32|32x32x16)_f16"),
    ("e4m3fnuz", "gfx90a"): Product("", "no MFMA of 8-bit floats: Triton multiplies in float32, outside the matrix units"),
    ("e4m3fnuz", "gfx942"): Product(r"v_mfma_f32_(16x16x32|32x32x16)_fp8_fp8"),
    ("e4m3fnuz", "gfx950"): Product("", _WIDENED),
    ("e4m3fn", "gfx90a"): Product("", _WIDENED),
    ("e4m3fn", "gfx942"): Product("", _WIDENED),
    ("e4m3fn", "gfx950"): Product(r"v_mfma_f32_(16x16x128|32x32x64)_f8f6f4"),
    # Both operands, as tl.dot_scaled takes them; no kernel of ours does.
    ("mxfp4", "gfx90a"): Product("", _UNSCALED),
    ("mxfp4", "gfx942"): Product("", _UNSCALED),
    ("mxfp4", "gfx950"): Product(r"v_mfma_scale_f32_(16x16x128|32x32x64)_f8f6f4"),
}


def _architectures(machine: Machine) -> list[str]:
    return sorted({device.architecture for device in machine.devices if device.kind == "rocm"})


def target_refusals(machine: Machine, operand: str) -> tuple[Refusal, ...]:
    """Why no AMD GPU of the machine multiplies ``operand``; empty where one does, or where there is no AMD GPU."""
    seen = _architectures(machine)
    products = {name: PRODUCTS.get((operand, name)) for name in seen}
    if any(product is not None and product.instruction for product in products.values()):
        return ()
    out = []
    for name, product in products.items():
        found = f"{name}: not one of {', '.join(TARGETS)}" if product is None else f"{name}: {product.why}"
        other = next((kind for target, kind in FP8_TYPE.items() if target == name and operand.startswith("e4m3")), None)
        fix = "use int8 or int4 weights, or another GPU" if other is None else f"use the kernels for {other}, which hold the same numbers"
        out.append(Refusal("device.arch", f"matrix instructions for {operand}", found, fix))
    return tuple(out)


def torch_refusals(machine: Machine) -> tuple[Refusal, ...]:
    """An AMD GPU beside a torch that was not built for ROCm."""
    return torch_build_refusals(machine, "rocm", "install torch from a rocm folder of its own package index")
