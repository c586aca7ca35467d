"""The prepared ops over AITER: weights in its order, one call. Bound against its signatures; no AMD GPU has run them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import pad

from hal_backend_rocm.aiter_provider.calls import bind
from hal_backend_rocm.aiter_provider.weights import experts_tensors, linear_tensors
from hal_core.check import device_flag
from hal_core.errors import ContractError, ShapeError
from hal_core.ops import MoEExperts, QuantLinear, Routed
from hal_core.triton.launch import arch_of, direct, flag_only, quantize_fp8, quantize_int8
from hal_core.weight_checks import check_linear_weights, check_moe_weights, check_same_kind, kinds_of, refuse_gradients

if TYPE_CHECKING:
    from torch import Tensor

    from hal_backend_rocm.aiter_provider.entries import Entry
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["AiterExperts", "AiterLinear", "report_wrong_ids"]

_ACTIVATIONS = {"silu": "Silu", "swiglu_oai": "Swiglu"}
#: The types of packed tensors as AITER knows them, by their names, where they are stored as bytes.
_FP4, _E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu


class _Held(nn.Module):
    """Packed buffers that keep their dtypes, on the device that they were prepared for."""

    entry: Entry

    def _hold(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.to(device))

    def _refill(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.get_buffer(name).copy_(tensor)

    def _apply(self, fn: Any, recurse: bool = True) -> _Held:
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

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


def _rows(asked: str, x: Any, k: int, device: torch.device) -> Tensor:
    if not isinstance(x, torch.Tensor) or x.dim() < 1 or x.shape[-1] != k or x.dtype != torch.bfloat16 or x.device.type != device.type:
        found = f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
        raise ShapeError(f"{asked} input", found, f"give torch.bfloat16 [.., {k}] on {device}")
    refuse_gradients(asked, x)
    return x.reshape(-1, k).contiguous()


def _into(asked: str, out: Tensor | None, y: Tensor, shape: tuple[int, ...]) -> Tensor:
    if out is None:
        return y.reshape(shape)
    if tuple(out.shape) != shape or out.dtype != y.dtype or out.device != y.device:
        raise ShapeError(f"{asked} out", f"{out.dtype} {list(out.shape)} on {out.device}", f"give {y.dtype} {list(shape)} on {y.device}")
    return out.copy_(y.reshape(shape))


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
        self._hold(experts_tensors(entry, spec, weights, self.target), self.device)

    def arguments(self, x: Tensor, ids: Tensor, weights: Tensor) -> dict[str, Any]:
        """What the call is made with. A slot that goes nowhere becomes expert 0 with a weight of 0: AITER has no word for it."""
        skipped = (ids < 0) | (ids >= self.spec.num_experts)
        held = {name: self.get_buffer(name) for name in ("w1_scale", "w2_scale", "bias1", "bias2") if name in self._buffers}
        held = {name: tensor.view(_E8M0) if tensor.dtype == torch.uint8 else tensor for name, tensor in held.items()}
        return {
            "hidden_states": pad(x, (0, self.entry.padded(x.shape[-1]) - x.shape[-1])), "w1": self._weight("w1"), "w2": self._weight("w2"),
            "topk_weight": torch.where(skipped, 0.0, weights.float() * self.spec.routed_scaling).contiguous(),
            "topk_ids": torch.where(skipped, 0, ids).to(torch.int32).contiguous(),
            "activation": _enum("ActivationType", _ACTIVATIONS[self.entry.activation.kind]),
            "quant_type": _enum("QuantType", self.entry.quant_type), **held,
            # What is padded is zero and may be computed; what AITER leaves out it does not write, and then reads.
            "dtype": torch.bfloat16, "hidden_pad": 0, "intermediate_pad": 0,
        }  # fmt: skip

    def compute(
        self, x: Any, routing: Any, expert_map: Tensor | None, out: Tensor | None, workspace: Tensor | None, reduce: bool
    ) -> Tensor:
        asked, spec = f"aiter {self.entry.name} experts", self.spec
        if not reduce or expert_map is not None or not isinstance(routing, Routed):
            found = "reduce=False" if not reduce else "an expert_map" if expert_map is not None else f"a {type(routing).__name__}"
            raise ShapeError(asked, found, "give Routed ids of all experts and take their sum, or use the Triton kernels")
        rows, ids, weights = _rows(asked, x, spec.hidden, self.device), routing.topk_ids, routing.topk_weights
        if tuple(ids.shape) != (rows.shape[0], spec.top_k) or ids.shape != weights.shape or ids.dtype not in {torch.int32, torch.int64}:
            found = f"x {list(x.shape)}, topk_ids {ids.dtype} {list(ids.shape)}, topk_weights {list(weights.shape)}"
            raise ShapeError(asked, found, f"give x [T, {spec.hidden}], integer ids and weights [T, {spec.top_k}]")
        if rows.is_cuda and rows.shape[0]:
            report_wrong_ids(ids, spec.num_experts)
        y = self.bound(self.arguments(rows, ids, weights))[:, : spec.hidden] if rows.shape[0] else torch.empty_like(rows)
        return _into(asked, out, y, tuple(rows.shape))

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
        asked, n = f"aiter {self.entry.name}", self.spec.n
        rows = _rows(asked, x, self.spec.k, self.device)
        y = self.bound(self.arguments(rows)) if rows.shape[0] else rows.new_empty(0, n)
        return _into(asked, out, y, (*x.shape[:-1], n))

    def update(self, weights: LinearWeights) -> None:
        check_linear_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        self._refill(linear_tensors(self.entry, self.spec, weights, self.target))
