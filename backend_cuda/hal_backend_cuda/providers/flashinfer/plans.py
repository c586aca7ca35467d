"""Plans of FlashInfer's paged attention: which pages hold which sequence, worked out on the host and kept for the kernels.

FlashInfer asks for the lengths of a batch on the host before its kernels run. A plan made beforehand serves any number of calls,
of all layers that share the shape, inside captured graphs too.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hal_core.calls import Bound, Call, bind
from hal_core.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hal_core.spec import KVCacheSpec

__all__ = ["CALLS", "Batch", "Own", "Plan", "planned", "shared_workspace"]

#: Bytes that FlashInfer asks for sums of split sequences.
_WORKSPACE = 128 << 20

_DECODE, _PREFILL = "flashinfer.BatchDecodeWithPagedKVCacheWrapper", "flashinfer.BatchPrefillWithPagedKVCacheWrapper"
_SHARED = ("num_qo_heads", "num_kv_heads", "page_size", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "sm_scale")
CALLS = {
    "decode": Call(
        _DECODE,
        ("float_workspace_buffer", "kv_layout", "use_cuda_graph", "use_tensor_cores", "paged_kv_indptr_buffer", "paged_kv_indices_buffer",
         "paged_kv_last_page_len_buffer", "backend"),
    ),
    "decode.plan": Call(
        f"{_DECODE}.plan", ("indptr", "indices", "last_page_len", "head_dim", *_SHARED), through=f"{_DECODE}._plan_impl"
    ),
    "decode.run": Call(f"{_DECODE}.run", ("q", "paged_kv_cache", "k_scale", "v_scale", "out", "lse", "return_lse")),
    "prefill": Call(
        _PREFILL,
        ("float_workspace_buffer", "kv_layout", "use_cuda_graph", "qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf",
         "paged_kv_last_page_len_buf", "backend"),
    ),
    "prefill.plan": Call(
        f"{_PREFILL}.plan",
        ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "head_dim_qk", "causal", *_SHARED),
    ),
    "prefill.run": Call(f"{_PREFILL}.run", ("q", "paged_kv_cache", "k_scale", "v_scale", "out", "lse", "return_lse")),
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """A batch on the host: cached tokens, query rows and pages of each sequence.

    indptr ``int32 [B + 1]``, indices ``int32 [used pages]``, last ``int32 [B]``, starts ``int32 [B + 1]``: as FlashInfer takes them.
    pages: of the cache.
    """

    indptr: Tensor
    indices: Tensor
    last: Tensor
    starts: Tensor
    pages: int

    @classmethod
    def of(cls, table: Tensor, lengths: Tensor, starts: Tensor, page_size: int, pages: int) -> Batch:
        """From host tensors ``table [B, max_pages]``, ``lengths [B]``, ``starts [B + 1]``.

        Raises:
            ShapeError: a length beyond the table, fewer tokens than queries, a page outside ``[0, pages)``.
        """
        counts = torch.div(lengths + page_size - 1, page_size, rounding_mode="floor")
        if bool(((lengths < 0) | (counts > table.shape[1])).any()):
            at = int(((lengths < 0) | (counts > table.shape[1])).nonzero()[0])
            raise ShapeError(f"lengths[{at}]", f"{int(lengths[at])}", f"the table has {table.shape[1]} pages of {page_size} tokens")
        queries = starts[1:] - starts[:-1]
        early = (queries < 0) | ((queries > lengths) & (lengths > 0))
        if int(starts[0]) != 0 or bool(early.any()):
            raise ShapeError("query_starts", f"{starts[:8].tolist()}..", "give numbers rising from 0; queries are the last cached tokens")
        used = torch.arange(table.shape[1]) < counts[:, None]
        indices = table[used]
        if bool(((indices < 0) | (indices >= pages)).any()):
            wrong = indices[(indices < 0) | (indices >= pages)]
            raise ShapeError("block_table", f"page {int(wrong[0])}", f"pages run from 0 to {pages - 1}")
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        last = torch.where(counts > 0, lengths - (counts - 1) * page_size, 0)
        return cls(*(t.to(torch.int32) for t in (indptr, indices, last, starts)), pages)

    @property
    def decode(self) -> bool:
        """Whether every sequence has one query row."""
        return bool((self.starts[1:] - self.starts[:-1] == 1).all())


def _nothing() -> None:
    """In the place of a tensor that counts no versions."""


class _Launch:
    """A call of FlashInfer's module, with the tensors that another call has for it."""

    def __init__(self, target: Any, args: tuple[Any, ...], places: tuple[int, ...]) -> None:
        self.target, self.args, self.places = target, args, places

    def again(self, tensors: tuple[Tensor, ...]) -> None:
        args = list(self.args)
        for at, tensor in zip(self.places, tensors, strict=True):
            args[at] = tensor
        self.target(*args)


class _Watch:
    """FlashInfer's module during one call of a wrapper."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        target = getattr(self.module, name)
        if name != "paged_run":
            return target

        def noted(*args: Any) -> Any:
            self.seen.append((target, args))
            return target(*args)

        return noted

    def launch(self, tensors: tuple[Tensor, ...]) -> _Launch | None:
        """The one launch that there was; None where it did not take just these tensors."""
        if len(self.seen) != 1:
            return None
        target, args = self.seen[0]
        places = [[at for at, value in enumerate(args) if value is tensor] for tensor in tensors]
        if any(len(found) != 1 for found in places):
            return None
        moving = tuple(at for (at,) in places)
        return _Launch(target, tuple(None if at in moving else value for at, value in enumerate(args)), moving)


class Plan:
    """One of FlashInfer's wrappers, planned for a batch. graph: fixed batch size, buffers that keep their addresses.

    workspace: of plans that never run at once; None for one of the plan's own.
    """

    def __init__(
        self, spec: KVCacheSpec, device: torch.device, *, decode: bool, graph: bool, rows: int = 0, most_pages: int = 0,
        workspace: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.device, self.decode, self.graph, self.rows = spec, device, decode, graph, rows
        self.kind = "decode" if decode else "prefill"
        self.planner, self.runner = (bind(CALLS[f"{self.kind}.{verb}"]) for verb in ("plan", "run"))
        self.workspace = _new_workspace(device) if workspace is None else workspace
        self.wrapper = self._wrapper(bind(CALLS[self.kind]), most_pages)
        #: queries: -1 while there is no batch. pages: of the cache that the batch was checked against.
        self.causal, self.scale, self.empty, self.queries, self.pages = True, 0.0, False, -1, 0
        self.known: dict[tuple[float, float, bool], _Launch] = {}
        self.lock, self.held = threading.Lock(), threading.local()
        #: The caller's tensors that it was made from, held weakly, and their versions.
        self.source: tuple[tuple[Callable[[], Tensor | None], int], ...] = ()

    def _wrapper(self, maker: Bound, most_pages: int) -> Any:
        values: dict[str, Any] = {
            "float_workspace_buffer": self.workspace, "kv_layout": "NHD", "use_cuda_graph": self.graph, "backend": "fa2"
        }  # fmt: skip
        if self.decode:
            values["use_tensor_cores"] = True
        if self.graph:
            end = "fer" if self.decode else ""
            sizes = {"paged_kv_indptr_buf": self.rows + 1, "paged_kv_indices_buf": most_pages, "paged_kv_last_page_len_buf": self.rows}
            for name, size in sizes.items():
                values[name + end] = torch.zeros(size, dtype=torch.int32, device=self.device)
            if not self.decode:
                values["qo_indptr_buf"] = torch.zeros(self.rows + 1, dtype=torch.int32, device=self.device)
        return maker.target(**values)

    def set(self, batch: Batch, causal: bool, scale: float, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        """Plan for a batch; waits for nothing but copies to the device. Where FlashInfer refuses, the plan serves nothing."""
        spec = self.spec
        values: dict[str, Any] = {
            "num_qo_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "page_size": spec.page_size,
            "window_left": -1 if spec.window is None else spec.window - 1, "logits_soft_cap": spec.soft_cap or 0.0,
            "q_data_type": q_dtype, "kv_data_type": kv_dtype, "sm_scale": scale,
        }  # fmt: skip
        if self.decode:
            values |= {"indptr": batch.indptr, "indices": batch.indices, "last_page_len": batch.last, "head_dim": spec.head_dim}
        else:
            values |= {
                "qo_indptr": batch.starts, "paged_kv_indptr": batch.indptr, "paged_kv_indices": batch.indices,
                "paged_kv_last_page_len": batch.last, "head_dim_qk": spec.head_dim, "causal": causal,
            }  # fmt: skip
        with self.lock:
            # first, for FlashInfer raises when some of its state is the new batch's already
            self.known, self.queries = {}, -1
            self.wrapper.plan(**values)
            self.causal, self.scale, self.empty, self.pages = causal, scale, bool((batch.last == 0).any()), batch.pages
            self.queries = int(batch.starts[-1])

    def suits(self, pages: Tensor, scale: float, causal: bool) -> bool:
        """Whether its batch may be read from these pages, in this way."""
        if self.queries < 0 or self.pages > pages.shape[0] or self.device != pages.device:
            return False
        return self.scale == scale and (self.decode or self.causal == causal)

    def check(self, pages: Tensor, scale: float, causal: bool, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        """Raises ShapeError where the plan is not of this call, as far as is known."""
        if not self.suits(pages, scale, causal):
            asked = f"{pages.shape[0]} pages on {pages.device}, scale {scale}, causal {causal}"
            made = f"{self.pages} pages on {self.device}, scale {self.scale}, causal {self.causal}"
            told = f"the plan was made for {made}" if self.queries >= 0 else "the last plan failed"
            raise ShapeError("attend", asked, f"{told}: plan again")
        if self.stale(*batch):
            raise ShapeError("attend", "table, lengths or query starts were changed after the plan", "plan again")

    def made_from(self, *tensors: Tensor) -> None:
        """Block table, lengths and query starts as the caller has them, whose changes make the plan stale."""
        self.source = tuple((_nothing, 0) if t.is_inference() else (weakref.ref(t), t._version) for t in tensors)

    def stale(self, *tensors: Tensor) -> bool:
        """Whether one of these is what the plan was made from and has been written to since. Of other tensors nothing is known."""
        return any(held() is t and t._version != version for (held, version), t in zip(self.source, tensors, strict=False))

    def _room(self, q: Tensor) -> Tensor:
        """For a run's logarithms. As the plan's other memory it serves one run after another, but two threads may take turns."""
        held: Tensor | None = getattr(self.held, "logs", None)
        if held is not None and held.shape == q.shape[:2]:
            return held
        made = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):  # else it is the graph's
            self.held.logs = made
        return made

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], k_scale: float, v_scale: float, out: Tensor, *, lse: bool) -> Tensor | None:
        """One launch (two where a value scale is not 1); logarithms to base 2 where they are wanted, good until this thread's next run.

        What FlashInfer works out for the launch in Python depends on the plan, so that later calls go to its module at once.
        """
        logs = self._room(q) if lse else None
        tensors, key = (q, *cache, out, *(() if logs is None else (logs,))), (k_scale, v_scale, lse)
        known = self.known.get(key)
        if known is not None:
            known.again(tensors)
            return logs
        with self.lock:
            module = getattr(self.wrapper, "_cached_module", None)
            watch = self.wrapper._cached_module = _Watch(module)
            try:
                self.wrapper.run(q, cache, k_scale=k_scale, v_scale=v_scale, out=out, lse=logs, return_lse=lse)
            finally:
                self.wrapper._cached_module = module
            found = watch.launch(tensors) if v_scale == 1.0 else None  # FlashInfer multiplies by others itself
            if found is not None:
                self.known[key] = found
        return logs


def _new_workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


class _Shared(threading.local):
    """A thread's workspaces by device and stream, held weakly."""

    def __init__(self) -> None:
        self.held: weakref.WeakValueDictionary[tuple[torch.device, int], Tensor] = weakref.WeakValueDictionary()


_SHARED = _Shared()


def shared_workspace(device: torch.device) -> Tensor:
    """Of all plans that this thread's ops make for the current stream, where they run one after another; gone with the last of them."""
    key = device, torch.cuda.current_stream(device).cuda_stream
    found = _SHARED.held.get(key)
    if found is None:
        found = _SHARED.held[key] = _new_workspace(device)
    return found


class Own(threading.local):
    """The last plan that an op made itself, and the batch that it is for: another for each thread, gone with the thread."""

    plan: Plan | None = None
    batch: Tensor


def planned(
    found: Plan | None, spec: KVCacheSpec, batch: Batch, device: torch.device, graph: bool, rows: int, most_pages: int,
    workspace: Tensor | None = None,
) -> Plan:  # fmt: skip
    """``found`` where it can be planned anew for this batch, else another plan. workspace: which it must have, None for its own."""
    fits = found is not None and (found.decode, found.graph, found.device) == (batch.decode, graph, device)
    if fits and found is not None and (not graph or found.rows == rows) and (workspace is None or found.workspace is workspace):
        return found
    return Plan(spec, device, decode=batch.decode, graph=graph, rows=rows, most_pages=most_pages, workspace=workspace)
