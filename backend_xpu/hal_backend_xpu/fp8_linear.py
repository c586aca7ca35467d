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


class _Dense(FixedBuffers, QuantLinear):
    """Checks, buffers and in-place updates. engine: a name of ENGINES instead of what fits the device."""

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

    def product(self, here: Session, rows: Tensor, out: Tensor) -> None:
        """``out [M, N] = rows [M, K] @ w.T``; M is not 0. Scratch has to live until the queue is finished."""
        raise NotImplementedError

    def compute(self, x: Any, out: Tensor | None = None) -> Tensor:
        spec = self.spec
        rows = check_rows(str(spec), x, spec.k, torch_dtype(spec.dtype), self.device)
        y = check_out(str(spec), out, (*x.shape[:-1], spec.n), torch_dtype(spec.output), self.device)
        if rows.shape[0]:
            self.product(session(self.device, self.engine), rows, y.view(-1, spec.n))
        return y

    def update(self, weights: LinearWeights) -> None:
        check_linear_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        for name, tensor in self.tensors(weights).items():
            self.get_buffer(name).copy_(tensor)


def _work_groups(here: Session, tiles: int) -> int:
    return max(1, min(-(-tiles // _SUB_GROUPS), here.facts.units * _PER_UNIT))


class NarrowLinear(_Dense):
    """``y = x @ w.T + bias`` with weights of e4m3 or e2m1, decoded to bf16 in the loop. A column's own scale is applied to the sum."""

    def packed(self, weights: LinearWeights) -> dict[str, Tensor]:
        self.group = scale_group(weights.weight)
        return narrow_tensors(weights.weight)

    def product(self, here: Session, rows: Tensor, out: Tensor) -> None:
        m, k = rows.shape
        engine = here.engine("bf16")
        many = m > engine.rows
        tall = engine.rows * ((2 if engine.rows == 16 else 4) if many else 1)
        if m % tall:  # whole tiles are read
            padded = here.scratch(-(-m // tall) * tall, k, dtype=rows.dtype)
            padded[:m] = rows
            rows = padded
        name = "e2m1" if self.spec.weights.bits == 4 else "e4m3"
        kernel = here.kernel("narrow_floats.hpp", f"{name}_{'many' if many else 'few'}", "bf16")
        tiles = -(-m // tall) * -(-self.spec.n // (2 * engine.sub_group))
        here.launch(kernel, (1, 1, _work_groups(here, tiles)), (1, 1, _SUB_GROUPS * engine.sub_group), (
            rows, self.get_buffer("words"), self._buffers.get("scales"), self._buffers.get("columns"), self._buffers.get("bias"),
            m, self.spec.n, k, self.group, out, _KINDS[out.dtype],
        ))  # fmt: skip
        here.finish()


class Int8Linear(_Dense):
    """``y = x @ w.T + bias`` with int8 weights of one scale a column and rows quantized to int8, each with its scale."""

    def packed(self, weights: LinearWeights) -> dict[str, Tensor]:
        weight = weights.weight
        assert weight.scales is not None  # every quantized scheme has scales
        columns = effective_scales(weight.scales, None).expand(self.spec.n, 1).flatten().contiguous()
        return {"words": words_along_k(weight.values), "columns": columns}

    def product(self, here: Session, rows: Tensor, out: Tensor) -> None:
        (m, k), n, engine = rows.shape, self.spec.n, here.engine("int8")
        tall = engine.rows * 4
        codes = here.scratch(m + tall, k, dtype=torch.int8)
        scales = here.scratch(m, dtype=torch.float32)
        lanes = 16 * engine.sub_group
        quantize = here.kernel("rows.hpp", "quantize_rows")
        here.launch(quantize, (1, m, 1), (1, 1, lanes), (rows, _KINDS[rows.dtype], k, None, 1, None, None, m, codes, scales))
        offsets = torch.arange(0, m + 1, m, dtype=torch.int32, device=self.device)
        kernel = here.kernel("grouped_int8.hpp", f"grouped_int8_{0 if m <= engine.rows else 1}", "int8")
        tiles = -(-m // engine.rows) * -(-n // (2 * engine.sub_group))
        here.launch(kernel, (1, 1, _work_groups(here, tiles)), (1, 1, _SUB_GROUPS * engine.sub_group), (
            codes, scales, offsets, 1, None, None, None, self.get_buffer("words"), self.get_buffer("columns"), self._buffers.get("bias"),
            n, k, out, _KINDS[out.dtype], 0, 0.0, float("inf"),
        ))  # fmt: skip
        here.finish()
