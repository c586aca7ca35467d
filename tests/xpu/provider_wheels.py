"""The published wheels of the libraries that the XPU backend calls."""

from __future__ import annotations

import inspect

import torch
from published import Published

from hal_core.calls import find, schema_signature

VLLM = Published(
    "xpu-wheels", "vllm_xpu_kernels-0.1.16.2-*.whl", "vllm-xpu-kernels 0.1.16.2 is not in build/xpu-wheels: `make test-xpu` downloads it"
)
ARK = Published(
    "xpu-wheels", "auto_round_lib-0.16.0-*.whl", "auto-round-lib 0.16.0 is not in build/xpu-wheels: `make test-xpu` downloads it"
)


def schema(path: str) -> str:
    """The schema of a torch op of vllm-xpu-kernels, e.g. of ``torch.ops._xpu_C.fp8_gemm``."""
    _, _, space, name = path.split(".")
    return VLLM.schemas(f"vllm_xpu_kernels/{space}.abi3.so")[name]


def signature(path: str) -> inspect.Signature:
    """What the published function at ``path`` takes."""
    if path.startswith("torch.ops."):
        return schema_signature(torch._C.parse_schema(schema(path)))
    if path.startswith("torch."):
        return inspect.signature(find(path))
    return (ARK if path.startswith("auto_round_kernel") else VLLM).signature(path)
