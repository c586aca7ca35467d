"""The prepared ops over AITER: weights in its order, one call. Bound against its signatures; no AMD GPU has run them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from hal_backend_rocm.aiter_provider.calls import bind
from hal_backend_rocm.aiter_provider.weights import experts_tensors, linear_tensors
from hal_core.check import device_flag
from hal_core.errors import ContractError
from hal_core.op_parts import FixedBuffers, check_out, check_routing, check_rows
from hal_core.ops import MoEExperts, QuantLinear
from hal_core.triton.launch import arch_of, direct, flag_only, quantize_fp8, quantize_int8
from hal_core.weight_checks import check_linear_weights, check_moe_weights, check_same_kind, kinds_of

if TYPE_CHECKING:
    from torch import Tensor

    from hal_backend_rocm.aiter_provider.entries import Entry
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["AiterExperts", "AiterLinear", "report_wrong_ids"]

_ACTIVATIONS = {"silu": "Silu", "swiglu_oai": "Swiglu"}
#: The types of packed tensors as AITER knows them, by their names, where they are stored as bytes.
_FP4, _E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu


class _Held(FixedBuffers):
    """Packed buffers on the device that they were prepared for."""

    entry: Entry

    def _hold(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.to(device))

    def _refill(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.get_buffer(name).copy_(tensor)

    def _weight(self, name: str) -> Tensor:
        """AITER reads an attribute of the tensor, which copies and moves lose, so it is set at each call."""
        found = self.get_buffer(name)
        if self.entry.form.startswith("mxfp4"):
            found = found.view(_FP4)
        found.is_shuffled = self.entry.shuffled  # type: ignore[attr-defined]
        return found


def _place(device: torch.device | None, target: str | None) -> tuple[torch.device, str]:
    found = device or torch.device("cuda", torch.cuda.current_device())
    return found, target or arch_of(found)


def _enum(kind: str, name: str) -> Any:
    found = getattr(getattr(importlib.import_module("aiter"), kind, None), name, None)
    if found is None:
        raise ContractError(f"aiter.{kind}.{name}", "not there", "install a version of amd-aiter that this backend was made for")
    return found


def report_wrong_ids(ids: Tensor, num_experts: int) -> None:
    """Leave the first id out of range where ``hal.check()`` finds it; waits for nothing."""
    route = direct(ids.contiguous(), ids, None, num_experts, num_experts)
    flag_only(route, device_flag(ids.device), ids.shape[1])


class AiterExperts(_Held, MoEExperts):
    """One call of ``fused_moe``, which sorts, quantizes activations and sums by itself."""

    def __init__(
        self, spec: MoESpec, weights: MoEWeights, entry: Entry, device: torch.device | None = None, target: str | None = None
    ) -> None:
        super().__init__()
        check_moe_weights(spec, weights)
        self.spec, self.entry, self.kinds = spec, entry, kinds_of(weights)
        self.device, self.target = _place(device, target)
        self.bound = bind(entry.call)
        here = torch.ones(spec.num_experts + 1, dtype=torch.int32)
        here[-1] = 0
        self._hold({**experts_tensors(entry, spec, weights, self.target), "here": here}, self.device)

    def arguments(self, x: Tensor, ids: Tensor, weights: Tensor) -> dict[str, Any]:
        """What the call is made with. A slot that goes nowhere goes to one expert more than there are, which the mask says is elsewhere."""
        skipped = (ids < 0) | (ids >= self.spec.num_experts)
        held = {name: self.get_buffer(name) for name in ("w1_scale", "w2_scale", "bias1", "bias2") if name in self._buffers}
        held = {name: tensor.view(_E8M0) if tensor.dtype == torch.uint8 else tensor for name, tensor in held.items()}
        return {
            "hidden_states": pad(x, (0, self.entry.padded(x.shape[-1]) - x.shape[-1])), "w1": self._weight("w1"), "w2": self._weight("w2"),
            "topk_weight": torch.where(skipped, 0.0, weights * self.spec.routed_scaling),
            "topk_ids": torch.where(skipped, self.spec.num_experts, ids), "expert_mask": self.get_buffer("here"),
            "activation": _enum("ActivationType", _ACTIVATIONS[self.entry.activation.kind]),
            "quant_type": _enum("QuantType", self.entry.quant_type), **held,
            # What is padded is zero and may be computed; what AITER leaves out it does not write, and then reads.
            "dtype": torch.bfloat16, "hidden_pad": 0, "intermediate_pad": 0,
        }  # fmt: skip

    def compute(
        self, x: Any, routing: Any, expert_map: Tensor | None, out: Tensor | None, workspace: Tensor | None, reduce: bool
    ) -> Tensor:
        asked, spec = f"aiter {self.entry.name} experts", self.spec
        rows = check_rows(asked, x, spec.hidden, torch.bfloat16, self.device)
        routed = check_routing(asked, spec, x, routing, expert_map)
        ids, weights = routed.topk_ids, routed.topk_weights
        shape = (len(rows), *(() if reduce else (spec.top_k,)), spec.hidden)
        given = check_out(asked, out, shape, torch.bfloat16, self.device) if out is not None or not len(rows) else None
        if given is not None and not len(rows):
            return given
        if rows.is_cuda:
            report_wrong_ids(ids, spec.num_experts)
        if not reduce:  # AITER sums the slots of a token: each is a token of its own
            rows, ids, weights = rows.repeat_interleave(spec.top_k, 0), ids.reshape(-1, 1), weights.reshape(-1, 1)
        y = self.bound(self.arguments(rows, ids, weights))[:, : spec.hidden].reshape(shape)
        return y if given is None else given.copy_(y)

    def update(self, weights: MoEWeights) -> None:
        check_moe_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        self._refill(experts_tensors(self.entry, self.spec, weights, self.target))

    def workspace_size(self, max_tokens: int) -> int:
        return 0


class AiterLinear(_Held, QuantLinear):
    """Activations quantized by this backend's Triton kernel, then one product of AITER."""

    def __init__(
        self, spec: LinearSpec, weights: LinearWeights, entry: Entry, device: torch.device | None = None, target: str | None = None
    ) -> None:
        super().__init__()
        check_linear_weights(spec, weights)
        self.spec, self.entry, self.kinds = spec, entry, kinds_of(weights)
        self.device, self.target = _place(device, target)
        self.bound = bind(entry.call)
        self._hold(linear_tensors(entry, spec, weights, self.target), self.device)

    def arguments(self, rows: Tensor) -> dict[str, Any]:
        """What the call is made with: codes ``[M, K]`` and scales ``[M, 1]``, or one for every 128 columns."""
        weight = self._weight("WQ")
        if weight.dtype == torch.int8:
            codes, scales = quantize_int8(rows)
        else:
            blocks = self.entry.quant is not None and self.entry.quant.granularity == "g128"
            codes, scales = quantize_fp8(rows, 128 if blocks else None, weight.dtype)
        wide = scales.view(rows.shape[0], -1)
        return {"XQ": codes, "WQ": weight, "x_scale": wide, "w_scale": self.get_buffer("w_scale"), "dtype": torch.bfloat16}

    def compute(self, x: Any, out: Tensor | None = None) -> Tensor:
        asked = f"aiter {self.entry.name}"
        rows = check_rows(asked, x, self.spec.k, torch.bfloat16, self.device)
        shape = (*x.shape[:-1], self.spec.n)
        given = check_out(asked, out, shape, torch.bfloat16, self.device) if out is not None or not len(rows) else None
        if given is not None and not len(rows):
            return given
        y = self.bound(self.arguments(rows)).view(shape)
        return y if given is None else given.copy_(y)

    def update(self, weights: LinearWeights) -> None:
        check_linear_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        self._refill(linear_tensors(self.entry, self.spec, weights, self.target))
