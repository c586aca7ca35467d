"""AITER's paged attention and store of keys and values as a KV kernel over bf16 and fp16 caches. No AMD GPU has run it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hal_backend_rocm.aiter_provider import DISTRIBUTION, VERSIONS
from hal_backend_rocm.aiter_provider.served import missing, provider_refusals
from hal_core.calls import Call
from hal_core.kernel import KVEpilogue, KVKernel, KVSchemeSet, ShapeLimit
from hal_core.numerics import Numerics
from hal_core.refusal import Refusal

if TYPE_CHECKING:
    from hal_backend_rocm.aiter_provider.attention_op import AiterKVOp
    from hal_core.kv.op import KVParams
    from hal_core.machine import Machine
    from hal_core.spec import KVCacheSpec

__all__ = ["ATTEND", "STORE", "AiterKV", "attention_refusals"]

STORE = Call("aiter.ops.cache.reshape_and_cache", ("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype"))
ATTEND = Call(
    "aiter.ops.attention.paged_attention_rocm",
    (
        "out", "exp_sums", "max_logits", "tmp_out", "query", "key_cache", "value_cache", "num_kv_heads", "scale", "block_tables",
        "context_lens", "block_size", "max_context_len", "alibi_slopes", "kv_cache_dtype", "k_scale", "v_scale", "partition_size",
    ),
)  # fmt: skip
_TARGETS = ("gfx942", "gfx950")
#: Query heads of a kv head; the rows of a matrix instruction.
_MOST_GROUP = 16


def attention_refusals(spec: KVCacheSpec, target: str) -> tuple[Refusal, ...]:
    """Why AITER's attention cannot serve ``spec`` on one architecture; asked by selection, and by preparation again."""
    out = []
    if target not in _TARGETS:
        found = f"{target}; serves {', '.join(_TARGETS)}"
        out.append(Refusal("device.arch", "AITER's attention", found, "use another kernel"))
    if spec.keys.kind != spec.dtype:
        fix = f"store the cache in {spec.dtype}, or use another kernel"
        out.append(Refusal("kv.scheme", f"keys in {spec.keys} with {spec.dtype} queries", "serves one dtype for both", fix))
    if spec.num_heads > _MOST_GROUP * spec.num_kv_heads:
        found = f"serves up to {_MOST_GROUP} (csrc/cpp_itfs/pa/pa.cuh:109)"
        out.append(Refusal("shape.range", f"{spec.num_heads // spec.num_kv_heads} queries of a kv head", found, "use another kernel"))
    return tuple(out)


class AiterKV(KVKernel):
    """Paged attention by ``paged_attention_rocm``, tokens stored by ``reshape_and_cache``."""

    name = "kv_aiter"
    devices = ("rocm",)
    isa = ()
    architectures = ()  # those of attention_refusals
    # fp8 is left out: AITER rounds the weights of values to fp8 with it, which no cache scheme says.
    schemes = KVSchemeSet(keys=("bf16", "fp16"), values=("bf16", "fp16"), mixed=False)
    numerics = Numerics()
    dtypes = ("bf16", "fp16")
    out_dtypes = ("bf16", "fp16")
    head_dims = (64, 128)
    epilogue = KVEpilogue(gqa=True, value_dim=False, window=False, sink_tokens=False, sinks=False, soft_cap=False)
    limits = (ShapeLimit("page_size", multiple=16, least=16, most=32),)
    m_range = (1, None)
    layout = "aiter.pages"
    error_bound = 1e-2
    priority = 250
    provider = DISTRIBUTION

    def refusals(self, spec: KVCacheSpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *provider_refusals(machine, VERSIONS, partial(attention_refusals, spec)))

    def lacks(self, machine: Machine) -> tuple[Refusal, ...]:
        return missing(machine, VERSIONS)

    def prepare(self, spec: KVCacheSpec, weights: KVParams) -> AiterKVOp:
        from hal_backend_rocm.aiter_provider.attention_op import AiterKVOp

        return AiterKVOp(spec, weights)
