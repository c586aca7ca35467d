"""``torch.ops.hal_cuda.flashinfer_attend``: attention as ``torch.compile`` sees it, since plans are made on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.op_parts import Numbered

if TYPE_CHECKING:
    from torch import Tensor

    from hal_backend_cuda.providers.flashinfer.attention import FlashInferKVOp

__all__ = ["enrol", "traced"]

_NUMBERED: Numbered[FlashInferKVOp] = Numbered()
#: A number by which a compiled graph finds the op.
enrol = _NUMBERED.enrol


def _attend(
    number: int, q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, query_starts: Tensor, scale: float | None, causal: bool
) -> tuple[Tensor, Tensor]:
    return _NUMBERED[number].attend(q, pages, block_table, lengths, query_starts, scale=scale, causal=causal)


_ATTEND = torch.library.custom_op(
    "hal_cuda::flashinfer_attend", _attend, mutates_args=(),
    schema=(
        "(int number, Tensor q, Tensor pages, Tensor block_table, Tensor lengths, Tensor query_starts, float? scale, bool causal) "
        "-> (Tensor, Tensor)"
    ),
)  # fmt: skip


@_ATTEND.register_fake
def _attend_fake(number, q, pages, block_table, lengths, query_starts, scale, causal):
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


#: ``(number, q, pages, block_table, lengths, query_starts, scale, causal)`` to the result and its logarithms, as part of a graph.
traced = _ATTEND
