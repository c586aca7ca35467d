"""The prepared cache over packed pages of layout ``cpu.kv16`` (csrc/kv.h): each method is one call of a registered native op."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hal_backend_cpu import _native
from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError
from hal_core.kv.codebook import codebook
from hal_core.kv.op import KVOp, KVParams
from hal_core.kv.quantizer import fp8_scale
from hal_core.kv.rotation import rotation_matrix
from hal_core.kv.turboquant import section_seed
from hal_core.weight_checks import refuse_gradients

if TYPE_CHECKING:
    from hal_core.kv.scheme import KVScheme
    from hal_core.spec import KVCacheSpec

__all__ = ["CpuKV"]

#: The overloads themselves: finding them anew costs a tenth of a microsecond a call.
_APPEND = _native.ops.kv_append.default
_ATTEND = _native.ops.kv_attend.default
_READ = _native.ops.kv_read.default
_REOPEN = _native.ops.kv_reopen.default


@torch.library.register_fake("hal_cpu::kv_append")
def _(*args):
    return None


@torch.library.register_fake("hal_cpu::kv_attend")
def _(*args):
    return None


@torch.library.register_fake("hal_cpu::kv_read")
def _(*args):
    return None


@torch.library.register_fake("hal_cpu::kv_reopen")
def _(*args):
    return None


class CpuKV(KVOp):
    """Quantizes, reads and attends natively; holds the codebooks, rotations and static scales as buffers."""

    def __init__(self, spec: KVCacheSpec, params: KVParams, isa: str) -> None:
        super().__init__()
        self.spec, self.params, self.isa, self.dtype = spec, params, isa, torch_dtype(spec.dtype)
        for side, scheme, dim in (("keys", spec.keys, spec.head_dim), ("values", spec.values, spec.v_dim)):
            for name, tensor in _side_tensors(spec, params, side, scheme, dim).items():
                self.register_buffer(f"{side}_{name}", tensor, persistent=False)
        sizes = _native.ops.kv_sizes(*self._cache(), self.dtype)
        self._page_bytes, self._tail_bytes = sizes.tolist()

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    @property
    def tail_bytes(self) -> int:
        return self._tail_bytes

    def append(
        self, pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, tails: Tensor | None = None, tail_ids: Tensor | None = None
    ) -> None:
        self._check_floats("keys", k)
        self._check_floats("values", v)
        tails, tail_ids = self._tails(tails, tail_ids)
        self._call(_APPEND, pages, k.contiguous(), v.contiguous(), slots.contiguous(), tails, tail_ids, *self._cache(), self.isa)

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
        s = self.spec
        self._check_floats("queries", q)
        # more query heads than the spec's would look like a wider group to the native check
        if q.dim() != 3 or q.shape[1] != s.num_heads:
            raise ShapeError("queries", f"{list(q.shape)}", f"give [rows, {s.num_heads}, {s.head_dim}]")
        if (sinks is not None) != s.sinks:
            raise ShapeError("sinks", "missing" if sinks is None else "given", f"the spec says sinks={s.sinks}")
        tails, tail_ids = self._tails(tails, tail_ids)
        table = _ints("block_table", block_table, _used(block_table, lengths, s.page_size))
        result = q.new_empty(q.shape[0], s.num_heads, s.v_dim) if out is None else out
        lse = q.new_empty(q.shape[0], s.num_heads, dtype=torch.float32)
        self._call(
            _ATTEND, q.contiguous(), pages, table, _ints("lengths", lengths), _ints("query_starts", query_starts), tails, tail_ids, sinks,
            *self._cache(), s.head_dim**-0.5 if scale is None else scale, causal, s.window or 0, s.sink_tokens, s.soft_cap or 0.0,
            self.isa, result, lse,
        )  # fmt: skip
        return result, lse

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
        s, wanted = self.spec, torch_dtype(dtype or self.spec.dtype)
        row = self._row(block_row, start, length)
        k = torch.empty(length - start, s.num_kv_heads, s.head_dim, dtype=wanted)
        v = torch.empty(length - start, s.num_kv_heads, s.v_dim, dtype=wanted)
        tails, tail_ids = self._tails(tails, _one(tail_id))
        self._call(_READ, pages, row, start, length, tails, tail_ids, *self._cache(), self.dtype, self.isa, k, v)
        return k, v

    def reopen(self, pages: Tensor, block_row: Tensor, length: int, tails: Tensor | None, tail_id: int | None) -> None:
        if self._tail_bytes and length % 32:
            if tails is None or tail_id is None:
                raise ShapeError("tails", "missing", f"{self.spec.keys} keys need uint8 [.., {self._tail_bytes}] for open groups")
            self._call(_REOPEN, pages, self._row(block_row, 0, length), length, tails, _one(tail_id), *self._cache(), self.dtype, self.isa)

    def update(self, weights: KVParams) -> None:
        """Other static scales; pages written before keep their codes."""
        s = self.spec
        fresh = [_side_tensors(s, weights, side, scheme, dim) for side, scheme, dim in
                 (("keys", s.keys, s.head_dim), ("values", s.values, s.v_dim))]  # fmt: skip
        for side, tensors in zip(("keys", "values"), fresh, strict=True):
            if tensors["scale"] is not None:
                self._buffers[f"{side}_scale"].copy_(tensors["scale"])
        self.params = weights

    def _cache(self) -> tuple:
        """What the native ops take of the cache itself."""
        s, b = self.spec, self._buffers
        return (
            s.page_size, s.num_kv_heads, s.head_dim, s.v_dim,
            _native_name(s.keys), b["keys_codebook"], b["keys_rotation"], b["keys_scale"],
            _native_name(s.values), b["values_codebook"], b["values_rotation"], b["values_scale"],
        )  # fmt: skip

    def _tails(self, tails: Tensor | None, tail_ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """As the native ops take them; both None where there is no open group."""
        if not self._tail_bytes:
            return None, None
        return tails, None if tail_ids is None else _ints("tail_ids", tail_ids)

    def _row(self, block_row: Tensor, start: int, length: int) -> Tensor:
        """As the native ops take it; raises unless its pages hold the positions, before anything of their size is made."""
        if block_row.dim() != 1:
            raise ShapeError("block_row", f"{list(block_row.shape)}", "give [pages], the sequence's in order")
        size = self.spec.page_size
        if not 0 <= start <= length <= len(block_row) * size:
            raise ShapeError("length", f"positions {start} to {length}", f"the row has {len(block_row)} pages of {size} tokens")
        return _ints("block_row", block_row, torch.arange(len(block_row)) * size < length)

    def _check_floats(self, what: str, x: Tensor) -> None:
        if x.dtype != self.dtype:
            raise ShapeError(what, f"{x.dtype}", f"the cache was prepared for {self.dtype}")
        if x.requires_grad:
            refuse_gradients("cpu kv", x)

    @staticmethod
    def _call(op, *arguments) -> None:
        try:
            op(*arguments)
        except (RuntimeError, NotImplementedError) as error:
            # torch appends a C++ trace below the message
            raise ShapeError("cpu kv", str(error).splitlines()[0]) from error


def _native_name(scheme: KVScheme) -> str:
    if scheme.kind in {"int8", "int4"}:
        return f"{scheme.kind}:{scheme.granularity}"
    return scheme.kind if scheme.kind == "fp8" else str(scheme)


def _ints(what: str, x: Tensor, used: Tensor | None = None) -> Tensor:
    """int32 and contiguous; raises where an int64 that is ``used`` does not fit. The native ops check what does."""
    if x.dtype == torch.int64:
        narrow = x.int()
        wrong = narrow != x if used is None else (narrow != x) & used
        if torch.compiler.is_compiling():
            # raising by value would break the graph; no native op takes this one
            narrow = torch.where(wrong, torch.iinfo(torch.int32).min, narrow)
        elif bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            raise ShapeError(f"{what}{at}", f"{int(x[tuple(at)])}", "no id, length or start is beyond 32 bits")
        x = narrow
    return x if x.is_contiguous() else x.contiguous()


def _used(table: Tensor, lengths: Tensor, page_size: int) -> Tensor | None:
    """Entries that are read; None, for all, where the native op refuses the shapes or the 32-bit entries need no mask."""
    if table.dtype != torch.int64 or table.dim() != 2 or lengths.shape != table.shape[:1]:
        return None
    return torch.arange(table.shape[1]) * page_size < lengths[:, None]


def _one(tail_id: int | None) -> Tensor | None:
    if tail_id is not None and not 0 <= tail_id < 2**31:
        raise ShapeError("tail_id", f"{tail_id}", "give the number of one of the tails")
    return None if tail_id is None else torch.tensor([tail_id], dtype=torch.int32)


def _side_tensors(spec: KVCacheSpec, params: KVParams, side: str, scheme: KVScheme, dim: int) -> dict[str, Tensor | None]:
    out: dict[str, Tensor | None] = dict.fromkeys(("codebook", "rotation", "scale"))
    if scheme.kind == "fp8":
        name = "key_scale" if side == "keys" else "value_scale"
        out["scale"] = fp8_scale(getattr(params, name), spec.num_kv_heads, scheme, name).contiguous()
    if scheme.kind == "turboquant":
        rotation = rotation_matrix(dim, section_seed(spec.seed, side, 0))
        out["codebook"] = codebook(int(scheme.bits), dim)
        out["rotation"] = torch.stack((rotation.T, rotation)).contiguous()
    return out
