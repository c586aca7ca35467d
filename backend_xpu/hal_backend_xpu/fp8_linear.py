"""The prepared linears of this backend that decode no integers: weights of narrow floats with bf16 rows, and int8 with int8 rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hal_backend_xpu.fp8_weights import narrow_tensors, scale_group, words_along_k
from hal_backend_xpu.session import session
from hal_core.codes import effective_scales
from hal_core.dtypes import torch_dtype
from hal_core.op_parts import FixedBuffers, check_out, check_rows
from hal_core.ops import QuantLinear
from hal_core.weight_checks import check_linear_weights, check_same_kind, kinds_of

if TYPE_CHECKING:
    from torch import Tensor

    from hal_backend_xpu.session import Session
    from hal_core.kernel import LinearWeights
    from hal_core.spec import LinearSpec

__all__ = ["Int8Linear", "NarrowLinear"]

#: As the headers number them.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Sub-groups of a work-group, and work-groups for each unit of a device.
_SUB_GROUPS, _PER_UNIT = 4, 8


def _work_groups(here: Session, tiles: int) -> int:
    return max(1, min(-(-tiles // _SUB_GROUPS), here.facts.units * _PER_UNIT))


def _narrow(rows: Tensor, tensors: list[Tensor | None], bits: int, group: int, out: Tensor, engine: str | None) -> None:
    """``out [M, N]`` of rows ``[M, K]``; tensors: words, scales, columns, bias."""
    here = session(rows.device, engine)
    (m, k), n, tile = rows.shape, out.shape[1], here.engine("bf16")
    many = m > tile.rows
    tall = tile.rows * ((2 if tile.rows == 16 else 4) if many else 1)
    if m % tall:  # whole tiles are read
        padded = here.scratch(-(-m // tall) * tall, k, dtype=rows.dtype)
        padded[:m] = rows
        rows = padded
    kernel = here.kernel("narrow_floats.hpp", f"{'e2m1' if bits == 4 else 'e4m3'}_{'many' if many else 'few'}", "bf16")
    groups = _work_groups(here, -(-m // tall) * -(-n // (2 * tile.sub_group)))
    arguments = (rows, *tensors, m, n, k, group, out, _KINDS[out.dtype])
    here.launch(kernel, (1, 1, groups), (1, 1, _SUB_GROUPS * tile.sub_group), arguments)
    here.finish()


def _int8(rows: Tensor, tensors: list[Tensor | None], bits: int, group: int, out: Tensor, engine: str | None) -> None:
    """``out [M, N]`` of rows ``[M, K]``, quantized first; tensors: words, none, columns, bias."""
    here = session(rows.device, engine)
    (m, k), n, tile = rows.shape, out.shape[1], here.engine("int8")
    words, _, columns, bias = tensors
    codes = here.scratch(m + 4 * tile.rows, k, dtype=torch.int8)  # whole tiles are read
    scales = here.scratch(m, dtype=torch.float32)
    quantize = here.kernel("rows.hpp", "quantize_rows")
    sizes = (1, 1, 16 * tile.sub_group)
    here.launch(quantize, (1, m, 1), sizes, (rows, _KINDS[rows.dtype], k, None, 1, None, None, m, codes, scales))
    offsets = torch.arange(0, m + 1, m, dtype=torch.int32, device=rows.device)
    kernel = here.kernel("grouped_int8.hpp", f"grouped_int8_{0 if m <= tile.rows else 1}", "int8")
    groups = _work_groups(here, -(-m // tile.rows) * -(-n // (2 * tile.sub_group)))
    here.launch(kernel, (1, 1, groups), (1, 1, _SUB_GROUPS * tile.sub_group), (
        codes, scales, offsets, 1, None, None, None, words, columns, bias, n, k, out, _KINDS[out.dtype], 0, 0.0, float("inf"),
    ))  # fmt: skip
    here.finish()


_PRODUCTS = {"narrow": _narrow, "int8": _int8}


def _dense(
    rows: Tensor, tensors: list[Tensor | None], kind: str, bits: int, group: int, n: int, dtype: torch.dtype, engine: str | None
) -> Tensor:
    out = rows.new_empty(rows.shape[0], n, dtype=dtype)
    if rows.shape[0]:
        _PRODUCTS[kind](rows, tensors, bits, group, out, engine)
    return out


#: The op as ``torch.compile`` sees it; eager calls do without.
_DENSE = torch.library.custom_op(
    "hal_xpu::dense", _dense, mutates_args=(),
    schema="(Tensor rows, Tensor?[] tensors, str kind, int bits, int group, int n, ScalarType dtype, str? engine) -> Tensor",
)  # fmt: skip


@_DENSE.register_fake
def _dense_fake(rows, tensors, kind, bits, group, n, dtype, engine):  # type: ignore[no-untyped-def]
    return rows.new_empty(rows.shape[0], n, dtype=dtype)


class _Dense(FixedBuffers, QuantLinear):
    """Checks, buffers and in-place updates. kind: of the product. engine: a name of ENGINES instead of what fits the device."""

    kind: str
    group = 1

    def __init__(self, spec: LinearSpec, weights: LinearWeights, device: torch.device, engine: str | None = None) -> None:
        super().__init__()
        check_linear_weights(spec, weights)
        self.spec, self.kinds, self.device, self.engine = spec, kinds_of(weights), device, engine
        for name, tensor in self.tensors(weights).items():
            self.register_buffer(name, tensor.to(device))

    def tensors(self, weights: LinearWeights) -> dict[str, Tensor]:
        """Buffers by name, the bias among them."""
        bias = {} if weights.bias is None else {"bias": weights.bias.float()}
        return {**self.packed(weights), **bias}

    def packed(self, weights: LinearWeights) -> dict[str, Tensor]:
        """The weight's buffers."""
        raise NotImplementedError

    def compute(self, x: Any, out: Tensor | None = None) -> Tensor:
        spec, dtype = self.spec, torch_dtype(self.spec.output)
        rows = check_rows(str(spec), x, spec.k, torch_dtype(spec.dtype), self.device)
        held = [self._buffers.get(name) for name in ("words", "scales", "columns", "bias")]
        shape = (*x.shape[:-1], spec.n)
        if torch.compiler.is_compiling():
            y = _DENSE(rows, held, self.kind, spec.weights.bits, self.group, spec.n, dtype, self.engine).view(shape)
            return y if out is None else check_out(str(spec), out, shape, dtype, self.device).copy_(y)
        y = check_out(str(spec), out, shape, dtype, self.device)
        if rows.shape[0]:
            _PRODUCTS[self.kind](rows, held, spec.weights.bits, self.group, y.view(-1, spec.n), self.engine)
        return y

    def update(self, weights: LinearWeights) -> None:
        check_linear_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        for name, tensor in self.tensors(weights).items():
            self.get_buffer(name).copy_(tensor)


class NarrowLinear(_Dense):
    """``y = x @ w.T + bias`` with weights of e4m3 or e2m1, decoded to bf16 in the loop. A column's own scale is applied to the sum."""

    kind = "narrow"

    def packed(self, weights: LinearWeights) -> dict[str, Tensor]:
        self.group = scale_group(weights.weight)
        return narrow_tensors(weights.weight)


class Int8Linear(_Dense):
    """``y = x @ w.T + bias`` with int8 weights of one scale a column and rows quantized to int8, each with its scale."""

    kind = "int8"

    def packed(self, weights: LinearWeights) -> dict[str, Tensor]:
        weight = weights.weight
        assert weight.scales is not None  # every quantized scheme has scales
        columns = effective_scales(weight.scales, None).expand(self.spec.n, 1).flatten().contiguous()
        return {"words": words_along_k(weight.values), "columns": columns}
