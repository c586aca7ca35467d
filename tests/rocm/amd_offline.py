"""Kernels compiled for AMD GPUs that are not here: the launches of real calls, turned into compilations."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hal_core.triton import launch, ops

_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64", torch.int8: "i8",
    torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e4m3fnuz: "fp8e4b8",
}  # fmt: skip
_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target. options: of AMD's compiler, as the launch gave them."""

    name: str
    values: dict
    options: dict
    assembly: str
    shared: int

    def number(self, name: str) -> int:
        """One number of the code object's own description."""
        found = re.search(rf"\.{name}:\s+(\d+)", self.assembly)
        assert found, f"{self.label()} says no .{name}"
        return int(found[1])

    def label(self) -> str:
        shown = ("BM", "BN", "BK", "SPLIT", "BITS", "GROUP", "ZERO", "GATED", "ROUTE", "SCALES", "KIND", "PERM")
        return f"{self.name}({', '.join(f'{k}={self.values[k]}' for k in shown if k in self.values)})"


def compile_kernel(kernel, values: dict, target: str, warps: int, stages: int, **options: int) -> Compiled:
    """As a launch with these arguments would compile it, its specializations by value included."""
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            within = value.numel() * value.itemsize < 1 << 31
            attributes[index,] = [["tt.divisibility", 16], *([["tt.pointer_range", 32]] if within else [])]
        elif kernel.params[index].is_constexpr or value == 1:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    wanted = {"num_warps": warps, "num_stages": stages, **options}
    made = triton.compile(source, target=GPUTarget("hip", target, 64), options=wanted)
    return Compiled(kernel.__name__, values, options, made.asm["amdgcn"], made.metadata.shared)


@contextlib.contextmanager
def compiling(target: str):
    """Inside, launches append to the list that this gives, and nothing runs; tensors may be on the meta device."""
    found: list[Compiled] = []
    seen = set()

    def record(kernel, grid, values, warps, stages):
        key = (kernel.__name__, warps, stages, *((n, str(v.dtype) if isinstance(v, torch.Tensor) else v) for n, v in values.items()))
        if key not in seen:
            seen.add(key)
            options = {name: values[name] for name in _OPTIONS if name in values}
            found.append(compile_kernel(kernel, values, target, warps, stages, **options))

    with (
        mock.patch.object(launch, "run", record),
        mock.patch.object(launch, "arch_of", return_value=target),
        mock.patch.object(ops, "arch_of", return_value=target),
    ):
        yield found
