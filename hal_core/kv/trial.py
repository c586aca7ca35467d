"""A tiny cache for a KV kernel, made from what it declares, against the reference."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

from hal_core.dtypes import torch_dtype
from hal_core.kv.op import KVParams
from hal_core.kv.scheme import KV_SCHEMES
from hal_core.spec import KVCacheSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from hal_core.kernel import KVKernel
    from hal_core.kv.op import KVOp
    from hal_core.numerics import Numerics

__all__ = ["kv_trial", "trial_specs"]

_TOKENS, _QUERIES = 70, 3


def trial_specs(kernel: KVKernel, numerics: Numerics) -> Iterator[KVCacheSpec]:
    """Specs of two kv heads and two pages or more, of every scheme that the kernel declares."""
    sizes = {limit.dim: limit for limit in kernel.limits}
    step = sizes["page_size"].multiple if "page_size" in sizes else 1
    page, dim = -(-32 // step) * step, kernel.head_dims[0] if kernel.head_dims else 64
    for scheme in KV_SCHEMES:
        served = (
            any(fnmatchcase(str(s), glob) for glob in globs)
            for s, globs in ((scheme, kernel.schemes.keys), (scheme.for_values(), kernel.schemes.values))
        )
        if all(served):
            for dtype in kernel.dtypes:
                yield KVCacheSpec(4 if kernel.epilogue.gqa else 2, 2, dim, page, scheme, scheme, numerics, dtype)


def kv_trial(kernel: KVKernel, spec: KVCacheSpec, device: str) -> tuple[Tensor, Tensor]:
    """The kernel's attention over a small cache and the reference's, on the CPU."""
    from hal_core.reference.kv import ReferenceKV

    k, v = (torch.randn(_TOKENS, spec.num_kv_heads, dim).to(torch_dtype(spec.dtype)) for dim in (spec.head_dim, spec.v_dim))
    q = torch.randn(_QUERIES, spec.num_heads, spec.head_dim).to(torch_dtype(spec.dtype))
    wanted = _attended(ReferenceKV().prepare(spec, KVParams()), q, k, v, "cpu")
    return _attended(kernel.prepare(spec, KVParams()), q, k, v, device), wanted


def _attended(op: KVOp, q: Tensor, k: Tensor, v: Tensor, device: str) -> Tensor:
    count = -(-_TOKENS // op.spec.page_size)
    pages = torch.zeros(count, op.page_bytes, dtype=torch.uint8, device=device)
    tails = torch.zeros(1, op.tail_bytes, dtype=torch.uint8, device=device) if op.tail_bytes else None
    slots = torch.arange(_TOKENS, device=device)
    op.append(pages, k.to(device), v.to(device), slots, tails, torch.zeros(_TOKENS, dtype=torch.int32, device=device))
    row = torch.arange(count, dtype=torch.int32, device=device)[None]
    lengths, starts = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([_TOKENS], [0, _QUERIES]))
    tail_ids = torch.zeros(1, dtype=torch.int32, device=device)
    return op.attend_only(q.to(device), pages, row, lengths, starts, tails=tails, tail_ids=tail_ids)
