"""The libraries' experts and linears as kernels: one for each entry. Declared and bound on every machine; never ran on an Intel GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_backend_xpu.declared import torch_refusals
from hal_backend_xpu.providers.entries import LINEARS, MOES, Entry, entry_refusals
from hal_backend_xpu.providers.libraries import ARK, TORCH
from hal_core.kernel import LinearEpilogue, LinearKernel, MoEEpilogue, MoEKernel
from hal_core.packages import package_refusals
from hal_core.selection import Transform

if TYPE_CHECKING:
    from torch import nn

    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.machine import Machine
    from hal_core.refusal import Refusal
    from hal_core.schemes import WeightScheme
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["KERNELS", "LinearProvided", "MoEProvided"]

#: Above this backend's own kernels, whose tiles nobody has tuned on a GPU; torch, which is always there, below them.
_PRIORITY, _TORCH_PRIORITY = 250, 150
_ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def _refusals(entry: Entry, spec: LinearSpec | MoESpec, machine: Machine) -> tuple[Refusal, ...]:
    """What the machine lacks, and what no GPU of it is served with."""
    targets = sorted({device.architecture for device in machine.devices if device.kind == "xpu"})
    each = [entry_refusals(entry, spec, target) for target in targets]
    own = () if not each or not all(each) else tuple(dict.fromkeys(reason for reasons in each for reason in reasons))
    library = entry.library
    needed = package_refusals(machine, library.distribution, library.versions, library.install)
    return (*needed, *torch_refusals(machine), *own)


def _recast(entry: Entry, schemes: tuple[WeightScheme, ...], dtype: str) -> tuple[Transform, ...]:
    """Scales are rounded to the model's dtype, but for E8M0 and the float32 of fp8 outside auto-round-lib."""
    wide = () if entry.library is ARK else ("fp8_e4m3", "mxfp4")
    rounded = any(s.quantized and s.dtype not in wide for s in schemes)
    return (Transform(f"recast_scales:{dtype}", _ROUNDING[dtype]),) if rounded else ()


def _current_target() -> str:
    from hal_core.machine import Machine

    return next((device.architecture for device in Machine.detect().devices if device.kind == "xpu"), "unknown")


class MoEProvided(MoEKernel):
    """A block of gated experts by another library's functions."""

    devices = ("xpu",)
    isa = ()
    architectures = ()  # an entry's own, which come with their source
    routing = ("routed",)
    limits = ()
    m_range = (1, None)
    priority = _PRIORITY

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.name, self.layout, self.provider = f"moe_{entry.name}", entry.name, entry.library.distribution
        self.schemes, self.numerics, self.dtypes, self.out_dtypes = entry.schemes, entry.numerics, entry.dtypes, entry.dtypes
        self.error_bound = 6e-3
        self.epilogue = MoEEpilogue(
            activations=entry.activations, alpha="swiglu_oai" in entry.activations, limit=entry.limit, gated=True, ungated=False,
            bias=False, mixed_schemes=False, expert_map=False, expert_parallel=False, router_weight_on_input=False, routed_scaling=True,
            shared_experts=False, lora=False,
        )  # fmt: skip

    def refusals(self, spec: MoESpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *_refusals(self._entry, spec, machine))

    def transforms(self, spec: MoESpec) -> tuple[Transform, ...]:
        return _recast(self._entry, spec.schemes, spec.dtype)

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> nn.Module:
        from hal_backend_xpu.providers.ops import ArkExperts, VllmExperts

        kind = ArkExperts if self._entry.name.startswith("ark") else VllmExperts
        return kind(spec, weights, self._entry, target=_current_target())


class LinearProvided(LinearKernel):
    """A linear by another library's product."""

    devices = ("xpu",)
    isa = ()
    architectures = ()
    limits = ()
    m_range = (1, None)

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.name, self.layout, self.provider = f"linear_{entry.name}", entry.name, entry.library.distribution
        self.schemes, self.numerics, self.dtypes, self.out_dtypes = entry.schemes, entry.numerics, entry.dtypes, entry.dtypes
        self.error_bound = 6e-3 if entry.quant is None else 1e-1
        self.priority = _TORCH_PRIORITY if entry.library is TORCH else _PRIORITY
        self.epilogue = LinearEpilogue(bias=entry.bias, lora=False)

    def refusals(self, spec: LinearSpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *_refusals(self._entry, spec, machine))

    def transforms(self, spec: LinearSpec) -> tuple[Transform, ...]:
        return _recast(self._entry, (spec.weights,), spec.dtype)

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> nn.Module:
        from hal_backend_xpu.providers.ops import ArkLinear, TorchLinear, VllmLinear

        kinds = {"ark": ArkLinear, "torch": TorchLinear, "vllm": VllmLinear}
        return kinds[self._entry.name.partition("_")[0]](spec, weights, self._entry, target=_current_target())


KERNELS = (*(MoEProvided(entry) for entry in MOES), *(LinearProvided(entry) for entry in LINEARS))
