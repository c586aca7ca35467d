"""The cache kernels as the registry sees them: one class per instruction set level, all over one layout of pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.kernel import KVEpilogue, KVKernel, KVSchemeSet, ShapeLimit
from hal_core.numerics import Numerics

if TYPE_CHECKING:
    from hal_backend_cpu.kv_ops import CpuKV
    from hal_core.kv.op import KVParams
    from hal_core.spec import KVCacheSpec

__all__ = ["KERNELS"]

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_FLOATS = ("fp32", "bf16", "fp16")
_TURBOQUANT = tuple(f"turboquant:{bits}{variant}" for bits in (2, 3, 4) for variant in ("", ":raw"))
_KEYS = ("bf16", "fp16", "fp32", "fp8", "fp8:head", "int8", "int8:token", "int4", "int4:token", *_TURBOQUANT)
_VALUES = ("bf16", "fp16", "fp32", "fp8", "fp8:head", "int8:token", "int4:token", *_TURBOQUANT)


class KVAVX512VNNI(KVKernel):
    """Fused attention over packed pages, AVX-512 with VNNI."""

    name = "kv_avx512vnni"
    devices = ("cpu",)
    isa = (*_AVX512, "avx512_vnni")
    _level = "avx512vnni"  # the native ops' word for it
    architectures = ()
    schemes = KVSchemeSet(keys=_KEYS, values=_VALUES, mixed=True)
    #: Codes of 8 bits and less are multiplied as integers with queries and weights of 11 to 15 bits, which is finer than bf16 and
    #: fp16 operands are; float32 models get float32 products.
    numerics = Numerics(deterministic=True, batch_invariant=True)
    dtypes = _FLOATS
    out_dtypes = _FLOATS
    head_dims = (64, 80, 96, 128, 192, 256)
    epilogue = KVEpilogue(gqa=True, value_dim=True, window=True, sink_tokens=True, sinks=True, soft_cap=True)
    limits = (ShapeLimit("page_size", multiple=16, least=16, most=1 << 20),)
    m_range = (1, None)
    layout = "cpu.kv16"
    #: bf16 output rounds to 8 significand bits: 2**-9 at most, about 1.7e-3 in the L2 sense; float32 output is near 1e-6.
    error_bound = 4e-3
    priority = 300

    def prepare(self, spec: KVCacheSpec, weights: KVParams) -> CpuKV:
        from hal_backend_cpu.kv_ops import CpuKV

        return CpuKV(spec, weights, self._level)


class KVAVX512(KVAVX512VNNI):
    """Fused attention over packed pages, AVX-512."""

    name = "kv_avx512"
    isa = _AVX512
    _level = "avx512"
    priority = 200


class KVAVX2(KVAVX512VNNI):
    """Fused attention over packed pages, AVX2."""

    name = "kv_avx2"
    isa = _AVX2
    _level = "avx2"
    priority = 100


KERNELS = (KVAVX512VNNI(), KVAVX512(), KVAVX2())
