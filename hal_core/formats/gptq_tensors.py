"""GPTQ's tensors: codes packed along K, zero points packed along N, scales by group.

``qweight`` int32 ``[K*b/32, N]``, ``qzeros`` int32 ``[G, N*b/32]``, ``scales`` float ``[G, N]``, ``g_idx`` int32 ``[K]``
(optional). Shared by GPTQ's own files and by AutoRound's, which differ in the stored zero point only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.canonical import QuantizedTensor
from hal_core.errors import FormatError
from hal_core.formats.bitstream import pack_fields, stored_codes, unpack_fields, unsigned_storage
from hal_core.formats.packing import Packing, Plan, check_scales, check_symmetric, expect, expect_float, expect_part
from hal_core.formats.unpack import turned, turned_fields, unpacked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hal_core.formats.packing import Rule
    from hal_core.formats.safetensors_file import TensorInfo

__all__ = ["GPTQPacking", "add_one", "group_count", "subtract_one"]


def group_count(k: int, group: int) -> int:
    """Groups along K; the last may be short, and -1 means one."""
    return 1 if group == -1 else -(-k // group)


def add_one(words: Tensor, bits: int, count: int) -> Tensor:
    """True zero points uint8 ``[count, G]`` of words ``[G, W]`` that hold them minus one.

    For 2, 4 and 8 bits the writer subtracted one from every field of the word at once, so a zero point of 0 borrowed from
    its neighbour: only adding to the whole word undoes that. 3-bit fields straddle words and were lowered one by one.
    """
    if 32 % bits:
        return turned((unpack_fields(words, bits, count) + 1) & ((1 << bits) - 1))
    return turned_fields(_shift_words(words, _ones(bits)), bits, count)


def subtract_one(zeros: Tensor, bits: int) -> Tensor:
    """Inverse of :func:`add_one`, but of rows: uint8 ``[G, count]`` to words."""
    if 32 % bits:
        return pack_fields((zeros - 1) & ((1 << bits) - 1), bits)
    return _shift_words(pack_fields(zeros, bits), -_ones(bits))


def _ones(bits: int) -> int:
    return sum(1 << shift for shift in range(0, 32, bits))


def _shift_words(words: Tensor, amount: int) -> Tensor:
    wrapped = (words.to(torch.int64) + amount) & 0xFFFFFFFF
    return torch.where(wrapped >= 2**31, wrapped - 2**32, wrapped).to(torch.int32)


class GPTQPacking(Packing):
    """The layout above, for 2, 3, 4 and 8 bits."""

    name = "gptq"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    transient = ("qweight", "qzeros", "scales")

    def plan(self, module: str, parts: Mapping[str, TensorInfo], rule: Rule) -> Plan:
        qweight, qzeros, scales = (expect_part(module, parts, suffix) for suffix in ("qweight", "qzeros", "scales"))
        bits = rule.bits
        if len(qweight.shape) != 2 or qweight.shape[0] * 32 % bits or not all(qweight.shape):
            raise FormatError(f"tensor {qweight.name}", f"shape {list(qweight.shape)} is not [K*{bits}/32, N]", "check the config's bits")
        k, n = qweight.shape[0] * 32 // bits, qweight.shape[1]
        groups = group_count(k, rule.group)
        why = f"{bits} bits, group size {rule.group}, K={k}, N={n}"
        expect(qweight, "I32", qweight.shape, why)
        if n * bits % 32:
            raise FormatError(
                f"tensor {qweight.name}", f"N={n} zero points of {bits} bits do not fill whole words", "check the config's bits"
            )
        expect_float(scales, (groups, n), why)
        expect(qzeros, "I32", (groups, n * bits // 32), why)
        if "g_idx" in parts:
            expect(parts["g_idx"], "I32", (k,), why)
        elif rule.act_order and groups > 1:
            raise FormatError(
                f"tensor {module}.g_idx", "missing although the config says desc_act", "the checkpoint is incomplete: fetch it again"
            )
        return Plan(module, rule, parts, (n, k), rule.scheme(k))

    def unpack(self, tensors: Mapping[str, Tensor], plan: Plan) -> QuantizedTensor:
        k, bits, module = plan.shape[1], plan.rule.bits, plan.module
        symmetric = bool(plan.rule.symmetric)
        values = unpacked(tensors["qweight"], "columns", bits, k, symmetric)
        scales = turned(tensors["scales"])
        check_scales(scales, f"{module}.scales")
        g_idx = _group_index(tensors.get("g_idx"), plan, scales.shape[1])
        zeros = None if symmetric and self._middle_only(tensors["qzeros"], plan.rule) else self._zeros(tensors["qzeros"], plan)
        return QuantizedTensor(plan.scheme, plan.shape, values, scales, zeros=None if symmetric else zeros, g_idx=g_idx)

    def _middle_only(self, words: Tensor, rule: Rule) -> bool:
        """Whether every zero point is the middle code, seen from whole words."""
        if 32 % rule.bits:
            return False
        word = _ones(rule.bits) * ((1 << (rule.bits - 1)) - rule.zero_minus_one)
        return bool((words == (word - 2**32 if word >= 2**31 else word)).all())

    def _zeros(self, words: Tensor, plan: Plan) -> Tensor:
        """True zero points ``[N, G]``; of a symmetric weight they are checked."""
        bits, n = plan.rule.bits, plan.shape[0]
        zeros = add_one(words, bits, n) if plan.rule.zero_minus_one else turned_fields(words, bits, n)
        if plan.rule.symmetric:
            check_symmetric(zeros, bits, f"{plan.module}.qzeros")
        return zeros

    def pack(self, weight: QuantizedTensor, rule: Rule) -> dict[str, Tensor]:
        (n, k), bits = weight.shape, rule.bits
        assert weight.scales is not None  # integer schemes have scales
        values = weight.values if weight.zeros is not None else unsigned_storage(weight.values, bits, k)
        zeros = torch.full((weight.scales.shape[1], n), 1 << (bits - 1), dtype=torch.uint8) if weight.zeros is None else weight.zeros.t()
        zeros = zeros.contiguous()
        tensors = {
            "qweight": stored_codes(values, bits, k).t().contiguous(),
            "qzeros": subtract_one(zeros, bits) if rule.zero_minus_one else pack_fields(zeros, bits),
            "scales": weight.scales.t().contiguous(),
        }
        return tensors if weight.g_idx is None else {**tensors, "g_idx": weight.g_idx.clone()}


def _group_index(g_idx: Tensor | None, plan: Plan, groups: int) -> Tensor | None:
    """The group of each input channel when the order of activations counts; otherwise it must say nothing new."""
    if g_idx is None:
        return None
    name, k = f"{plan.module}.g_idx", plan.shape[1]
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise FormatError(
            f"tensor {name}", f"group numbers {low}..{high}, there are {groups} groups", "file and config do not belong together"
        )
    if plan.scheme.act_order:
        return g_idx
    plain = torch.arange(k, dtype=torch.int32) // (k if plan.rule.group == -1 else plan.rule.group)
    if not torch.equal(g_idx, plain):
        raise FormatError(
            f"tensor {name}", "orders the groups although the config says desc_act false", "set desc_act to true if the tensor is right"
        )
    return None
