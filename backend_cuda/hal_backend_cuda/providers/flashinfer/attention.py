"""FlashInfer's paged attention over bf16, fp16 and fp8 caches, as a KV kernel.

A page holds ``[2, page_size, kv heads, head_dim]``, keys before values, in the cache's own elements: FlashInfer's ``NHD`` layout.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hal_backend_cuda.providers.flashinfer import DISTRIBUTION, INSTALL, VERSIONS
from hal_backend_cuda.providers.flashinfer.attend_op import enrol, traced
from hal_backend_cuda.providers.flashinfer.beside import LaterRepeats, check_slots, launch_natural_logs, launch_store, store_on_host
from hal_backend_cuda.providers.flashinfer.plans import Batch, Own, Plan, planned, shared_workspace
from hal_core.dtypes import torch_dtype
from hal_core.errors import HalError, ShapeError
from hal_core.kernel import KVEpilogue, KVKernel, KVSchemeSet
from hal_core.kv.op import KVOp, KVParams
from hal_core.numerics import Numerics
from hal_core.op_parts import check_out
from hal_core.packages import package_refusals
from hal_core.refusal import Refusal

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.machine import Machine
    from hal_core.spec import KVCacheSpec

__all__ = ["KERNELS", "FlashInferKV", "FlashInferKVOp"]

_ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
#: Architectures without conversions to e4m3.
_NO_E4M3 = {"sm_80", "sm_86"}
_LN2 = math.log(2.0)
#: Bytes that FlashInfer's kernels read and write at once.
_STEP = 16


def _scale(value: Tensor | None, name: str) -> float:
    if value is None:
        return 1.0
    if value.numel() != 1:
        raise ShapeError(f"KVParams.{name}", f"{list(value.shape)}", "this kernel takes one scale for all heads")
    return float(value)


class FlashInferKVOp(KVOp):
    """Stateless over the caller's pages, but for plans: ``plan`` once for a step serves all layers and captured graphs.

    Without a plan of the caller's, ``attend`` reads the batch to the host and plans for it, which waits for the device.
    """

    def __init__(self, spec: KVCacheSpec, params: KVParams) -> None:
        super().__init__()
        self.spec, self.params = spec, params
        self.key_scale, self.value_scale = _scale(params.key_scale, "key_scale"), _scale(params.value_scale, "value_scale")
        self.elements = _ELEMENTS[spec.keys.kind]
        self.own = Own()
        self.given: Plan | None = None
        self.number = enrol(self)
        self.dtype = torch_dtype(spec.dtype)
        self.row = torch.Size((spec.num_heads, spec.head_dim))
        self.usual = spec.head_dim**-0.5
        #: The last pages seen and their views, while they live: making it again would cost as much as FlashInfer's checks.
        self.seen: tuple[weakref.ref[Tensor], Tensor, tuple[Tensor, Tensor]] | None = None
        self.repeats = LaterRepeats()

    def __deepcopy__(self, memo: object) -> FlashInferKVOp:
        """Another op of the same cache; plans are made anew."""
        return _again(self.spec, self.params, self.selection)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.spec, self.params, self.selection)

    @property
    def width(self) -> int:
        """Elements of one token's keys, or values."""
        return self.spec.num_kv_heads * self.spec.head_dim

    @property
    def page_bytes(self) -> int:
        return 2 * self.spec.page_size * self.width * self.elements.itemsize

    @property
    def tail_bytes(self) -> int:
        return 0

    @property
    def _scales(self) -> tuple[float, float]:
        return self.key_scale, self.value_scale

    def cache(self, pages: Tensor) -> Tensor:
        """The pages as FlashInfer reads them: ``[num_pages, 2, page_size, kv heads, head_dim]``, a view."""
        seen = self.seen
        if seen is not None and seen[0]() is pages:
            return seen[1]
        if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] != self.page_bytes or not pages.is_contiguous():
            found = f"{pages.dtype} {list(pages.shape)}"
            raise ShapeError("pages", found, f"give contiguous uint8 [.., {self.page_bytes}]")
        s = self.spec
        found = pages.view(self.elements).view(-1, 2, s.page_size, s.num_kv_heads, s.head_dim)
        self.seen = (weakref.ref(pages, self._forget_pages), found, (found[:, 0], found[:, 1]))
        return found

    def _sides(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[num_pages, page_size, kv heads, head_dim]`` of the pages, views."""
        seen = self.seen
        if seen is not None and seen[0]() is pages:
            return seen[2]
        found = self.cache(pages)
        return found[:, 0], found[:, 1]

    def _forget_pages(self, _: object) -> None:
        # the view would keep the memory of a cache that is gone
        self.seen = None

    def append(
        self, pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, tails: Tensor | None = None, tail_ids: Tensor | None = None
    ) -> None:
        s, cache = self.spec, self.cache(pages)
        shape, dtype = (slots.shape[0], s.num_kv_heads, s.head_dim), torch_dtype(s.dtype)
        for name, x in (("keys", k), ("values", v)):
            if tuple(x.shape) != shape or x.dtype != dtype or x.device != pages.device:
                raise ShapeError(name, f"{x.dtype} {list(x.shape)} on {x.device}", f"give {dtype} {list(shape)} on {pages.device}")
        if slots.dtype != torch.int64 or slots.device != pages.device:
            raise ShapeError("slots", f"{slots.dtype} on {slots.device}", f"give int64 [T] on {pages.device}")
        check_slots(slots, cache.shape[0] * s.page_size)
        if not pages.is_cuda:
            store_on_host(cache, (k, v), slots, self._scales)
        elif len(slots):
            k, v, slots = k.contiguous(), v.contiguous(), slots.contiguous()
            key = len(slots), len(pages), pages.device, *self._scales
            self.repeats(key, (k, v, slots, pages), lambda: launch_store(cache, (k, v), slots, self._scales))

    def plan(
        self,
        pages: int,
        block_table: Tensor,
        lengths: Tensor,
        query_starts: Tensor,
        *,
        scale: float | None = None,
        causal: bool = True,
        graph: bool = False,
    ) -> Plan:
        """Plan for a batch, and use it in every ``attend`` until the next plan or ``forget``.

        Args:
            pages: number of pages of the cache.
            block_table: as ``attend`` takes it; on the host it saves a wait, and so do the next two.
            lengths: as ``attend`` takes them.
            query_starts: as ``attend`` takes them.
            scale: as ``attend`` takes it.
            causal: as ``attend`` takes it.
            graph: make a plan whose launches may be captured. Planning again for a batch of as many sequences, outside the graph,
                changes what its replays read.

        ``attend`` given these very tensors refuses them once torch has written to them. Of others, and of what wrote past torch, it
        knows nothing.
        """
        batch = self._batch(self._host(block_table, lengths, query_starts), block_table.shape, pages)
        found = planned(self.given, self.spec, batch, self._device(block_table), graph, len(lengths), block_table.numel())
        self._set(found, batch, scale, causal)
        found.made_from(block_table, lengths, query_starts)
        self.given = found
        return found

    def share(self, plan: Plan) -> None:
        """Use a plan that another layer of the same spec made."""
        if plan.spec != self.spec:
            raise ShapeError("a shared plan", f"was made for {plan.spec}", f"this cache is {self.spec}")
        self.given = plan

    def forget(self) -> None:
        """Plan for each call again."""
        self.given = None

    @staticmethod
    def _device(table: Tensor) -> torch.device:
        return table.device if table.is_cuda else torch.device("cuda", torch.cuda.current_device())

    @staticmethod
    def _host(table: Tensor, lengths: Tensor, starts: Tensor) -> Tensor:
        """All that a plan depends on, in one copy."""
        shape = torch.tensor(table.shape, device=table.device)
        return torch.cat([starts.reshape(-1).long(), lengths.reshape(-1).long(), table.reshape(-1).long(), shape]).cpu()

    def _batch(self, host: Tensor, shape: torch.Size, pages: int) -> Batch:
        rows = shape[0]
        return Batch.of(host[2 * rows + 1 : -2].view(shape), host[rows + 1 : 2 * rows + 1], host[: rows + 1], self.spec.page_size, pages)

    def _set(self, plan: Plan, batch: Batch, scale: float | None, causal: bool) -> None:
        factor = self.usual if scale is None else scale
        plan.set(batch, causal, factor, self.dtype, self.elements)

    def _planned(self, pages: Tensor, table: Tensor, lengths: Tensor, starts: Tensor, scale: float | None, causal: bool) -> Plan:
        factor = self.usual if scale is None else scale
        if self.given is not None:
            self.given.check(pages, factor, causal, (table, lengths, starts))
            return self.given
        if torch.cuda.is_current_stream_capturing():
            raise HalError("attend under graph capture", "there is no plan", "call plan(.., graph=True) before the capture")
        host, workspace, own = self._host(table, lengths, starts), shared_workspace(pages.device), self.own.plan
        fits = own is not None and own.workspace is workspace and own.suits(pages, factor, causal)
        if own is None or not fits or not torch.equal(self.own.batch, host):
            batch = self._batch(host, table.shape, pages.shape[0])
            own = planned(own, self.spec, batch, pages.device, False, len(lengths), 0, workspace)
            self._set(own, batch, scale, causal)
            self.own.plan, self.own.batch = own, host
        return own

    def attend(
        self,
        q: Tensor,
        pages: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        query_starts: Tensor,
        *,
        scale: float | None = None,
        causal: bool = True,
        tails: Tensor | None = None,
        tail_ids: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        result, lse = self._attended(q, pages, (block_table, lengths, query_starts), scale, causal, sinks, out, True)
        assert lse is not None  # asked for
        return result, lse

    def attend_only(
        self,
        q: Tensor,
        pages: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        query_starts: Tensor,
        *,
        scale: float | None = None,
        causal: bool = True,
        tails: Tensor | None = None,
        tail_ids: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """FlashInfer's launch and nothing else where the caller has planned; with a value scale other than 1, one by FlashInfer for it."""
        return self._attended(q, pages, (block_table, lengths, query_starts), scale, causal, sinks, out, False)[0]

    def _attended(
        self, q: Tensor, pages: Tensor, batch: tuple[Tensor, Tensor, Tensor], scale: float | None, causal: bool, sinks: Tensor | None,
        out: Tensor | None, logs: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The result, and its logarithms where ``logs`` asks for them; in a compiled graph one op."""
        if sinks is not None:
            raise ShapeError("sinks", "given", "the spec says sinks=False")
        if torch.compiler.is_compiling():
            found, lse = traced(self.number, q, pages, *batch, scale, causal, logs)
            return found if out is None else self._room(q, out).copy_(found), lse
        return self.attend_now(q, pages, *batch, scale, causal, logs, out)

    def attend_now(
        self,
        q: Tensor,
        pages: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        query_starts: Tensor,
        scale: float | None,
        causal: bool,
        logs: bool,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """``attend`` outside a compiled graph; logs: whether logarithms are wanted."""
        cache, result, q = self._checked(q, pages), self._room(q, out), self._readable(q)
        if not q.shape[0]:
            return result, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if logs else None
        plan = self._planned(pages, block_table, lengths, query_starts, scale, causal)
        if plan.queries != q.shape[0]:
            raise ShapeError("query_starts", f"{plan.queries} rows of queries", f"q has {len(q)}")
        lse = plan.run(q, cache, *self._scales, result, lse=logs)
        return result, None if lse is None else self._natural(lse, plan)

    @staticmethod
    def _natural(lse: Tensor, plan: Plan) -> Tensor:
        """From logarithms to base 2; a graph's replays may see empty sequences that its plan did not have."""
        if not plan.empty and not plan.graph:
            return torch.mul(lse, _LN2)
        out = torch.empty_like(lse)
        launch_natural_logs(lse, out)
        return out

    @staticmethod
    def _room(q: Tensor, out: Tensor | None) -> Tensor:
        found = check_out("attend", out, q.shape, q.dtype, q.device)
        if out is not None and not torch.compiler.is_compiling() and out.data_ptr() % _STEP:
            raise ShapeError("attend output", f"begins at {out.data_ptr():#x}", f"give one that begins at a multiple of {_STEP} bytes")
        return found

    @staticmethod
    def _readable(q: Tensor) -> Tensor:
        """``q`` where FlashInfer can read it: it takes any strides of tokens and heads, but 16 bytes at once."""
        tokens, heads, elements = q.stride()
        if elements == 1 and not (tokens * q.itemsize % _STEP or heads * q.itemsize % _STEP or q.data_ptr() % _STEP):
            return q
        return q.clone(memory_format=torch.contiguous_format)

    def _checked(self, q: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        if q.dim() != 3 or q.shape[1:] != self.row or q.dtype != self.dtype or q.device != pages.device:
            found = f"{q.dtype} {list(q.shape)} on {q.device}"
            raise ShapeError("queries", found, f"give {self.dtype} [T, {', '.join(map(str, self.row))}] on {pages.device}")
        if not q.is_cuda:
            raise ShapeError("queries", f"on {q.device}", "FlashInfer's kernels run on a CUDA device")
        return self._sides(pages)

    def materialize(
        self,
        pages: Tensor,
        block_row: Tensor,
        length: int,
        tails: Tensor | None = None,
        tail_id: int | None = None,
        *,
        dtype: str | None = None,
        start: int = 0,
    ) -> tuple[Tensor, Tensor]:
        cache, size = self.cache(pages), self.spec.page_size
        if not 0 <= start <= length <= len(block_row) * size:
            raise ShapeError("length", f"positions {start} to {length}", f"the row has {len(block_row)} pages of {size} tokens")
        used = block_row[: -(-length // size)]
        if bool(((used < 0) | (used >= cache.shape[0])).any()):
            raise ShapeError("block_row", f"{used[:8].tolist()}..", f"pages run from 0 to {cache.shape[0] - 1}")
        position = torch.arange(start, length, device=pages.device)
        rows = cache[block_row.long()[position // size], :, position % size].float()
        kind = torch_dtype(dtype or self.spec.dtype)
        return (rows[:, 0] * self.key_scale).to(kind), (rows[:, 1] * self.value_scale).to(kind)

    def update(self, weights: KVParams) -> None:
        """Take other scales. They are part of launches: graphs that were captured with others keep those."""
        key, value = _scale(weights.key_scale, "key_scale"), _scale(weights.value_scale, "value_scale")
        if self.given is not None and self.given.graph and (key, value) != (self.key_scale, self.value_scale):
            raise ShapeError("update of a cache's scales", "a graph plan is in use", "capture the graph after the scales are known")
        self.params, self.key_scale, self.value_scale = weights, key, value


def _again(spec: KVCacheSpec, params: KVParams, selection: Any) -> FlashInferKVOp:
    found = FlashInferKVOp(spec, params)
    found.selection = selection
    return found


class FlashInferKV(KVKernel):
    """Paged attention by FlashInfer's FA2 kernels: decode and prefill, keys and values alike."""

    name = "kv_flashinfer"
    devices = ("cuda",)
    isa = ()
    architectures = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
    schemes = KVSchemeSet(keys=("bf16", "fp16", "fp8"), values=("bf16", "fp16", "fp8"), mixed=False)
    numerics = Numerics()
    dtypes = ("bf16", "fp16")
    out_dtypes = ("bf16", "fp16")
    head_dims = (64, 128, 256)
    epilogue = KVEpilogue(gqa=True, value_dim=False, window=True, sink_tokens=False, sinks=False, soft_cap=True)
    limits = ()
    m_range = (1, None)
    layout = "flashinfer.nhd"
    error_bound = 6e-3
    priority = 400

    def refusals(self, spec: KVCacheSpec, machine: Machine) -> tuple[Refusal, ...]:
        out: list[Any] = [*super().refusals(spec, machine), *package_refusals(machine, DISTRIBUTION, VERSIONS, INSTALL)]
        if spec.keys.kind in {"bf16", "fp16"} and spec.keys.kind != spec.dtype:
            fix = f"store the cache in {spec.dtype}, or use another kernel"
            out.append(Refusal("kv.scheme", f"keys in {spec.keys} with {spec.dtype} queries", "serves one dtype for both", fix))
        architectures = {device.architecture for device in machine.devices if device.kind == "cuda"}
        if spec.keys.kind == "fp8" and architectures and architectures <= _NO_E4M3:
            found = f"{', '.join(sorted(architectures))} cannot convert to e4m3, and tokens are stored by a kernel that does"
            out.append(Refusal("kv.scheme", f"keys in {spec.keys}", found, "store the cache in bf16, or use another kernel"))
        return tuple(out)

    def prepare(self, spec: KVCacheSpec, weights: KVParams) -> FlashInferKVOp:
        return FlashInferKVOp(spec, weights)


KERNELS = (FlashInferKV(),)
