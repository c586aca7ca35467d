"""AWQ's tensors: GEMM (packed along N, columns interleaved) and GEMV (packed along K, zeros and scales padded).

GEMM: ``qweight`` int32 ``[K, N/8]``, ``qzeros`` int32 ``[G, N/8]``, ``scales`` float ``[G, N]``. The nibbles of a word,
lowest first, hold columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight. Zero points are stored as they are. 4 bits only.

GEMV: ``qweight`` int32 ``[N, K/8]`` in natural order, ``qzeros`` int32 ``[N, W]``, ``scales`` float ``[N, 8W]``, where W
is the words that G zero points fill, rounded up to what its kernel reads at once; only the first G columns count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from hal_core.canonical import QuantizedTensor, unpack_nibbles
from hal_core.errors import FormatError
from hal_core.formats.bitstream import pack_fields, stored_codes, unpack_fields, unsigned_storage
from hal_core.formats.gptq_tensors import group_count
from hal_core.formats.nibble_pairs import COLUMNS
from hal_core.formats.packing import Packing, Plan, check_scales, check_symmetric, expect, expect_float, expect_part
from hal_core.formats.unpack import turned, unpacked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hal_core.formats.packing import Rule
    from hal_core.formats.safetensors_file import TensorInfo

__all__ = ["AWQGemvPacking", "AWQPacking"]


class AWQPacking(Packing):
    """GEMM."""

    name = "awq:gemm"
    suffixes = ("qweight", "qzeros", "scales")
    transient = ("qweight", "qzeros", "scales")

    def plan(self, module: str, parts: Mapping[str, TensorInfo], rule: Rule) -> Plan:
        qweight, qzeros, scales = (expect_part(module, parts, suffix) for suffix in self.suffixes)
        if len(qweight.shape) != 2 or not all(qweight.shape):
            raise FormatError(f"tensor {qweight.name}", f"shape {list(qweight.shape)} is not [K, N/8]")
        k, n = qweight.shape[0], qweight.shape[1] * 8
        groups = group_count(k, rule.group)
        why = f"AWQ GEMM, group size {rule.group}, K={k}, N={n}"
        expect(qweight, "I32", qweight.shape, why)
        expect_float(scales, (groups, n), why)
        expect(qzeros, "I32", (groups, n // 8), why)
        return Plan(module, rule, parts, (n, k), rule.scheme(k))

    def unpack(self, tensors: Mapping[str, Tensor], plan: Plan) -> QuantizedTensor:
        k, module = plan.shape[1], plan.module
        symmetric = bool(plan.rule.symmetric)
        values = unpacked(tensors["qweight"], "awq", 4, k, symmetric)
        scales = turned(tensors["scales"])
        check_scales(scales, f"{module}.scales")
        groups = scales.shape[1]
        zeros = unpack_nibbles(unpacked(tensors["qzeros"], "awq", 4, groups, False), groups).contiguous()
        if symmetric:
            check_symmetric(zeros, 4, f"{module}.qzeros")
        return QuantizedTensor(plan.scheme, plan.shape, values, scales, zeros=None if symmetric else zeros)

    def pack(self, weight: QuantizedTensor, rule: Rule) -> dict[str, Tensor]:
        n, k = weight.shape
        assert weight.scales is not None  # integer schemes have scales
        values = weight.values if weight.zeros is not None else unsigned_storage(weight.values, 4, k)
        zeros = torch.full((weight.scales.shape[1], n), 8, dtype=torch.uint8) if weight.zeros is None else weight.zeros.t()
        return {
            "qweight": _interleave(unpack_nibbles(values, k).t()),
            "qzeros": _interleave(zeros),
            "scales": weight.scales.t().contiguous(),
        }


class AWQGemvPacking(Packing):
    """GEMV."""

    name = "awq:gemv"
    suffixes = ("qweight", "qzeros", "scales")
    transient = ("qweight",)

    def plan(self, module: str, parts: Mapping[str, TensorInfo], rule: Rule) -> Plan:
        qweight, qzeros, scales = (expect_part(module, parts, suffix) for suffix in self.suffixes)
        if len(qweight.shape) != 2 or not all(qweight.shape):
            raise FormatError(f"tensor {qweight.name}", f"shape {list(qweight.shape)} is not [N, K/8]")
        n, k = qweight.shape[0], qweight.shape[1] * 8
        width = _gemv_width(k, rule.group, qweight.name)
        why = f"AWQ GEMV, group size {rule.group}, K={k}, N={n}"
        expect(qweight, "I32", qweight.shape, why)
        expect_float(scales, (n, 8 * width), why)
        expect(qzeros, "I32", (n, width), why)
        return Plan(module, rule, parts, (n, k), rule.scheme(k))

    def unpack(self, tensors: Mapping[str, Tensor], plan: Plan) -> QuantizedTensor:
        (_, k), module = plan.shape, plan.module
        groups = group_count(k, plan.rule.group)
        scales = tensors["scales"][:, :groups].contiguous()
        check_scales(scales, f"{module}.scales")
        zeros = unpack_fields(tensors["qzeros"], 4, groups).contiguous()
        symmetric = bool(plan.rule.symmetric)
        values = unpacked(tensors["qweight"], "rows", 4, k, symmetric)
        if symmetric:
            check_symmetric(zeros, 4, f"{module}.qzeros")
        return QuantizedTensor(plan.scheme, plan.shape, values, scales, zeros=None if symmetric else zeros)

    def pack(self, weight: QuantizedTensor, rule: Rule) -> dict[str, Tensor]:
        n, k = weight.shape
        assert weight.scales is not None  # integer schemes have scales
        groups = weight.scales.shape[1]
        room = 8 * _gemv_width(k, rule.group, "to pack") - groups
        values = weight.values if weight.zeros is not None else unsigned_storage(weight.values, 4, k)
        zeros = torch.full((n, groups), 8, dtype=torch.uint8) if weight.zeros is None else weight.zeros
        return {
            "qweight": stored_codes(values, 4, k),
            "qzeros": pack_fields(pad(zeros, (0, room)), 4),
            "scales": pad(weight.scales, (0, room)),
        }


def _gemv_width(k: int, group: int, name: str) -> int:
    """Words of zero points a row: the kernel of small groups reads two or four at once."""
    size = k if group == -1 else group
    step = 1 if size >= 128 else {64: 2, 32: 4}.get(size)
    if step is None:
        raise FormatError(f"tensor {name}", f"group size {size} has no AWQ GEMV layout", "served: 32, 64, and 128 or more")
    words = -(-group_count(k, group) // 8)
    return -(-words // step) * step


def _interleave(codes: Tensor) -> Tensor:
    """uint8 ``[R, N]`` to words ``[R, N/8]`` in the order above."""
    return pack_fields(codes.reshape(codes.shape[0], -1, 8)[..., COLUMNS].flatten(-2), 4)
