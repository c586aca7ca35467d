"""Kernels compiled for a GPU that is not here: the launches of real calls, turned into compilations."""

from __future__ import annotations

import contextlib
import pathlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hal_core.triton import launch, ops

_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64", torch.int8: "i8",
    torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
_CUOBJDUMP = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture."""

    name: str
    values: dict
    ptx: str
    cubin: bytes
    shared: int

    def resources(self) -> dict[str, int]:
        """Registers, stack and local memory, as the assembler reports them."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            text = subprocess.run([_CUOBJDUMP, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True).stdout
        return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}

    def label(self) -> str:
        shown = ("BM", "BN", "BK", "SPLIT", "BITS", "GROUP", "ZERO", "GATED", "ROUTE", "SCALES", "KIND", "PERM")
        return f"{self.name}({', '.join(f'{k}={self.values[k]}' for k in shown if k in self.values)})"


def compile_kernel(kernel, values: dict, arch: int, warps: int, stages: int) -> Compiled:
    """As a launch with these arguments would compile it, its specializations by value included."""
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            attributes[index,] = [["tt.divisibility", 16]]
        elif kernel.params[index].is_constexpr or value == 1:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": stages})
    return Compiled(kernel.__name__, values, made.asm["ptx"], made.asm["cubin"], made.metadata.shared)


@contextlib.contextmanager
def compiling(arch: int):
    """Inside, launches append to the list that this gives, and nothing runs; tensors may be on the meta device."""
    found: list[Compiled] = []
    seen = set()

    def record(kernel, grid, values, warps, stages):
        key = (kernel.__name__, warps, stages, *((n, str(v.dtype) if isinstance(v, torch.Tensor) else v) for n, v in values.items()))
        if key not in seen:
            seen.add(key)
            found.append(compile_kernel(kernel, values, arch, warps, stages))

    name = f"sm_{arch}"
    with (
        mock.patch.object(launch, "run", record),
        mock.patch.object(launch, "arch_of", return_value=name),
        mock.patch.object(ops, "arch_of", return_value=name),
    ):
        yield found
