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
    number: int, q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, query_starts: Tensor, scale: float | None, causal: bool,
    logs: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    found, lse = _NUMBERED[number].attend_now(q, pages, block_table, lengths, query_starts, scale, causal, logs, None)
    return found, _no_logs(q) if lse is None else lse


def _no_logs(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=torch.float32)


_ATTEND = torch.library.custom_op(
    "hal_cuda::flashinfer_attend", _attend, mutates_args=(),
    schema=(
        "(int number, Tensor q, Tensor pages, Tensor block_table, Tensor lengths, Tensor query_starts, float? scale, bool causal, "
        "bool logs) -> (Tensor, Tensor)"
    ),
)  # fmt: skip


@_ATTEND.register_fake
def _attend_fake(number, q, pages, block_table, lengths, query_starts, scale, causal, logs):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32) if logs else _no_logs(q)


#: ``(number, q, pages, block_table, lengths, query_starts, scale, causal, logs)`` to the result and, where ``logs`` says so, its
#: logarithms, as part of a graph.
traced = _ATTEND
