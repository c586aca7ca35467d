"""AITER's experts, linears and attention as kernels. Declared and bound on every machine, run on none."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hal_backend_rocm.aiter_provider import DISTRIBUTION
from hal_backend_rocm.aiter_provider.attention import AiterKV
from hal_backend_rocm.aiter_provider.entries import LINEARS, MOES, Entry, entry_refusals
from hal_backend_rocm.aiter_provider.served import missing, provider_refusals
from hal_core.kernel import LinearEpilogue, LinearKernel, MoEEpilogue, MoEKernel, ShapeLimit
from hal_core.selection import widened
from hal_core.triton.declared import FP8_EXPERTS_BOUND

if TYPE_CHECKING:
    from hal_backend_rocm.aiter_provider.ops import AiterExperts, AiterLinear
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.machine import Machine
    from hal_core.refusal import Refusal
    from hal_core.selection import Padding
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["KERNELS", "LinearAiter", "MoEAiter"]

#: Above this backend's Triton kernels, whose tiles nobody has tuned.
_PRIORITY = 250
#: Of experts, by what their activations are quantized to.
_ERROR_BOUNDS = {"exact": 6e-3, "int8": 5e-2, "fp8_e4m3": FP8_EXPERTS_BOUND, "mxfp4": 4e-1}


def _limits(entry: Entry) -> tuple[ShapeLimit, ...]:
    return tuple(ShapeLimit(condition.dim, condition.multiple) for condition in entry.conditions)


def _joined(entry: Entry, spec: LinearSpec | MoESpec, machine: Machine, declared: tuple[Refusal, ...]) -> tuple[Refusal, ...]:
    """What is declared, and the predicate's reasons; of a limit that both refuse, the one that says where AITER does."""
    own = provider_refusals(machine, entry.versions, partial(entry_refusals, entry, spec))
    known = {(reason.code, reason.asked) for reason in own}
    return (*(reason for reason in declared if (reason.code, reason.asked) not in known), *own)


class MoEAiter(MoEKernel):
    """A block of gated experts by ``aiter.fused_moe``, bf16 in and out."""

    devices = ("rocm",)
    isa = ()
    architectures = ()  # an entry's own, which come with their source
    dtypes = ("bf16",)
    out_dtypes = ("bf16",)
    routing = ("routed",)
    m_range = (1, None)
    priority = _PRIORITY
    provider = DISTRIBUTION

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.name = f"moe_aiter_{entry.name}"
        self.schemes, self.numerics, self.limits = entry.schemes, entry.numerics, _limits(entry)
        self.layout, act = f"aiter.{entry.name}", entry.activation
        self.error_bound = _ERROR_BOUNDS["exact" if entry.quant is None else entry.quant.dtype]
        self.epilogue = MoEEpilogue(
            activations=(act.kind,), alpha=act.alpha is not None, limit=act.limit is not None, gated=True, ungated=False, bias=entry.bias,
            mixed_schemes=False, expert_map=False, expert_parallel=False, router_weight_on_input=False, routed_scaling=True,
            shared_experts=False, lora=False,
        )  # fmt: skip

    def refusals(self, spec: MoESpec, machine: Machine) -> tuple[Refusal, ...]:
        return _joined(self._entry, spec, machine, super().refusals(spec, machine))

    def padding(self, spec: MoESpec) -> tuple[Padding, ...]:
        pad = self._entry.pad
        return widened(("hidden", spec.hidden, pad), ("intermediate", spec.intermediate, pad))

    def lacks(self, machine: Machine) -> tuple[Refusal, ...]:
        return missing(machine, self._entry.versions)

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> AiterExperts:
        from hal_backend_rocm.aiter_provider.ops import AiterExperts

        return AiterExperts(spec, weights, self._entry)


class LinearAiter(LinearKernel):
    """A linear with 8-bit weights and activations by one of AITER's products."""

    devices = ("rocm",)
    isa = ()
    architectures = ()
    dtypes = ("bf16",)
    out_dtypes = ("bf16",)
    epilogue = LinearEpilogue(bias=False, lora=False)
    m_range = (1, None)
    priority = _PRIORITY
    provider = DISTRIBUTION

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.name = f"linear_aiter_{entry.name}"
        self.schemes, self.numerics, self.limits = entry.schemes, entry.numerics, _limits(entry)
        self.layout = f"aiter.{entry.name}"
        self.error_bound = 1e-1 if entry.fp8 else 3e-2

    def refusals(self, spec: LinearSpec, machine: Machine) -> tuple[Refusal, ...]:
        return _joined(self._entry, spec, machine, super().refusals(spec, machine))

    def lacks(self, machine: Machine) -> tuple[Refusal, ...]:
        return missing(machine, self._entry.versions)

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> AiterLinear:
        from hal_backend_rocm.aiter_provider.ops import AiterLinear

        return AiterLinear(spec, weights, self._entry)


KERNELS = (*(MoEAiter(entry) for entry in MOES), *(LinearAiter(entry) for entry in LINEARS), AiterKV())
