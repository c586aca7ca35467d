"""The reference linear and embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hal_core.dtypes import torch_dtype
from hal_core.errors import ShapeError
from hal_core.kernel import EmbeddingKernel, LinearEpilogue, LinearKernel, LinearWeights
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.ops import QuantEmbedding, QuantLinear
from hal_core.reference.inputs import check_inputs, input_quantizer, input_refusals
from hal_core.reference.schemes import EVERY_ROW_SCHEME, EVERY_SCHEME, OUTPUT_ROUNDING
from hal_core.reference.weights import CanonicalWeight
from hal_core.weight_checks import check_embedding_weights, check_linear_weights, check_same_kind, kinds_of

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.machine import Machine
    from hal_core.refusal import Refusal
    from hal_core.spec import EmbeddingSpec, LinearSpec

__all__ = ["ReferenceEmbedding", "ReferenceEmbeddingOp", "ReferenceLinear", "ReferenceLinearOp"]

_FLOATS = ("fp32", "bf16", "fp16")
_INPUTS = tuple(map(torch_dtype, _FLOATS))


def _checked(x: Tensor, k: int, asked: str) -> Tensor:
    if x.dtype not in _INPUTS or x.dim() < 1 or x.shape[-1] != k:
        raise ShapeError(f"{asked} input", f"{x.dtype} {list(x.shape)}", f"give a float32, bfloat16 or float16 tensor [.., {k}]")
    return x.reshape(-1, k).float()


def _deliver(y: Tensor, out: Tensor | None, asked: str) -> Tensor:
    if out is None:
        return y
    if out.shape != y.shape or out.dtype != y.dtype:
        raise ShapeError(f"{asked} out", f"{out.dtype} {list(out.shape)}", f"give {y.dtype} {list(y.shape)}")
    return out.copy_(y)


class ReferenceLinearOp(QuantLinear):
    """``y = x @ w.T + bias`` in float32, rounded once; ``x`` is quantized first where checkpoint and request say so."""

    def __init__(self, spec: LinearSpec, weights: LinearWeights) -> None:
        super().__init__()
        check_linear_weights(spec, weights)
        self.spec, self.kinds = spec, kinds_of(weights)
        self.quantizer = input_quantizer(spec)
        check_inputs(self.quantizer, weights.weight, "linear")
        self.weight = CanonicalWeight(weights.weight)
        self.register_buffer("bias", weights.bias)

    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        rows = _checked(x, self.spec.k, "linear")
        if self.quantizer is not None and rows.numel():
            rows = self.quantizer(rows, *self.weight.input_numbers())
        y = self.weight.multiply(rows)
        bias = self._buffers["bias"]
        if bias is not None:
            y += bias.float()
        dtype = torch_dtype(self.spec.out_dtype) if self.spec.out_dtype else x.dtype
        return _deliver(y.to(dtype).reshape(*x.shape[:-1], self.spec.n), out, "linear")

    def update(self, weights: LinearWeights) -> None:
        check_linear_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        self.weight.update(weights.weight)
        bias = self._buffers["bias"]
        if bias is not None:
            bias.copy_(weights.bias)


class ReferenceLinear(LinearKernel):
    """Every scheme and every machine; the definition that other kernels are measured against."""

    name = "linear"
    devices = ("any",)
    isa = ()
    architectures = ()
    schemes = EVERY_SCHEME
    numerics = Numerics(deterministic=True)
    dtypes = _FLOATS
    out_dtypes = _FLOATS
    epilogue = LinearEpilogue(bias=True, lora=False)
    limits = ()
    m_range = (1, None)
    layout = "canonical"
    error_bound = OUTPUT_ROUNDING
    priority = 0

    def refusals(self, spec: LinearSpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *input_refusals(spec))

    def computes(self, spec: LinearSpec) -> Numerics:
        quantizer = input_quantizer(spec)
        return self.numerics if quantizer is None else replace(self.numerics, activations=(ActivationQuant.of(quantizer.scheme),))

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> ReferenceLinearOp:
        return ReferenceLinearOp(spec, weights)


class ReferenceEmbeddingOp(QuantEmbedding):
    """Rows dequantized in float32, rounded once to the spec's dtype."""

    def __init__(self, spec: EmbeddingSpec, weights: LinearWeights) -> None:
        super().__init__()
        check_embedding_weights(spec, weights)
        self.spec, self.kinds = spec, kinds_of(weights)
        self.weight = CanonicalWeight(weights.weight)

    def lookup(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= self.spec.rows):
            position = int(((flat < 0) | (flat >= self.spec.rows)).nonzero()[0])
            raise ShapeError("embedding id", f"{int(flat[position])} at position {position}", f"ids run from 0 to {self.spec.rows - 1}")
        rows = self.weight.gather_rows(flat).dequantize()
        return rows.to(torch_dtype(self.spec.dtype)).reshape(*ids.shape, self.spec.dim)

    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = self.weight.multiply(_checked(x, self.spec.dim, "tied head"))
        return _deliver(y.to(x.dtype).reshape(*x.shape[:-1], self.spec.rows), out, "tied head")

    def update(self, weights: LinearWeights) -> None:
        check_embedding_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        self.weight.update(weights.weight)


class ReferenceEmbedding(EmbeddingKernel):
    """Row look-up of every scheme; the head of a tied model shares its weights."""

    name = "embedding"
    devices = ("any",)
    isa = ()
    architectures = ()
    schemes = EVERY_ROW_SCHEME
    numerics = Numerics(deterministic=True)
    dtypes = _FLOATS
    out_dtypes = _FLOATS
    tied_head = True
    limits = ()
    m_range = (1, None)
    layout = "canonical"
    error_bound = OUTPUT_ROUNDING
    priority = 0

    def prepare(self, spec: EmbeddingSpec, weights: LinearWeights) -> ReferenceEmbeddingOp:
        return ReferenceEmbeddingOp(spec, weights)
