"""The cache of this backend as a kernel. Run on the SYCL device of processors; never ran on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_backend_xpu.declared import OnXpu
from hal_core.kernel import KVEpilogue, KVKernel, KVSchemeSet
from hal_core.numerics import Numerics

if TYPE_CHECKING:
    from hal_backend_xpu.kv_op import XpuKVOp
    from hal_core.kv.op import KVParams
    from hal_core.spec import KVCacheSpec

__all__ = ["KERNELS", "KVPages"]

_FLOATS = ("fp32", "bf16", "fp16")
_TURBOQUANT = tuple(f"turboquant:{bits}{variant}" for bits in range(1, 9) for variant in ("", ":raw"))
_VALUES = (*_FLOATS, "fp8", "fp8:head", "int8:token", *_TURBOQUANT)


class KVPages(OnXpu, KVKernel):
    """Attention over quantized pages, dequantized in the loop, in float32. New tokens are checked on the host, which waits for them."""

    name = "kv_pages"
    schemes = KVSchemeSet(keys=("int8", *_VALUES), values=_VALUES, mixed=True)
    #: Products with a rotation are torch's, whose order depends on the number of rows.
    numerics = Numerics(deterministic=True)
    dtypes = _FLOATS
    out_dtypes = _FLOATS
    head_dims = (64, 80, 96, 112, 128, 160, 192, 256)
    epilogue = KVEpilogue(gqa=True, value_dim=True, window=True, sink_tokens=True, sinks=True, soft_cap=True)
    limits = ()
    m_range = (1, None)
    layout = "kv_rows"
    #: bf16 output rounds to 8 significand bits; float32 output is near 1e-6.
    error_bound = 4e-3
    priority = 200

    def prepare(self, spec: KVCacheSpec, weights: KVParams) -> XpuKVOp:
        from hal_backend_xpu.kv_op import XpuKVOp

        return XpuKVOp(spec, weights)


KERNELS = (KVPages(),)
