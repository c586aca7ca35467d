"""What is computed in a benchmark: random weights of a scheme, batches with fresh routing, and the right results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hal_core.canonical import QuantizedTensor, pack_nibbles
from hal_core.dtypes import torch_dtype
from hal_core.errors import SettingError
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.numerics import Numerics
from hal_core.ops import Routed
from hal_core.reference.linear import ReferenceLinearOp
from hal_core.reference.moe import ReferenceMoEOp
from hal_core.schemes import GranularityKind, WeightScheme, ZeroKind
from hal_core.spec import LinearSpec, MoESpec
from hal_core.testing.data import random_weight

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Batch", "Distance", "Problem", "distance_of", "quantized", "snr_db"]

#: Experts of different content; more would only make the start slower.
_PROTOTYPES = 16
#: Rows that are compared with the truth: enough to average over, and quick where a batch has thousands.
_CHECKED_ROWS = 128
#: Numbers that quantization cannot hold well: this share of the inputs, of this many standard deviations.
_OUTLIERS, _OUTLIER_SIZE = 0.01, 20.0
#: Kinds of granularity that weights are rounded to here; the others are drawn directly in their codes.
_ROUNDED = (GranularityKind.GROUP, GranularityKind.CHANNEL)


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs ``x [M, K]``; for experts also a pool of routings, ``ids [C, M, k] int32`` and ``scores [C, M, k] fp32``."""

    x: Tensor
    ids: Tensor | None = None
    scores: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.x)

    @property
    def pool(self) -> int:
        """How many calls differ in their routing."""
        return 1 if self.ids is None else len(self.ids)

    def routing(self, index: int) -> Routed:
        assert self.ids is not None  # only of experts
        assert self.scores is not None
        return Routed(self.ids[index % self.pool], self.scores[index % self.pool])

    def experts_hit(self, index: int) -> int:
        """Distinct experts of one routing; 1 for a linear, whose whole matrix is read."""
        return 1 if self.ids is None else int(torch.unique(self.ids[index % self.pool]).numel())


class Problem:
    """A spec with random weights. All random numbers come from ``seed``.

    Args:
        spec: a LinearSpec or MoESpec.
        seed: of weights and batches.
        outliers: whether 1 % of the inputs are 20 standard deviations large.
    """

    def __init__(self, spec: LinearSpec | MoESpec, seed: int, *, outliers: bool = False) -> None:
        self.spec, self.outliers = spec, outliers
        self._rng = torch.Generator().manual_seed(seed)
        self.weights = self._experts(spec) if isinstance(spec, MoESpec) else self._matrix(spec)

    @property
    def experts(self) -> int:
        return self.spec.num_experts if isinstance(self.spec, MoESpec) else 1

    @property
    def parameters(self) -> int:
        """Weights of all experts, or of the matrix."""
        s = self.spec
        return s.num_experts * s.hidden * s.intermediate * 3 if isinstance(s, MoESpec) else s.n * s.k

    @property
    def parts(self) -> dict[str, QuantizedTensor]:
        """The canonical tensors by role."""
        w = self.weights
        if isinstance(w, LinearWeights):
            return {"weight": w.weight}
        assert w.gate is not None  # shapes are gated
        return {"gate": w.gate, "up": w.up, "down": w.down}

    def flops(self, rows: int) -> float:
        """Multiplications and additions of the products of one call."""
        s = self.spec
        return 6.0 * rows * s.top_k * s.hidden * s.intermediate if isinstance(s, MoESpec) else 2.0 * rows * s.n * s.k

    def batch(self, rows: int) -> Batch:
        """Fresh inputs, and routings that choose distinct experts uniformly."""
        s = self.spec
        x = torch.randn(rows, s.hidden if isinstance(s, MoESpec) else s.k, generator=self._rng)
        if self.outliers:
            where = torch.rand(x.shape, generator=self._rng) < _OUTLIERS
            x = torch.where(where, torch.sign(x) * _OUTLIER_SIZE, x)
        x = x.to(torch_dtype(s.dtype))
        if not isinstance(s, MoESpec):
            return Batch(x)
        count = max(4, min(64, 1024 // rows))
        ids = torch.rand(count, rows, s.num_experts, generator=self._rng).argsort(-1)[..., : s.top_k].to(torch.int32).contiguous()
        scores = torch.softmax(torch.randn(count, rows, s.top_k, generator=self._rng), -1)
        return Batch(x, ids, scores)

    def checked(self, rows: int) -> Tensor:
        """Indices of the rows that are compared with the truth."""
        return torch.arange(rows) if rows <= _CHECKED_ROWS else torch.linspace(0, rows - 1, _CHECKED_ROWS).long()

    def truth(self, batch: Batch, index: int) -> Tensor:
        """float32 results of the checked rows of one call, computed in float32 from the stored weights."""
        rows = self.checked(batch.rows)
        exact = replace(self.spec, numerics=Numerics(), activations=None, out_dtype="fp32")
        with torch.inference_mode():
            if isinstance(exact, MoESpec):
                assert isinstance(self.weights, MoEWeights)
                routed = batch.routing(index)
                op = ReferenceMoEOp(exact, self.weights)
                return op.apply(batch.x[rows], Routed(routed.topk_ids[rows], routed.topk_weights[rows]))
            assert isinstance(self.weights, LinearWeights)
            return ReferenceLinearOp(exact, self.weights).apply(batch.x[rows])

    def _matrix(self, spec: LinearSpec) -> LinearWeights:
        return LinearWeights(quantized(spec.weights, (spec.n, spec.k), self._rng))

    def _experts(self, spec: MoESpec) -> MoEWeights:
        wide, tall = (spec.intermediate, spec.hidden), (spec.hidden, spec.intermediate)
        parts: dict[str, Any] = {}
        for name, scheme, shape in (("gate", spec.gate, wide), ("up", spec.up, wide), ("down", spec.down, tall)):
            assert scheme is not None  # shapes are gated
            few = quantized(scheme, (min(spec.num_experts, _PROTOTYPES), *shape), self._rng)
            chosen = torch.randint(0, few.shape[0], (spec.num_experts,), generator=self._rng)
            chosen[: few.shape[0]] = torch.arange(few.shape[0])
            parts[name] = QuantizedTensor(scheme, (spec.num_experts, *shape), **{n: t[chosen] for n, t in few.tensors().items()})
        return MoEWeights(**parts)


def quantized(scheme: WeightScheme, shape: tuple[int, ...], rng: torch.Generator) -> QuantizedTensor:
    """Gaussian weights of variance ``1 / K`` rounded to an integer scheme; of other schemes, random codes and scales.

    Scales are numbers that bf16 and fp16 both hold, so that every library can be given the same weights.
    """
    k = shape[-1]
    group = scheme.granularity.group or k
    plain = scheme.dtype.startswith("int") and scheme.granularity.kind in _ROUNDED and not scheme.act_order and k % group == 0
    if not scheme.quantized:
        values = torch.randn(shape, generator=rng).mul_(k**-0.5).to(torch_dtype(scheme.dtype))
        return QuantizedTensor(scheme, shape, values)
    if not plain:
        try:
            return random_weight(scheme, shape, rng, "bf16")
        except (KeyError, RuntimeError) as error:
            raise SettingError(f"--scheme {scheme}", f"no random weights can be made of it ({error})", "use another scheme") from error
    w = torch.randn(shape, generator=rng).mul_(k**-0.5).view(*shape[:-1], k // group, group)
    codes, parts = _rounded(w, scheme)
    codes = codes.reshape(shape)
    if scheme.bits == 4:
        values = pack_nibbles(codes.to(torch.int16) & 15)
    else:
        values = codes.to(torch.int8 if scheme.zero is ZeroKind.NONE else torch.uint8)
    return QuantizedTensor(scheme, shape, values, **parts)


def _rounded(w: Tensor, scheme: WeightScheme) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes of ``w [.., G, g]`` as floats, and scales with zeros or mins ``[.., G]``."""
    top = float(1 << scheme.bits)
    low, high = w.amin(-1), w.amax(-1)
    if scheme.zero is ZeroKind.NONE:
        scale = _held(w.abs().amax(-1) / (top / 2 - 0.5))
        return (w / scale[..., None].float()).round_().clamp_(-top / 2, top / 2 - 1), {"scales": scale}
    if scheme.zero is ZeroKind.INTEGER:
        scale = _held((high.clamp(min=0) - low.clamp(max=0)) / (top - 1))
        zeros = (-low.clamp(max=0) / scale.float()).round_().clamp_(0, top - 1)
        codes = (w / scale[..., None].float() + zeros[..., None]).round_().clamp_(0, top - 1)
        return codes, {"scales": scale, "zeros": zeros.to(torch.uint8)}
    scale, least = _held((high - low) / (top - 1)), low.to(torch.bfloat16)
    codes = ((w - least[..., None].float()) / scale[..., None].float()).round_().clamp_(0, top - 1)
    return codes, {"scales": scale, "mins": least}


def _held(scale: Tensor) -> Tensor:
    """bf16, and large enough to be a normal number of fp16."""
    return scale.clamp(min=2.0**-13).to(torch.bfloat16)


def snr_db(result: Tensor, truth: Tensor) -> float | None:
    """Signal over error in decibels, both in the L2 sense; None where the result has the truth's bits, or is not finite."""
    error = (result.double() - truth.double()).norm()
    if not bool(torch.isfinite(error)) or float(error) == 0.0:
        return None
    return float(20 * torch.log10(truth.double().norm() / error))


@dataclass(frozen=True)
class Distance:
    """How far a result is from the truth. largest: the largest error of an element over the largest magnitude of the truth."""

    snr_db: float | None
    cosine: float
    largest: float


def distance_of(result: Tensor, truth: Tensor) -> Distance | None:
    """None where the result is not finite."""
    wide, right = result.double().flatten(), truth.double().flatten()
    if not bool(torch.isfinite(wide).all()):
        return None
    cosine = float(torch.dot(wide, right) / (wide.norm() * right.norm()).clamp(min=1e-300))
    return Distance(snr_db(result, truth), cosine, float((wide - right).abs().max() / right.abs().max().clamp(min=1e-300)))


@contextmanager
def threads_of(count: int | None) -> Iterator[int]:
    """Torch's number of threads inside the block; yields it."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
