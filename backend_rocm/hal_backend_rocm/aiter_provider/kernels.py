"""AITER's experts and linears as kernels: one for each entry. Declared and bound on every machine, run on none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_backend_rocm.aiter_provider import DISTRIBUTION, INSTALL, VERSIONS
from hal_backend_rocm.aiter_provider.entries import LINEARS, MOES, Entry, entry_refusals
from hal_backend_rocm.targets import torch_refusals
from hal_core.kernel import LinearEpilogue, LinearKernel, MoEEpilogue, MoEKernel
from hal_core.packages import package_refusals
from hal_core.refusal import Refusal

if TYPE_CHECKING:
    from hal_backend_rocm.aiter_provider.ops import AiterExperts, AiterLinear
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.machine import Machine
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["KERNELS", "LinearAiter", "MoEAiter"]

#: Above this backend's Triton kernels, whose tiles nobody has tuned.
_PRIORITY = 250


def _refusals(entry: Entry, spec: LinearSpec | MoESpec, machine: Machine) -> tuple[Refusal, ...]:
    """What the machine lacks, and what no GPU of it is served with."""
    targets = sorted({device.architecture for device in machine.devices if device.kind == "rocm"})
    each = [entry_refusals(entry, spec, target) for target in targets]
    own = () if not each or not all(each) else tuple(dict.fromkeys(reason for reasons in each for reason in reasons))
    return (*package_refusals(machine, DISTRIBUTION, VERSIONS, INSTALL), *torch_refusals(machine), *own)


class MoEAiter(MoEKernel):
    """A block of experts by ``aiter.fused_moe``; gated, silu, bf16."""

    devices = ("rocm",)
    isa = ()
    architectures = ()  # an entry's own, which come with their source
    dtypes = ("bf16",)
    out_dtypes = ("bf16",)
    routing = ("routed",)
    epilogue = MoEEpilogue(
        activations=("silu",), alpha=False, limit=False, gated=True, ungated=False, bias=False, mixed_schemes=False, expert_map=False,
        expert_parallel=False, router_weight_on_input=False, routed_scaling=True, shared_experts=False, lora=False,
    )  # fmt: skip
    limits = ()
    m_range = (1, None)
    priority = _PRIORITY
    provider = DISTRIBUTION

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.name = f"moe_aiter_{entry.name}"
        self.schemes, self.numerics = entry.schemes, entry.numerics
        self.layout = f"aiter.{entry.name}"
        self.error_bound = 6e-3 if entry.quant is None else 1.5e-1 if entry.fp8 else 5e-2

    def refusals(self, spec: MoESpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *_refusals(self._entry, spec, machine))

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
    limits = ()
    m_range = (1, None)
    priority = _PRIORITY
    provider = DISTRIBUTION

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.name = f"linear_aiter_{entry.name}"
        self.schemes, self.numerics = entry.schemes, entry.numerics
        self.layout = f"aiter.{entry.name}"
        self.error_bound = 1e-1 if entry.fp8 else 3e-2

    def refusals(self, spec: LinearSpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *_refusals(self._entry, spec, machine))

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> AiterLinear:
        from hal_backend_rocm.aiter_provider.ops import AiterLinear

        return AiterLinear(spec, weights, self._entry)


KERNELS = (*(MoEAiter(entry) for entry in MOES), *(LinearAiter(entry) for entry in LINEARS))
