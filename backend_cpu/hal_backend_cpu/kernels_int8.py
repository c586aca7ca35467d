"""The kernels that quantize activations to int8 in the call: the weights stay as stored, in the layout of the exact kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hal_backend_cpu.kernels import LinearAVX512, MoEAVX512
from hal_core.numerics import ActivationQuant, Numerics

if TYPE_CHECKING:
    from hal_core.schemes import WeightScheme
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["KERNELS", "span_of"]

_VNNI = (*LinearAVX512.isa, "avx512_vnni")
_TOKEN = Numerics(activations=(ActivationQuant("int8", "token"),), deterministic=True, batch_invariant=True)
_GROUP = replace(_TOKEN, activations=(ActivationQuant("int8", "g128"),))
#: Activations without outliers: a step of 1/127 of the largest of a token or of 128 values.
_TOKEN_BOUND, _GROUP_BOUND = 4e-2, 3e-2
#: Of experts, whose hidden rows have few large values, and where minima that cancel magnify a step; 2e-2 and 1.5e-2 are usual.
_EXPERTS_TOKEN_BOUND, _EXPERTS_GROUP_BOUND = 0.15, 0.1
#: Above every exact kernel, and the finer scales, which cost nothing, above the coarser ones.
_TOKEN_RANK, _GROUP_RANK = 400, 410
_SPAN = 128


def span_of(scheme: WeightScheme, k: int) -> ActivationQuant:
    """Over what one activation scale holds: a weight group, but 128 where that is longer and holds whole ones, or there is none."""
    group = scheme.granularity.group
    whole = group is None or group >= k or (group > _SPAN and group % _SPAN == 0)
    return ActivationQuant("int8", f"g{_SPAN if whole else group}")


def _spans(spec: MoESpec) -> tuple[ActivationQuant, ...]:
    wide = [scheme for scheme in (spec.gate, spec.up) if scheme is not None]
    return tuple(sorted({*(span_of(scheme, spec.hidden) for scheme in wide), span_of(spec.down, spec.intermediate)}))


class LinearAVX512VNNIToken(LinearAVX512):
    """int4 and int8 weights, int8 activations with one scale a token, AVX-512 VNNI."""

    name = "linear_avx512vnni_token"
    isa = _VNNI
    _level = "avx512vnni:token"
    numerics = _TOKEN
    error_bound = _TOKEN_BOUND
    priority = _TOKEN_RANK


class LinearAVX512VNNIGroup(LinearAVX512):
    """int4 and int8 weights, int8 activations with a scale for each weight group or 128 values, AVX-512 VNNI."""

    name = "linear_avx512vnni_group"
    isa = _VNNI
    _level = "avx512vnni:group"
    numerics = _GROUP
    error_bound = _GROUP_BOUND
    priority = _GROUP_RANK

    def computes(self, spec: LinearSpec) -> Numerics:
        return replace(self.numerics, activations=(span_of(spec.weights, spec.k),))


class MoEAVX512VNNIToken(MoEAVX512):
    """A block of int4 or int8 experts, int8 activations with one scale a token, AVX-512 VNNI."""

    name = "moe_avx512vnni_token"
    isa = _VNNI
    _level = "avx512vnni:token"
    numerics = _TOKEN
    error_bound = _EXPERTS_TOKEN_BOUND
    priority = _TOKEN_RANK


class MoEAVX512VNNIGroup(MoEAVX512):
    """A block of int4 or int8 experts, int8 activations with a scale for each weight group or 128 values, AVX-512 VNNI."""

    name = "moe_avx512vnni_group"
    isa = _VNNI
    _level = "avx512vnni:group"
    numerics = _GROUP
    error_bound = _EXPERTS_GROUP_BOUND
    priority = _GROUP_RANK

    def computes(self, spec: MoESpec) -> Numerics:
        return replace(self.numerics, activations=_spans(spec))


KERNELS = (LinearAVX512VNNIGroup(), LinearAVX512VNNIToken(), MoEAVX512VNNIGroup(), MoEAVX512VNNIToken())
