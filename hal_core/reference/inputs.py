"""Quantized inputs: what a checkpoint's activation scheme does to them, in float32, as the engines that serve it do it.

Dynamic scales come from the largest magnitude of a token, group or tensor: over 127 for int8, over 448 for fp8; a power of two for
the MX types, which leaves the largest magnitude in the top binade of the element (OCP MX 1.0, section 6.3); for nvfp4 an e4m3 number
times the static global scale. Codes are rounded to nearest, ties to even, and saturate. NaN and infinities have no part in a dynamic
scale and stay what they are, so that they spoil their own rows only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hal_core.codebooks import codebook
from hal_core.errors import ShapeError
from hal_core.numerics import ActivationQuant
from hal_core.refusal import Refusal
from hal_core.schemes import GranularityKind

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.schemes import ActivationScheme
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["InputQuantizer", "check_inputs", "input_quantizer", "input_refusals"]

_LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "mxfp8": 448.0, "mxfp4": 6.0, "nvfp4": 6.0}
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "mxfp8": torch.float8_e4m3fn}
#: Exponent of the top binade of an MX element.
_TOP = {"mxfp8": 8, "mxfp4": 2}
_E4M3 = 448.0
_SPANS = (GranularityKind.TOKEN, GranularityKind.TENSOR, GranularityKind.GROUP)
#: Their scales belong to the blocks of a call.
_BLOCKED = ("mxfp8", "mxfp4", "nvfp4")


def input_quantizer(spec: LinearSpec | MoESpec) -> InputQuantizer | None:
    """What is asked for the inputs of ``spec``: its checkpoint's scheme where the request tolerates that, else nothing."""
    acts = spec.activations
    return None if acts is None or ActivationQuant.of(acts) not in spec.numerics.activations else InputQuantizer(acts)


def input_refusals(spec: LinearSpec | MoESpec) -> tuple[Refusal, ...]:
    """Why inputs cannot be quantized as asked: they are never computed exactly, or in another way, instead."""
    quantizer = input_quantizer(spec)
    found = "" if quantizer is None else _unserved(quantizer.scheme)
    if quantizer is None or not found:
        return ()
    fix = "ask for exact activations with --numerics exact, or use another kernel"
    return (Refusal("numerics.activations", f"activations quantized to {quantizer.scheme}", found, fix),)


def _unserved(scheme: ActivationScheme) -> str:
    """What of a scheme is not computed here, or ''."""
    if scheme.dtype not in _LARGEST:
        return f"no rule for elements of {scheme.dtype}"
    if scheme.granularity.kind not in _SPANS:
        return f"no rule for scales over {scheme.granularity}"
    if not scheme.symmetric and scheme.dtype != "int8":
        return f"no rule for zero points of {scheme.dtype}"
    if not scheme.dynamic and (scheme.granularity.kind is not GranularityKind.TENSOR or scheme.dtype in _BLOCKED):
        return f"no rule for static scales of {scheme.dtype} over {scheme.granularity}"
    return ""


def check_inputs(quantizer: InputQuantizer | None, weight: QuantizedTensor, asked: str) -> None:
    """Raise when the scheme is not served, or needs a static scale or zero point that did not come with the weight."""
    if quantizer is not None and (found := _unserved(quantizer.scheme)):
        raise ShapeError(f"{asked} inputs quantized to {quantizer.scheme}", found, "ask for exact activations")
    if quantizer is None or quantizer.scheme.dynamic:
        return
    missing = [name for name in ("input_scale", "input_zero")[: 2 - quantizer.scheme.symmetric] if getattr(weight, name) is None]
    if missing:
        raise ShapeError(f"{asked} weight", f"has no {missing[0]}, activations are {quantizer.scheme}", "read it from the checkpoint")


@dataclass(frozen=True)
class InputQuantizer:
    """``x`` to the float32 values that its codes stand for."""

    scheme: ActivationScheme

    def __call__(self, x: Tensor, scale: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
        """``x [M, K]`` float32; scale and zero ``[]`` are the static ones, or nvfp4's global scale."""
        if not self.scheme.dynamic:
            assert scale is not None  # check_inputs holds it
            return self._rounded(x, scale.float(), zero)
        k = x.shape[-1]
        size = self.scheme.granularity.group or k
        groups = -(-k // size)
        padded = torch.nn.functional.pad(x, (0, groups * size - k)).view(x.shape[0], groups, size)
        whole = self.scheme.granularity.kind is GranularityKind.TENSOR
        finite = torch.where(padded.isfinite(), padded, 0.0)
        found = self._dynamic(finite.view(1, 1, -1) if whole else finite, scale)
        rounded = torch.where(padded.isfinite(), self._rounded(finite, *found), padded)
        return rounded.view(x.shape[0], -1)[:, :k]

    def _dynamic(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Scales ``[.., 1]`` of the last dimension, and zero points when asymmetric."""
        dtype = self.scheme.dtype
        if not self.scheme.symmetric:
            low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
            step = _nonzero((high - low) / 255)
            return step, (-128 - low / step).round().clamp(-128, 127)
        largest = x.abs().amax(-1, keepdim=True)
        if dtype in _TOP:
            exponent = torch.frexp(largest)[1] - 1 - _TOP[dtype]
            return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent.clamp(-127, 127)), 1.0), None
        if dtype != "nvfp4":
            return _nonzero(largest / _LARGEST[dtype]), None
        # without a static one the global scale spans the whole call
        whole = _nonzero(largest.max() / (_E4M3 * _LARGEST[dtype])) if scale is None else scale.double()
        block = (largest / _LARGEST[dtype] / whole).float().clamp(max=_E4M3).to(torch.float8_e4m3fn)
        return _nonzero((block.double() * whole).float()), None

    def _rounded(self, x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        dtype = self.scheme.dtype
        scaled = x / scale
        if dtype == "int8":
            shift = 0 if zero is None else zero.float()
            return ((scaled.round() + shift).clamp(-127 if zero is None and self.scheme.dynamic else -128, 127) - shift) * scale
        top = _LARGEST[dtype]
        if dtype in _FP8:
            return scaled.clamp(-top, top).to(_FP8[dtype]).float() * scale
        return _nearest_e2m1(scaled.clamp(-top, top)) * scale


def _nonzero(scale: Tensor) -> Tensor:
    """All-zero inputs have no scale of their own; any will do."""
    return torch.where(scale > 0, scale, 1.0)


def _nearest_e2m1(x: Tensor) -> Tensor:
    """The nearest value of e2m1, ties to the even code; NaN stays NaN."""
    table = codebook("mxfp4", x.device)[:8]
    middles = (table[1:] + table[:-1]) / 2
    magnitude = x.abs()
    below = torch.bucketize(magnitude, middles, right=False)  # a tie stays with the lower code ..
    above = torch.bucketize(magnitude, middles, right=True)  # .. or goes to the upper one
    code = torch.where(below % 2 == 0, below, above).clamp(max=7)
    return torch.where(x.isnan(), x, table[code].copysign(x))
