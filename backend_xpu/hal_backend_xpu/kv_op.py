"""The prepared cache: pages of the reference's layout, attention fused with dequantization, new tokens quantized into place.

Turboquant keys and values are read in their rotated space: queries are rotated before and results after, each by one product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal_backend_xpu.declared import device_of
from hal_backend_xpu.session import session
from hal_core.errors import ShapeError
from hal_core.kv.checks import check_append, check_attend
from hal_core.kv.codebook import codebook
from hal_core.kv.quantizer import fp8_scale
from hal_core.kv.rotation import rotation_matrix
from hal_core.kv.turboquant import TurboQuantizer
from hal_core.op_parts import Numbered, check_out
from hal_core.reference.kv import ReferenceKVOp

if TYPE_CHECKING:
    from hal_core.kv.op import KVParams
    from hal_core.kv.scheme import KVScheme
    from hal_core.spec import KVCacheSpec

__all__ = ["XpuKVOp"]

#: As csrc/kernels numbers them.
_FLOATS = {"fp32": 0, "bf16": 1, "fp16": 2}
_STORED = {**_FLOATS, "fp8": 3, "int8": 4, "turboquant": 5}
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Sub-groups of a work-group of attention.
_SHARES = 8


#: Ops by the number that stands for them in a graph.
_OPS: Numbered[XpuKVOp] = Numbered()


def _append(number: int, pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, tails: Tensor | None, tail_ids: Tensor | None) -> None:
    _OPS[number].append_now(pages, k, v, slots, tails, tail_ids)


def _attend(
    number: int, q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, query_starts: Tensor, scale: float | None, causal: bool,
    tails: Tensor | None, tail_ids: Tensor | None, sinks: Tensor | None, v_dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _OPS[number].attend_now(q, pages, block_table, lengths, query_starts, scale, causal, tails, tail_ids, sinks, None)


#: The ops as ``torch.compile`` sees them; eager calls do without.
_APPEND = torch.library.custom_op(
    "hal_xpu::kv_append", _append, mutates_args=("pages", "tails"),
    schema="(int number, Tensor(a!) pages, Tensor k, Tensor v, Tensor slots, Tensor(b!)? tails, Tensor? tail_ids) -> ()",
)  # fmt: skip
_ATTEND = torch.library.custom_op(
    "hal_xpu::kv_attend", _attend, mutates_args=(),
    schema=(
        "(int number, Tensor q, Tensor pages, Tensor block_table, Tensor lengths, Tensor query_starts, float? scale, bool causal, "
        "Tensor? tails, Tensor? tail_ids, Tensor? sinks, int v_dim) -> (Tensor, Tensor)"
    ),
)  # fmt: skip


@_APPEND.register_fake
def _append_fake(number, pages, k, v, slots, tails, tail_ids):  # type: ignore[no-untyped-def]
    return None


@_ATTEND.register_fake
def _attend_fake(  # type: ignore[no-untyped-def]
    number, q, pages, block_table, lengths, query_starts, scale, causal, tails, tail_ids, sinks, v_dim
):
    return q.new_empty(q.shape[0], q.shape[1], v_dim), q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


class XpuKVOp(ReferenceKVOp):
    """What it does not do in SYCL, torch does on the device: turboquant's and grouped keys' quantization, and reading back."""

    def __init__(self, spec: KVCacheSpec, params: KVParams) -> None:
        super().__init__(spec, params)
        self._numbered()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._numbered()

    def _numbered(self) -> None:
        self.number = _OPS.enrol(self)

    def update(self, weights: KVParams) -> None:
        super().update(weights)
        for quantizer in (self.keys, self.values):
            if isinstance(quantizer, TurboQuantizer) and quantizer.channels is not None:
                raise ShapeError("xpu kv parameters", "a permutation of channels", "use schemes of whole bits without one")
        self._held: dict[tuple[str, torch.device], tuple[Tensor | None, Tensor | None, Tensor | None]] = {}

    def append(
        self, pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, tails: Tensor | None = None, tail_ids: Tensor | None = None
    ) -> None:
        if torch.compiler.is_compiling():
            _APPEND(self.number, pages, k, v, slots, tails, tail_ids)
        else:
            self.append_now(pages, k, v, slots, tails, tail_ids)

    def append_now(self, pages: Tensor, k: Tensor, v: Tensor, slots: Tensor, tails: Tensor | None, tail_ids: Tensor | None) -> None:
        """``append`` outside a graph."""
        if self.tail_bytes:
            super().append(pages, k, v, slots, tails, tail_ids)
            return
        check_append(self, pages, k, v, slots, tails, tail_ids)
        if not len(slots):
            return
        here, given = session(device_of(pages)), {"keys": k.contiguous(), "values": v.contiguous()}
        places = slots.contiguous()
        kept = places >= 0
        for side, x in given.items():
            scheme = self._scheme(side)
            if scheme.kind not in ("fp8", "int8"):
                page, offset = places[kept] // self.spec.page_size, places[kept] % self.spec.page_size
                quantizer = self.keys if side == "keys" else self.values
                self.layout.write(pages, side, quantizer.quantize(x[kept].float()), page, offset)
                continue
            statics, _, _ = self._tensors(side, pages.device)
            kernel = here.kernel("kv.hpp", "kv_store")
            lanes = here.engine("int8").sub_group
            here.launch(kernel, (1, len(x), x.shape[1]), (1, 1, lanes), (
                x, _KINDS[x.dtype], places, x.shape[1], x.shape[2], pages, self.spec.page_size, self.page_bytes, *self._side(side)[:1],
                *self._places(side), statics,
            ))  # fmt: skip
        here.finish()

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
        if not torch.compiler.is_compiling():
            return self.attend_now(q, pages, block_table, lengths, query_starts, scale, causal, tails, tail_ids, sinks, out)
        found, lse = _ATTEND(
            self.number, q, pages, block_table, lengths, query_starts, scale, causal, tails, tail_ids, sinks, self.spec.v_dim
        )
        if out is None:
            return found, lse
        return check_out("xpu attend", out, tuple(found.shape), found.dtype, found.device).copy_(found), lse

    def attend_now(
        self, q: Tensor, pages: Tensor, block_table: Tensor, lengths: Tensor, query_starts: Tensor, scale: float | None, causal: bool,
        tails: Tensor | None, tail_ids: Tensor | None, sinks: Tensor | None, out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``attend`` outside a graph."""
        check_attend(self, q, pages, block_table, lengths, query_starts, tails, tail_ids, sinks, out)
        s, here = self.spec, session(device_of(pages))
        result = q.new_empty(len(q), s.num_heads, s.v_dim) if out is None else out
        lse = q.new_empty(len(q), s.num_heads, dtype=torch.float32)
        if not len(q):
            return result, lse
        k_statics, k_book, k_rotation = self._tensors("keys", pages.device)
        v_statics, v_book, v_rotation = self._tensors("values", pages.device)
        # held until the launch has finished, as everything that it reads
        query = (q.float() if k_rotation is None else q.float() @ k_rotation.T).contiguous()
        sums = torch.empty(len(q), s.num_heads, s.v_dim, dtype=torch.float32, device=q.device)
        ints = [t.to(torch.int32).contiguous() for t in (block_table, lengths, query_starts)]
        owners = None if tail_ids is None else tail_ids.to(torch.int32).contiguous()
        kernel, lanes = here.kernel("kv.hpp", "kv_attend"), here.engine("int8").sub_group
        here.launch(kernel, (1, len(q), s.num_heads), (1, 1, _SHARES * lanes), (
            query, pages, ints[0], block_table.shape[1], ints[1], ints[2], len(lengths), s.num_heads, s.num_kv_heads,
            s.page_size, self.page_bytes, tails if self.tail_bytes else None, _FLOATS[s.dtype], owners,
            k_statics, k_book, *self._side("keys"), *self._places("keys"), int(s.keys.grouped),
            v_statics, v_book, *self._side("values"), *self._places("values"),
            float(s.head_dim**-0.5 if scale is None else scale), float(s.soft_cap or 0.0), int(causal), s.window or 0, s.sink_tokens,
            sinks, sums, lse,
        ))  # fmt: skip
        here.finish()
        result.copy_(sums if v_rotation is None else sums @ v_rotation)
        return result, lse

    def _scheme(self, side: str) -> KVScheme:
        return self.spec.keys if side == "keys" else self.spec.values

    def _side(self, side: str) -> tuple[int, int, int]:
        """How vectors are stored, their channels, and bits of a code."""
        scheme, dim = self._scheme(side), self.spec.head_dim if side == "keys" else self.spec.v_dim
        return _STORED[scheme.kind], dim, int(scheme.bits or 8)

    def _places(self, side: str) -> tuple[int, int, int]:
        """First byte of the codes in a page, bytes of a vector's, first byte of the scales."""
        blocks = self.layout.blocks[side]
        codes, scale = blocks.get("codes") or blocks["values"], blocks.get("scale")
        return codes.start, codes.part.bytes, scale.start if scale is not None else 0

    def _tensors(self, side: str, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Static scales, levels and rotation of a side, on a device."""
        found = self._held.get((side, device))
        if found is None:
            found = self._held[side, device] = self._made(side, device)
        return found

    def _made(self, side: str, device: torch.device) -> Any:
        scheme, quantizer = self._scheme(side), self.keys if side == "keys" else self.values
        if scheme.kind == "fp8":
            name = "key_scale" if side == "keys" else "value_scale"
            scales = fp8_scale(getattr(self.params, name), self.spec.num_kv_heads, scheme, name)
            return scales.to(device).contiguous(), None, None
        if isinstance(quantizer, TurboQuantizer):
            ((dim, bits),) = quantizer.sections
            return None, codebook(bits, dim, device).contiguous(), rotation_matrix(dim, quantizer.seeds[0], device)
        return None, None, None
