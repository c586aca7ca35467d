"""compressed-tensors' pack-quantized tensors: codes packed along K, zero points along N, both offset by half the range.

``weight_packed`` int32 ``[N, ceil(K*b/32)]``, ``weight_shape`` int64 ``[2]``, ``weight_scale`` float ``[N, G]``,
``weight_zero_point`` int32 ``[ceil(N*b/32), G]`` (asymmetric), ``weight_g_idx`` int32 ``[K]`` (activation order by group).
A signed code q is stored as ``q + 2**(b-1)``, and so is a zero point: the two offsets cancel in ``(q - zero) * scale``.

Codes are one bit stream along their dimension. Before 0.20 the tool put whole fields into each word, so that 3-bit codes came
ten to a word; nothing in the file says which, but the width of ``weight_packed`` does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from hal_core.canonical import QuantizedTensor, unpack_nibbles
from hal_core.errors import FormatError
from hal_core.fields import split_last
from hal_core.formats.bitstream import pack_fields, unsigned_storage
from hal_core.formats.gptq_tensors import group_count
from hal_core.formats.packing import Packing, Plan, check_scales, expect, expect_float, expect_part
from hal_core.formats.unpack import turned, turned_words, unpacked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hal_core.formats.packing import Rule
    from hal_core.formats.safetensors_file import TensorInfo

__all__ = ["CTPackedPacking", "CTTensPacking"]


class CTPackedPacking(Packing):
    """The layout above, for 2, 3, 4 and 8 bits, as a bit stream."""

    name = "compressed-tensors:pack-quantized"
    suffixes = ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")
    transient = ("weight_packed", "weight_scale", "weight_zero_point")

    def words(self, count: int, bits: int) -> int:
        """Words that ``count`` codes take."""
        return -(-count * bits // 32)

    def codes(self, words: Tensor, bits: int, k: int, signed: bool) -> Tensor:
        """Canonical storage of packed codes, in fresh memory."""
        return unpacked(words, "rows", bits, k, signed)

    def zeros(self, words: Tensor, bits: int, count: int) -> Tensor:
        """Zero points uint8 ``[N, G]`` of words that are packed along N."""
        return turned_words(words, bits, count)

    def stored(self, codes: Tensor, bits: int) -> Tensor:
        """Words of codes, a byte each."""
        return pack_fields(codes, bits)

    def plan(self, module: str, parts: Mapping[str, TensorInfo], rule: Rule) -> Plan:
        packed, scale = expect_part(module, parts, "weight_packed"), expect_part(module, parts, "weight_scale")
        n, k = _logical_shape(module, parts, rule.bits)
        groups = group_count(k, rule.group)
        why = f"{rule.bits} bits, group size {rule.group}, K={k}, N={n}"
        if packed.shape[1] != self.words(k, rule.bits) and packed.shape[1] == CTTensPacking().words(k, rule.bits):
            return CTTensPacking().plan(module, parts, replace(rule, packing=CTTensPacking()))
        expect(packed, "I32", (n, self.words(k, rule.bits)), why)
        expect_float(scale, (1,) if rule.per_tensor else (n, groups), why)
        self._plan_zeros(module, parts, rule, (n, groups), why)
        if "weight_g_idx" in parts:
            expect(parts["weight_g_idx"], "I32", (k,), why)
            if not rule.act_order:
                raise FormatError(
                    f"tensor {module}.weight_g_idx", "stored although the config's actorder is not group",
                    "set actorder to group if the tensor is right",
                )  # fmt: skip
        else:
            rule = replace(rule, act_order=False)  # an index that was never filled in is not saved: the order is plain
        return Plan(module, rule, parts, (n, k), rule.scheme(k))

    def _plan_zeros(self, module: str, parts: Mapping[str, TensorInfo], rule: Rule, grid: tuple[int, int], why: str) -> None:
        if rule.symmetric:
            if "weight_zero_point" in parts:
                raise FormatError(f"tensor {module}.weight_zero_point", "stored although the config says symmetric", "correct the config")
            return
        if rule.per_tensor:
            raise FormatError(
                f"tensor {module}.weight_zero_point", "one zero point for a whole matrix is not served", "served: channel, group"
            )
        expect(expect_part(module, parts, "weight_zero_point"), "I32", (self.words(grid[0], rule.bits), grid[1]), why)

    def unpack(self, tensors: Mapping[str, Tensor], plan: Plan) -> QuantizedTensor:
        (n, k), bits, module = plan.shape, plan.rule.bits, plan.module
        values = self.codes(tensors["weight_packed"], bits, k, bool(plan.rule.symmetric))
        scales = tensors["weight_scale"].clone()
        scales = scales.view(1, 1) if plan.rule.per_tensor else scales
        check_scales(scales, f"{module}.weight_scale")
        g_idx = tensors.get("weight_g_idx")
        if g_idx is not None:
            _check_index(g_idx, scales.shape[1], f"{module}.weight_g_idx")
            g_idx = g_idx if plan.scheme.act_order else None
        if plan.rule.symmetric:
            return QuantizedTensor(plan.scheme, plan.shape, values, scales, g_idx=g_idx)
        zeros = self.zeros(tensors["weight_zero_point"], bits, n)
        return QuantizedTensor(plan.scheme, plan.shape, values, scales, zeros=zeros, g_idx=g_idx)

    def pack(self, weight: QuantizedTensor, rule: Rule) -> dict[str, Tensor]:
        (n, k), bits = weight.shape, rule.bits
        assert weight.scales is not None  # integer schemes have scales
        values = weight.values if weight.zeros is not None else unsigned_storage(weight.values, bits, k)
        tensors = {
            "weight_packed": self.stored(unpack_nibbles(values, k) if bits == 4 else values, bits),
            "weight_shape": torch.tensor([n, k], dtype=torch.int64),
            "weight_scale": weight.scales.view(1) if rule.per_tensor else weight.scales.clone(),
        }
        if weight.zeros is not None:
            tensors["weight_zero_point"] = self.stored(weight.zeros.t().contiguous(), bits).t().contiguous()
        return tensors if weight.g_idx is None else {**tensors, "weight_g_idx": weight.g_idx.clone()}


class CTTensPacking(CTPackedPacking):
    """3 bits in the older layout: ten codes from the lowest bit of each word up."""

    name = "compressed-tensors:pack-quantized:10"

    def words(self, count: int, bits: int) -> int:
        return -(-count // 10) if bits == 3 else super().words(count, bits)

    def codes(self, words: Tensor, bits: int, k: int, signed: bool) -> Tensor:
        codes = self._fields(words, bits, k)
        return codes.view(torch.int8).sub_(1 << (bits - 1)) if signed else codes

    def zeros(self, words: Tensor, bits: int, count: int) -> Tensor:
        return turned(self._fields(turned(words), bits, count))

    def _fields(self, words: Tensor, bits: int, count: int) -> Tensor:
        shifts = torch.arange(0, 10 * bits, bits, dtype=torch.int32)
        return ((words.unsqueeze(-1) >> shifts) & 7).to(torch.uint8).flatten(-2)[..., :count].contiguous()

    def stored(self, codes: Tensor, bits: int) -> Tensor:
        shifts = torch.arange(0, 10 * bits, bits, dtype=torch.int32)
        tens = split_last(pad(codes, (0, -codes.shape[-1] % 10)), -1, 10)
        return (tens.to(torch.int32) << shifts).sum(-1, dtype=torch.int32)


def _logical_shape(module: str, parts: Mapping[str, TensorInfo], bits: int) -> tuple[int, int]:
    """``[N, K]`` as stored; the packed width alone does not tell K, because the last word may be part full."""
    packed = parts["weight_packed"]
    if packed.dtype != "I32" or len(packed.shape) != 2 or not all(packed.shape):
        raise FormatError(f"tensor {packed.name}", f"{packed.dtype} {list(packed.shape)} is not I32 [N, K*{bits}/32]", "check the config")
    info = expect_part(module, parts, "weight_shape")
    expect(info, "I64", (2,), "rows and columns of the weight")
    n, k = info.read().tolist()
    widths = {packing.words(max(k, 1), bits) for packing in (CTPackedPacking(), CTTensPacking())}
    if k <= 0 or n != packed.shape[0] or packed.shape[1] not in widths:
        fix = "file and config do not belong together"
        raise FormatError(f"tensor {info.name}", f"[{n}, {k}] at {bits} bits does not fit weight_packed {list(packed.shape)}", fix)
    return n, k


def _check_index(g_idx: Tensor, groups: int, name: str) -> None:
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise FormatError(f"tensor {name}", f"group numbers {low}..{high}, there are {groups} groups", "the checkpoint is damaged")
