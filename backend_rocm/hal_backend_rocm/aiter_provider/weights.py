"""Canonical weights in AITER's order, for one entry and one architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from hal_backend_rocm.aiter_provider.entries import Entry, entry_refusals
from hal_backend_rocm.aiter_provider.layouts import interleaved, packed_int4, scale_tiles, shuffled
from hal_backend_rocm.targets import FP8_TYPE
from hal_core.codes import effective_scales, to_fnuz
from hal_core.errors import UnfitWeightsError

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["experts_tensors", "linear_tensors"]

#: E8M0 of 1, for padded groups.
_ONE = 127
#: Elements of one scale.
_GROUP = 32


def _served(entry: Entry, spec: LinearSpec | MoESpec, target: str) -> None:
    """The predicate of selection once more: no weight is converted for a call that would not be made."""
    reasons = entry_refusals(entry, spec, target)
    if reasons:
        raise UnfitWeightsError(f"AITER's {entry.name}", "; ".join(reason.found for reason in reasons), reasons[0].fix)


def _matrix(entry: Entry, target: str, weights: list[QuantizedTensor]) -> tuple[Tensor, Tensor | None]:
    """Values ``[.., N, K]`` one matrix above the other, in the target's own fp8, and float32 scales beside them."""
    values = torch.cat([weight.values for weight in weights], dim=-2)
    grids = [effective_scales(weight.scales, None).float() for weight in weights if weight.scales is not None]
    scales = torch.cat(grids, dim=-2) if grids else None
    if entry.fp8 and FP8_TYPE[target] == "e4m3fnuz":
        values, scales = to_fnuz(values), None if scales is None else 2 * scales
    if entry.form == "int4":
        values = packed_int4(values)
    elif entry.form == "tiles":
        values = shuffled(values)
    return values.contiguous(), None if scales is None else scales.contiguous()


def _mxfp4(entry: Entry, weights: list[QuantizedTensor], n: int, k: int) -> tuple[Tensor, Tensor]:
    """Bytes ``[E, N, K / 2]`` and two-dimensional E8M0 bytes, each matrix widened to ``n`` by ``k`` with zeros."""
    values, scales = [], []
    for weight in weights:
        if weight.scales is None or weight.scales.dtype != torch.uint8:
            found = "no scales" if weight.scales is None else f"scales of {weight.scales.dtype}"
            raise UnfitWeightsError(f"AITER's {entry.name}", found, "E8M0 bytes are needed: use another kernel")
        rows, group = n - weight.shape[-2], weight.scheme.granularity.group or _GROUP
        values.append(pad(weight.values, (0, k // 2 - weight.values.shape[-1], 0, rows)))
        fine = weight.scales.repeat_interleave(group // _GROUP, dim=-1)[..., : k // _GROUP]  # coarser groups, of equal fine ones
        scales.append(pad(fine, (0, k // _GROUP - fine.shape[-1], 0, rows), value=_ONE))
    if len(weights) == 1:
        both, grid = values[0], scales[0]
    elif entry.form == "mxfp4_striped":
        both, grid = interleaved(*values), interleaved(*scales)
    else:
        both, grid = torch.cat(values, dim=-2), torch.cat(scales, dim=-2)
    return shuffled(both).contiguous(), scale_tiles(grid).contiguous()


def experts_tensors(entry: Entry, spec: MoESpec, weights: MoEWeights, target: str) -> dict[str, Tensor]:
    """Tensors by the names of ``fused_moe``: gate above up in ``w1 [E, 2 I, H]``, down in ``w2 [E, H, I]``."""
    _served(entry, spec, target)
    assert weights.gate is not None  # entries serve gated experts alone
    inward, outward = [weights.gate, weights.up], [weights.down]
    if entry.form.startswith("mxfp4"):
        hidden, inner = entry.padded(spec.hidden), entry.padded(spec.intermediate)
        w1, w1_scale = _mxfp4(entry, inward, inner, hidden)
        w2, w2_scale = _mxfp4(entry, outward, hidden, inner)
        found: dict[str, Tensor | None] = {"w1": w1, "w2": w2, "w1_scale": w1_scale, "w2_scale": w2_scale}
        biases = _biases(weights, spec, hidden, inner) if entry.bias else {}
    else:
        (w1, first), (w2, second) = _matrix(entry, target, inward), _matrix(entry, target, outward)
        found, biases = {"w1": w1, "w2": w2, "w1_scale": first, "w2_scale": second}, {}
    return {name: tensor for name, tensor in {**found, **biases}.items() if tensor is not None}


def _biases(weights: MoEWeights, spec: MoESpec, hidden: int, inner: int) -> dict[str, Tensor]:
    """float32 ``bias1 [E, 2 I]``, gate's before up's, and ``bias2 [E, H]``; zeros where there are none, which AITER cannot be told."""

    def wide(bias: Tensor | None, size: int) -> Tensor:
        if bias is None:
            return torch.zeros(spec.local, size, device=weights.up.device)
        return pad(bias.float(), (0, size - bias.shape[-1]))

    both = torch.cat([wide(weights.gate_bias, inner), wide(weights.up_bias, inner)], dim=-1)
    return {"bias1": both, "bias2": wide(weights.down_bias, hidden)}


def linear_tensors(entry: Entry, spec: LinearSpec, weights: LinearWeights, target: str) -> dict[str, Tensor]:
    """Tensors by the names of the product: ``WQ [N, K]``, ``w_scale [N, 1]`` or the grid of blocks."""
    _served(entry, spec, target)
    values, scales = _matrix(entry, target, [weights.weight])
    assert scales is not None  # 8-bit schemes have scales
    return {"WQ": values, "w_scale": scales}
