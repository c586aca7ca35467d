"""The kernels that multiply matrix tiles (AMX): int8 activations, rescaled weights, or operands rounded to bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hal_backend_cpu.kernels_int8 import LinearAVX512VNNIGroup, LinearAVX512VNNIToken, MoEAVX512VNNIGroup, MoEAVX512VNNIToken
from hal_core.kernel import SchemeSet
from hal_core.numerics import Numerics
from hal_core.schemes import GranularityKind, ZeroKind
from hal_core.transforms import GroupToChannel

if TYPE_CHECKING:
    from hal_backend_cpu.ops import CpuLinear, CpuMoE
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.machine import Machine
    from hal_core.schemes import WeightScheme
    from hal_core.selection import Transform
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["KERNELS"]

_AMX = (*LinearAVX512VNNIToken.isa, "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
_RESCALED = GroupToChannel()
_FOLDED = SchemeSet(
    dtypes=("int4",), granularities=(GranularityKind.GROUP,), zeros=(ZeroKind.NONE,), act_order=True, group_multiple=8
)  # fmt: skip
#: A few rows keep the weights as they are, or their operands exact, so that a row's bits depend on how many there are.
_RESCALED_NUMERICS = replace(LinearAVX512VNNIToken.numerics, weights="rescaled", batch_invariant=False)
_BF16_NUMERICS = Numerics(operand="bf16", deterministic=True)
#: Two roundings of operands in a row, where minima cancel; near 2e-3 is usual.
_BF16_BOUND = 1.2e-2
#: What rescaling adds to the error of int8 activations.
_MORE = 2e-2


def _rescaled_rank(scheme: WeightScheme) -> int:
    """Above the kernels that leave the weights as they are where groups are short, whose sums cost those the most; else below."""
    return 520 if (scheme.granularity.group or 128) < 128 else 490


class LinearAMXToken(LinearAVX512VNNIToken):
    """int4 and int8 weights, int8 activations with one scale a token, AMX; the bits of linear_avx512vnni_token."""

    name = "linear_amx_token"
    isa = _AMX
    _level = "amx:token"
    priority = 500


class LinearAMXGroup(LinearAVX512VNNIGroup):
    """int4 and int8 weights, int8 activations with a scale for each weight group or 128 values, AMX."""

    name = "linear_amx_group"
    isa = _AMX
    _level = "amx:group"
    priority = 510


class LinearAMXRescaled(LinearAVX512VNNIToken):
    """int4 groups folded into one int8 scale a row as they are read, int8 activations with one scale a token, AMX."""

    name = "linear_amx_rescaled"
    isa = _AMX
    _level = "amx:rescaled"
    schemes = _FOLDED
    numerics = _RESCALED_NUMERICS
    error_bound = LinearAVX512VNNIToken.error_bound + _MORE
    priority = 520

    def rank(self, spec: LinearSpec, machine: Machine) -> int:
        return _rescaled_rank(spec.weights)

    def transforms(self, spec: LinearSpec) -> tuple[Transform, ...]:
        return (_RESCALED.record,)

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> CpuLinear:
        from hal_backend_cpu.ops import CpuLinear

        return CpuLinear(spec, weights, self._level, _RESCALED)


class LinearAMXBF16(LinearAVX512VNNIToken):
    """int4 and int8 weights, operands rounded to bf16, AMX."""

    name = "linear_amx_bf16"
    isa = _AMX
    _level = "amx:bf16"
    numerics = _BF16_NUMERICS
    error_bound = _BF16_BOUND
    priority = 320


class MoEAMXToken(MoEAVX512VNNIToken):
    """A block of int4 or int8 experts, int8 activations with one scale a token, AMX; the bits of moe_avx512vnni_token."""

    name = "moe_amx_token"
    isa = _AMX
    _level = "amx:token"
    priority = 500


class MoEAMXGroup(MoEAVX512VNNIGroup):
    """A block of int4 or int8 experts, int8 activations with a scale for each weight group or 128 values, AMX."""

    name = "moe_amx_group"
    isa = _AMX
    _level = "amx:group"
    priority = 510


class MoEAMXRescaled(MoEAVX512VNNIToken):
    """Experts whose int4 groups are folded into one int8 scale a row as they are read, int8 activations, AMX."""

    name = "moe_amx_rescaled"
    isa = _AMX
    _level = "amx:rescaled"
    schemes = _FOLDED
    numerics = _RESCALED_NUMERICS
    error_bound = MoEAVX512VNNIToken.error_bound + _MORE
    priority = 520

    def rank(self, spec: MoESpec, machine: Machine) -> int:
        return _rescaled_rank(spec.up)

    def transforms(self, spec: MoESpec) -> tuple[Transform, ...]:
        return (_RESCALED.record,)

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> CpuMoE:
        from hal_backend_cpu.ops import CpuMoE

        return CpuMoE(spec, weights, self._level, _RESCALED)


class MoEAMXBF16(MoEAVX512VNNIToken):
    """A block of int4 or int8 experts, operands rounded to bf16, AMX."""

    name = "moe_amx_bf16"
    isa = _AMX
    _level = "amx:bf16"
    numerics = _BF16_NUMERICS
    error_bound = _BF16_BOUND
    priority = 320


KERNELS = (
    LinearAMXRescaled(),
    LinearAMXGroup(),
    LinearAMXToken(),
    LinearAMXBF16(),
    MoEAMXRescaled(),
    MoEAMXGroup(),
    MoEAMXToken(),
    MoEAMXBF16(),
)
