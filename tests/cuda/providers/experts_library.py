"""FlashInfer's library of experts for sm_90 with what bf16 and fp8-block experts call: 30 compilations in place of 183.

    python tests/cuda/providers/experts_library.py OUT.so [--jobs 8]

Sources, flags and tiles are FlashInfer's. Left out are products and runners of other types; what calls them throws FlashInfer's own
exception. FlashInfer takes the library as built where it lies at ``flashinfer/data/aot/fused_moe_90/fused_moe_90.so``. Needs nvcc and no
GPU; about 45 minutes of a processor.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")

from flashinfer.jit import fused_moe
from flashinfer.jit.gemm.cutlass import generate_kernels

#: Runners and products of these types are built: of activations, weights and, where it is not the former, output.
_RUNNERS = ("__nv_bfloat16, __nv_bfloat16", "__nv_bfloat16, __nv_fp8_e4m3, __nv_bfloat16")
_PRODUCTS = {"moe_gemm_kernels_bf16_bf16.cu", "moe_gemm_kernels_bf16_fp8.cu"}
#: In place of FlashInfer's file of all runners, which is included for nothing else.
_INSTANCES = "cutlass_fused_moe_instantiation.cu"
_MISSING = """#include "tensorrt_llm/common/assert.h"
#include "tensorrt_llm/common/tllmException.h"
extern "C" void hal_not_built() { TLLM_THROW("this library was built for bf16 and fp8-block experts only"); }
"""


def narrowed():
    """FlashInfer's own description of the library, with fewer sources."""
    hopper, ampere = generate_kernels.generate_sm90_grouped_gemm_operations, generate_kernels.generate_sm80_operations
    bf16 = generate_kernels.DataType.bf16
    generate_kernels.generate_sm90_operations = lambda on: [op for op in hopper(on) if op.act_type == bf16]
    generate_kernels.generate_sm80_operations = lambda on: [op for op in ampere(on) if op.dtype == bf16]
    spec = fused_moe.gen_cutlass_fused_moe_sm90_module()
    spec.build_dir.mkdir(parents=True, exist_ok=True)
    runners = spec.build_dir / "runners.cu"
    runners.write_text(_instances(next(source for source in spec.sources if source.name == _INSTANCES)))
    dropped = [s for s in spec.sources if s.name == _INSTANCES or (s.name.startswith("moe_gemm_kernels_") and s.name not in _PRODUCTS)]
    spec.sources = [runners, *(source for source in spec.sources if source not in dropped)]
    return spec


def _instances(whole: Path) -> str:
    """A file of the runners that are wanted; the header lies beside FlashInfer's own."""
    lines = "\n".join(f"template class CutlassMoeFCRunner<{types}>;" for types in _RUNNERS)
    return (
        f'#include "{whole.parent}/cutlass_fused_moe_kernels.cuh"\n#include "moe_kernels.h"\n'
        f"namespace tensorrt_llm::kernels::cutlass_kernels {{\n{lines}\n"
        "INSTANTIATE_FINALIZE_MOE_ROUTING(__nv_bfloat16, __nv_bfloat16, __nv_bfloat16);\n}\n"
    )


def compiled(spec, jobs: int) -> list[str]:
    """Objects of all sources, those that are there as they are; fails with what a compiler said."""
    objects = [str(path) for path in spec.get_object_paths()]

    def run(pair):
        command, target = pair
        if Path(target).exists():
            return
        done = subprocess.run(command["command"], shell=True, check=False, capture_output=True, text=True, cwd=command["directory"])
        if done.returncode:
            raise SystemExit(f"{command['file']}\n{done.stderr[-4000:]}")
        print(target, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, zip(spec.get_compile_commands(), objects, strict=True)))
    return objects


def linked(objects: list[str], out: Path) -> None:
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    libraries = [f"-L{cuda}/lib64", f"-L{cuda}/lib64/stubs", "-Wl,--no-as-needed", "-lcudart", "-lcuda", "-lnvrtc"]
    # what is missing is not looked up before it is called
    subprocess.run(["g++", "-shared", "-o", out, *objects, *libraries, "-Wl,-z,lazy"], check=True)


def missing(library: Path) -> list[str]:
    """Names of FlashInfer's that no object defines."""
    told = subprocess.run(["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True).stdout
    return sorted(set(re.findall(r" U (_Z\w*tensorrt_llm\w*)$", told, re.MULTILINE)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    spec = narrowed()
    objects = compiled(spec, options.jobs)
    linked(objects, options.out)
    stand_ins = spec.build_dir / "not_built.cpp"
    names = "\n".join(f'asm(".globl {name}\\n.set {name}, hal_not_built");' for name in missing(options.out))
    stand_ins.write_text(f"{_MISSING}{names}\n")
    spec.sources = [stand_ins]
    linked([*objects, *compiled(spec, 1)], options.out)
    print(f"{options.out}: {len(objects)} objects, {len(missing(options.out))} names missing")


if __name__ == "__main__":
    main()
