"""Checks of what a caller gives to a KV op. Each raises before anything is written, with the numbers in the message.

Those of ranges look at the contents of tensors, which costs a wait on a device; backends on the host call them all.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError
from hal_core.kv.scheme import KV_GROUP

if TYPE_CHECKING:
    from hal_core.kv.op import KVOp

__all__ = [
    "as_counts", "as_device", "as_ids", "check_append", "check_attend", "check_id", "check_materialize", "check_pages", "check_whole",
]  # fmt: skip


def _fits(
    what: str, tensor: object, dtype: torch.dtype | tuple[torch.dtype, ...], shape: tuple[int | None, ...], device: torch.device
) -> None:
    """Raise unless ``tensor`` has the dtype, device and shape (None for any size)."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    wanted = f"{' or '.join(map(str, dtypes))} [{', '.join('..' if size is None else str(size) for size in shape)}] on {device}"
    if not isinstance(tensor, Tensor):
        raise ShapeError(what, f"{type(tensor).__name__}", f"give {wanted}")
    sizes = len(tensor.shape) == len(shape) and all(b is None or a == b for a, b in zip(tensor.shape, shape, strict=True))
    if not sizes or tensor.dtype not in dtypes or tensor.device != device:
        raise ShapeError(what, f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}", f"give {wanted}")


def _within(what: str, values: Tensor, least: int, most: int) -> None:
    """Raise unless every value is in ``[least, most]``."""
    wrong = (values < least) | (values > most)
    if bool(wrong.any()):
        at = int(wrong.reshape(-1).nonzero()[0])
        raise ShapeError(f"{what}[{at}]", f"{int(values.reshape(-1)[at])}", f"these run from {least} to {most}")


def check_pages(op: KVOp, pages: Tensor, tails: Tensor | None) -> None:
    """Raise unless ``pages`` and ``tails`` are what the op's layout needs."""
    if not isinstance(pages, Tensor):
        raise ShapeError("pages", type(pages).__name__, f"give uint8 [.., {op.page_bytes}]")
    _fits("pages", pages, torch.uint8, (None, op.page_bytes), pages.device)
    if not pages.is_contiguous():
        raise ShapeError("pages", f"strides {list(pages.stride())}", "give a contiguous tensor")
    if not op.tail_bytes:
        return
    if tails is None:
        raise ShapeError("tails", "missing", f"{op.spec.keys} keys need uint8 [.., {op.tail_bytes}] for open groups")
    _fits("tails", tails, torch.uint8, (None, op.tail_bytes), pages.device)
    if not tails.is_contiguous():
        raise ShapeError("tails", f"strides {list(tails.stride())}", "give a contiguous tensor")


def _check_tail_ids(op: KVOp, tails: Tensor | None, tail_ids: Tensor | None, count: int, device: torch.device) -> None:
    if not op.tail_bytes or tails is None:
        return
    _fits("tail_ids", tail_ids, (torch.int32, torch.int64), (count,), device)
    assert tail_ids is not None
    _within("tail_ids", tail_ids, 0, len(tails) - 1)


def check_append(
    op: KVOp, pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, tails: Tensor | None = None, tail_ids: Tensor | None = None
) -> None:
    """Raise unless these can be appended: shapes, dtypes, slots within the pages, none twice, groups filled in order."""
    check_pages(op, pages, tails)
    spec, device = op.spec, pages.device
    dtype = torch_dtype(spec.dtype)
    _fits("keys", k, dtype, (None, spec.num_kv_heads, spec.head_dim), device)
    _fits("values", v, dtype, (len(k), spec.num_kv_heads, spec.v_dim), device)
    _fits("slots", slots, torch.int64, (len(k),), device)
    _within("slots", slots, -1, len(pages) * spec.page_size - 1)
    used = slots[slots >= 0]
    ordered = used.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        raise ShapeError("slots", f"slot {int(twice[0])} given twice", "each token has a place of its own")
    _check_tail_ids(op, tails, tail_ids, len(k), device)
    if op.tail_bytes and tail_ids is not None:
        _check_order(used, tail_ids[slots >= 0])


def _check_order(slots: Tensor, tail_ids: Tensor) -> None:
    """Groups close when their last token comes: the tokens of a sequence must come in order, none left out."""
    order = tail_ids.sort(stable=True).indices
    place, owner = slots[order] % KV_GROUP, tail_ids[order]
    wrong = (owner[1:] == owner[:-1]) & (place[1:] != (place[:-1] + 1) % KV_GROUP)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0]) + 1
        found = f"slot {int(slots[order][at])} after slot {int(slots[order][at - 1])} of tail {int(owner[at])}"
        raise ShapeError("slots", found, f"give a sequence's tokens in order: groups of {KV_GROUP} are closed by their last")


def check_attend(
    op: KVOp,
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    tails: Tensor | None = None,
    tail_ids: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Raise unless these can be attended: shapes, dtypes, lengths within the table, pages within the tensor."""
    check_pages(op, pages, tails)
    spec, device, ints = op.spec, pages.device, (torch.int32, torch.int64)
    dtype = torch_dtype(spec.dtype)
    _fits("queries", q, dtype, (None, spec.num_heads, spec.head_dim), device)
    _fits("lengths", lengths, ints, (None,), device)
    _fits("block_table", block_table, ints, (len(lengths), None), device)
    _fits("query_starts", query_starts, ints, (len(lengths) + 1,), device)
    if (sinks is not None) != spec.sinks:
        raise ShapeError("sinks", "missing" if sinks is None else "given", f"the spec says sinks={spec.sinks}")
    if sinks is not None:
        _fits("sinks", sinks, torch.float32, (spec.num_heads,), device)
    if out is not None:
        _fits("out", out, dtype, (len(q), spec.num_heads, spec.v_dim), device)
    _within("lengths", lengths, 0, block_table.shape[1] * spec.page_size)
    counts = query_starts[1:] - query_starts[:-1]
    if int(query_starts[0]) != 0 or int(query_starts[-1]) != len(q) or bool((counts < 0).any()):
        raise ShapeError("query_starts", f"{query_starts[:8].tolist()}..", f"give numbers rising from 0 to {len(q)}, the queries")
    early = (counts > lengths) & (lengths > 0)
    if bool(early.any()):
        at = int(early.nonzero()[0])
        found = f"{int(counts[at])} queries over {int(lengths[at])} tokens in row {at}"
        raise ShapeError("lengths", found, "queries are the last of the cached tokens: append first")
    used = torch.arange(block_table.shape[1], device=device) * spec.page_size < lengths[:, None]
    _within("block_table", torch.where(used, block_table, 0), 0, max(len(pages) - 1, 0))
    _check_tail_ids(op, tails, tail_ids, len(lengths), device)


def check_materialize(
    op: KVOp, pages: Tensor, block_row: Tensor, length: int, tails: Tensor | None, tail_id: int | None, start: int = 0
) -> None:
    """Raise unless positions ``start`` to ``length`` lie in the pages of the row."""
    check_pages(op, pages, tails)
    _fits("block_row", block_row, (torch.int32, torch.int64), (None,), pages.device)
    if not 0 <= start <= length <= len(block_row) * op.spec.page_size:
        raise ShapeError("length", f"positions {start} to {length}", f"the row has {len(block_row)} pages of {op.spec.page_size} tokens")
    _within("block_row", block_row[: -(-length // op.spec.page_size)], 0, len(pages) - 1)
    if op.tail_bytes and tails is not None and (tail_id is None or not 0 <= tail_id < len(tails)):
        raise ShapeError("tail_id", f"{tail_id}", f"tails run from 0 to {len(tails) - 1}")


def check_whole(what: str, value: object, least: int, fix: str) -> None:
    """Raise unless this is a whole number of at least ``least``."""
    if type(value) is not int or value < least:
        raise ShapeError(what, f"{value!r:.40}", fix)


def as_device(device: object) -> torch.device:
    """A device of torch's, here or not."""
    try:
        return torch.device(device)  # type: ignore[call-overload,no-any-return]
    except (RuntimeError, TypeError) as error:
        raise ShapeError(f"device {device!r:.40}", "none that torch knows here", 'give the like of "cpu" or "cuda:0"') from error


def check_id(sequence: object) -> None:
    """Raise where this cannot be looked up as the id of a sequence."""
    if not isinstance(sequence, Hashable):
        raise ShapeError("sequence", type(sequence).__name__, "new() gives ids")


def as_ids(sequences: object) -> list[Any]:
    """One id or several as a list; whether they are a cache's is not looked at."""
    if isinstance(sequences, int):
        return [sequences]
    if isinstance(sequences, Tensor):
        sequences = sequences.reshape(-1).tolist()
    if not isinstance(sequences, Iterable):
        raise ShapeError("sequences", type(sequences).__name__, "give an id of new(), or several")
    return list(sequences)


def as_counts(counts: object, rows: int, sequences: int) -> list[int]:
    """Rows of each sequence; None for equally many."""
    if counts is None:
        if sequences == 0 or rows % sequences:
            raise ShapeError("counts", f"{rows} rows for {sequences} sequences", "say how many rows each has")
        return [rows // sequences] * sequences
    try:
        found = [operator.index(count) for count in counts]  # type: ignore[attr-defined]
    except TypeError as error:
        raise ShapeError("counts", f"{counts!r:.80}", "give whole numbers, one for each sequence") from error
    if len(found) != sequences or sum(found) != rows or min(found, default=0) < 0:
        raise ShapeError("counts", f"{found[:8]} of {rows} rows", f"give {sequences} numbers whose sum is the rows")
    return found
