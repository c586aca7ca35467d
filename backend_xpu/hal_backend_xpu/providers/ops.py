"""The prepared ops over the libraries: weights in their order, their calls. Bound against their signatures; no Intel GPU has run them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from hal_backend_xpu.providers.entries import Entry, entry_refusals
from hal_backend_xpu.providers.libraries import bound
from hal_backend_xpu.providers.routing import by_expert, flag_wrong_ids, whole_slots
from hal_backend_xpu.providers.weights import ark_blob, ark_experts, torch_scaled, vllm_dense, vllm_experts
from hal_core.calls import Bound, bind
from hal_core.dtypes import torch_dtype
from hal_core.errors import ContractError, UnfitWeightsError
from hal_core.op_parts import FixedBuffers, check_out, check_routing, check_rows
from hal_core.ops import MoEExperts, QuantLinear
from hal_core.reference.activations import activate
from hal_core.weight_checks import check_linear_weights, check_moe_weights, check_same_kind, kinds_of

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["ArkExperts", "ArkLinear", "TorchLinear", "VllmExperts", "VllmLinear", "place"]

_FP8 = torch.finfo(torch.float8_e4m3fn)


def place(device: torch.device | None) -> torch.device:
    """The device given, or the current Intel GPU."""
    return device or torch.device("xpu", torch.xpu.current_device())


def _served(entry: Entry, spec: LinearSpec | MoESpec, target: str) -> None:
    """The predicate of selection once more: no weight is converted for a call that would not be made."""
    if reasons := entry_refusals(entry, spec, target):
        raise UnfitWeightsError(f"{entry.library.distribution}: {entry.name}", "; ".join(r.found for r in reasons), reasons[0].fix)


def _finished(asked: str, y: Any, out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a function returned, checked: libraries have written another dtype than they were given."""
    if not isinstance(y, torch.Tensor) or y.dtype != dtype or y.numel() != math.prod(shape):
        found = f"{y.dtype} {list(y.shape)}" if isinstance(y, torch.Tensor) else f"a {type(y).__name__}"
        raise ContractError(f"{asked} result", found, f"it should be {dtype} {list(shape)}; use another kernel")
    return y.view(shape) if out is None else check_out(asked, out, shape, dtype, y.device).copy_(y.view(shape))


class _Experts(FixedBuffers, MoEExperts):
    """What both libraries' experts share: checks, routing without gaps, in-place updates."""

    def __init__(self, spec: MoESpec, weights: MoEWeights, entry: Entry, device: torch.device | None, target: str) -> None:
        super().__init__()
        check_moe_weights(spec, weights)
        _served(entry, spec, target)
        self.spec, self.entry, self.kinds, self.device = spec, entry, kinds_of(weights), place(device)
        self.asked, self.dtype = f"{entry.name} experts", torch_dtype(spec.dtype)

    def compute(
        self, x: Any, routing: Any, expert_map: Tensor | None, out: Tensor | None, workspace: Tensor | None, reduce: bool
    ) -> Tensor:
        spec = self.spec
        routed = check_routing(self.asked, spec, x, routing, expert_map)
        rows = check_rows(self.asked, x, spec.hidden, self.dtype, self.device)
        flag_wrong_ids(routed.topk_ids, spec.num_experts)
        ids, weights = whole_slots(routed.topk_ids, routed.topk_weights * spec.routed_scaling, spec.num_experts)
        shape = tuple(rows.shape) if reduce else (rows.shape[0], spec.top_k, spec.hidden)
        y = check_out(self.asked, out, shape, self.dtype, self.device)
        return self.experts(rows, ids, weights, y, reduce) if rows.shape[0] else y

    def experts(self, rows: Tensor, ids: Tensor, weights: Tensor, out: Tensor, reduce: bool) -> Tensor:
        """The result in ``out``; ids have no gaps."""
        raise NotImplementedError

    def tensors(self, weights: MoEWeights) -> dict[str, Tensor]:
        """Buffers by name."""
        raise NotImplementedError

    def hold(self, weights: MoEWeights) -> None:
        """Register the buffers of ``weights``."""
        for name, tensor in self.tensors(weights).items():
            self.register_buffer(name, tensor.to(self.device))

    def update(self, weights: MoEWeights) -> None:
        check_moe_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        for name, tensor in self.tensors(weights).items():
            self.get_buffer(name).copy_(tensor)

    def workspace_size(self, max_tokens: int) -> int:
        return 0


class VllmExperts(_Experts):
    """One ``XpuFusedMoe`` of vllm-xpu-kernels, which sorts, multiplies and sums by itself."""

    def __init__(self, spec: MoESpec, weights: MoEWeights, entry: Entry, device: torch.device | None = None, target: str = "") -> None:
        super().__init__(spec, weights, entry, device, target)
        self.make = bound(entry.library, entry.call("make"))
        bind(entry.call("apply"))
        runner = self._runner(weights)
        # It replaces the storage of 4-bit weights by its own, so that what is held is what it holds.
        held = {"w13": runner.w13, "w2": runner.w2, "w13_scales": runner.gemm1_wei_scales, "w2_scales": runner.gemm2_wei_scales}
        for name, tensor in held.items():
            self.register_buffer(name, tensor)
        self.run = Bound(runner.apply, frozenset(entry.call("apply").keywords))

    def _runner(self, weights: MoEWeights) -> Any:
        assert weights.gate is not None  # entries serve gated experts alone
        spec = self.spec
        w13, w13_scales = vllm_experts([weights.gate, weights.up], spec.dtype)
        w2, w2_scales = vllm_experts([weights.down], spec.dtype)
        given = {"w13": w13, "w13_scales": w13_scales, "w13_bias": None, "w2": w2, "w2_scales": w2_scales, "w2_bias": None}
        values = {name: None if tensor is None else tensor.to(self.device) for name, tensor in given.items()}
        return self.make({
            **values, "n_experts_per_token": spec.top_k, "activation": spec.activation.kind, "num_experts": spec.num_experts,
            "gemm1_clamp_limit": spec.activation.limit,
        })  # fmt: skip

    def tensors(self, weights: MoEWeights) -> dict[str, Tensor]:
        runner = self._runner(weights)
        found = {"w13": runner.w13, "w2": runner.w2, "w13_scales": runner.gemm1_wei_scales, "w2_scales": runner.gemm2_wei_scales}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def experts(self, rows: Tensor, ids: Tensor, weights: Tensor, out: Tensor, reduce: bool) -> Tensor:
        if reduce:
            self.run({"output": out, "hidden_states": rows, "topk_weights": weights, "topk_ids": ids})
            return out
        # It sums the slots of a token, as many as it was made for: each is a token of its own, whose other slots count nothing.
        top_k = ids.shape[1]
        alone = torch.zeros_like(weights).repeat_interleave(top_k, 0)
        alone[:, 0] = weights.reshape(-1)
        same = ids.reshape(-1, 1).expand(-1, top_k).contiguous()
        self.run({
            "output": out.view(-1, out.shape[-1]), "hidden_states": rows.repeat_interleave(top_k, 0), "topk_weights": alone,
            "topk_ids": same,
        })  # fmt: skip
        return out


class ArkExperts(_Experts):
    """Two grouped products of auto-round-lib over rows sorted by expert; order, activation and sum are ours."""

    def __init__(self, spec: MoESpec, weights: MoEWeights, entry: Entry, device: torch.device | None = None, target: str = "") -> None:
        super().__init__(spec, weights, entry, device, target)
        self.product = bound(entry.library, entry.call("moe"))
        self.hold(weights)

    def tensors(self, weights: MoEWeights) -> dict[str, Tensor]:
        assert weights.gate is not None  # entries serve gated experts alone
        first, second = ark_experts([weights.gate, weights.up], self.spec.dtype), ark_experts([weights.down], self.spec.dtype)
        return {f"{role}_{name}": t.contiguous() for role, found in (("w13", first), ("w2", second)) for name, t in found.items()}

    def arguments(self, role: str, rows: Tensor, counts: Tensor) -> dict[str, Any]:
        """What a product is called with."""
        scheme = self.spec.down if role == "w2" else self.spec.up
        zeros = self._buffers.get(f"{role}_zeros")
        return {
            "activations": rows, "weights": self.get_buffer(f"{role}_weights"), "num_tokens_per_expert": counts,
            "scales": self.get_buffer(f"{role}_scales"), "zeros": zeros, "weight_bits": scheme.bits,
            "group_size": scheme.granularity.group or rows.shape[1], "asym": zeros is not None, "phase": "auto",
        }  # fmt: skip

    def experts(self, rows: Tensor, ids: Tensor, weights: Tensor, out: Tensor, reduce: bool) -> Tensor:
        spec, order = self.spec, by_expert(ids, self.spec.num_experts)
        both = self.product(self.arguments("w13", order.rows(rows), order.counts))
        hidden = activate(spec.activation, both[:, spec.intermediate :].float(), both[:, : spec.intermediate].float()).to(self.dtype)
        y = self.product(self.arguments("w2", hidden.contiguous(), order.counts))
        return out.copy_(order.summed(y, weights, reduce))


class _Linear(FixedBuffers, QuantLinear):
    """What both libraries' products share."""

    def __init__(
        self, spec: LinearSpec, weights: LinearWeights, entry: Entry, device: torch.device | None = None, target: str = ""
    ) -> None:
        super().__init__()
        check_linear_weights(spec, weights)
        _served(entry, spec, target)
        self.spec, self.entry, self.kinds, self.device = spec, entry, kinds_of(weights), place(device)
        self.asked, self.dtype = entry.name, torch_dtype(spec.dtype)
        self.bounds = {word: bound(entry.library, call) for word, call in entry.calls}
        for name, tensor in self.tensors(weights).items():
            self.register_buffer(name, tensor.to(self.device))

    def tensors(self, weights: LinearWeights) -> dict[str, Tensor]:
        """Buffers by name, the bias among them."""
        bias = {} if weights.bias is None else {"bias": weights.bias.to(self.dtype)}
        return {**self.packed(weights), **bias}

    def packed(self, weights: LinearWeights) -> dict[str, Tensor]:
        """The weight's buffers."""
        raise NotImplementedError

    def product(self, rows: Tensor) -> Tensor:
        """``[M, N]`` of ``rows [M, K]``."""
        raise NotImplementedError

    def compute(self, x: Any, out: Tensor | None = None) -> Tensor:
        rows = check_rows(self.asked, x, self.spec.k, self.dtype, self.device)
        y = self.product(rows) if rows.shape[0] else rows.new_empty(0, self.spec.n)
        return _finished(self.asked, y, out, (*x.shape[:-1], self.spec.n), self.dtype)

    def update(self, weights: LinearWeights) -> None:
        check_linear_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        for name, tensor in self.tensors(weights).items():
            self.get_buffer(name).copy_(tensor)


class VllmLinear(_Linear):
    """A product of vllm-xpu-kernels (oneDNN): int4 or fp8 weights, and fp8 activations that its own op quantizes."""

    def packed(self, weights: LinearWeights) -> dict[str, Tensor]:
        return vllm_dense(weights.weight, self.spec.dtype, column=self.entry.quant is not None)

    def product(self, rows: Tensor) -> Tensor:
        given = {"B": self.get_buffer("weight").t(), "bias": self._buffers.get("bias"), "bias_": self._buffers.get("bias")}
        scale = self.get_buffer("scale")
        if self.spec.weights.dtype == "int4":
            group = self.spec.weights.granularity.group or self.spec.k
            grid = {"B_scale": scale, "B_zp": self.get_buffer("zero"), "group_size": group, "g_idx": None}
            return self.bounds["product"]({"A": rows, **given, **grid})  # type: ignore[no-any-return]
        if self.entry.quant is None:
            return self.bounds["product"]({"A": rows, **given, "B_scale_": scale})  # type: ignore[no-any-return]
        codes, scales = self.quantized(rows)
        own = {"out_dtype": self.dtype, "A_scale_": scales, "B_scale_": scale}
        return self.bounds["product"]({"A": codes, **given, **own})  # type: ignore[no-any-return]

    def quantized(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """e4m3 codes and float32 scales, of a row or of 128 columns."""
        codes = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
        blocks = self.entry.quant is not None and self.entry.quant.granularity == "g128"
        scales = torch.empty(rows.shape[0], rows.shape[1] // 128 if blocks else 1, dtype=torch.float32, device=rows.device)
        if not blocks:
            self.bounds["quantize"]({"result": codes, "input": rows, "scale": scales, "scale_ub": None})
            return codes, scales
        self.bounds["quantize"]({
            "input": rows, "output_q": codes, "output_s": scales, "group_size": 128, "eps": 1e-10, "fp8_min": _FP8.min, "fp8_max": _FP8.max,
            "scale_ue8m0": False, "dummy_is_scale_transposed": False, "dummy_is_tma_aligned": False,
        })  # fmt: skip
        return codes, scales


class TorchLinear(_Linear):
    """torch's ``scaled_mm``: the scales of weights and activations are told by recipes."""

    def packed(self, weights: LinearWeights) -> dict[str, Tensor]:
        return torch_scaled(weights.weight)

    def product(self, rows: Tensor) -> Tensor:
        kinds = torch.nn.functional.ScalingType
        blocks = self.spec.weights.granularity.block is not None
        codes, scales = _quantized(rows, 128 if blocks else rows.shape[1])
        recipes = (kinds.BlockWise1x128, kinds.BlockWise128x128) if blocks else (kinds.RowWise, kinds.RowWise)
        return self.bounds["product"]({  # type: ignore[no-any-return]
            "mat_a": codes, "mat_b": self.get_buffer("weight").t(), "scale_a": scales, "scale_recipe_a": recipes[0],
            "scale_b": self.get_buffer("scale"), "scale_recipe_b": recipes[1], "bias": self._buffers.get("bias"),
            "output_dtype": self.dtype,
        })  # fmt: skip


def _quantized(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes and float32 scales ``[M, ceil(K/group)]``; the last group of a row may be smaller."""
    m, k = rows.shape
    groups = torch.nn.functional.pad(rows.float(), (0, -k % group)).view(m, -1, group)
    largest = groups.abs().amax(-1)
    scales = torch.where(largest == 0, 1.0, largest / _FP8.max)  # NaN stays, in its own row
    codes = (groups / scales[..., None]).clamp(_FP8.min, _FP8.max).to(torch.float8_e4m3fn)
    return codes.view(m, -1)[:, :k].contiguous(), scales


class ArkLinear(_Linear):
    """``woqgemm`` of auto-round-lib with fp16 products: symmetric integers, re-laid by the library itself."""

    def _words(self) -> dict[str, Any]:
        scheme = self.spec.weights
        group = scheme.granularity.group or self.spec.k
        return {"groupsize": group, "compute_type": "fp16", "weight_type": scheme.dtype, "scale_type": "fp16", "asym": False}

    def packed(self, weights: LinearWeights) -> dict[str, Tensor]:
        given = {name: tensor.to(self.device) for name, tensor in ark_blob(weights.weight).items()}
        return {"blob": self.bounds["repack"]({**given, **self._words()})}

    def product(self, rows: Tensor) -> Tensor:
        bias = self._buffers.get("bias")
        none = torch.empty(0, dtype=rows.dtype, device=rows.device)
        values = {"A": rows, "B": self.get_buffer("blob"), "bias": none if bias is None else bias, "n": self.spec.n, "k": self.spec.k}
        return self.bounds["product"]({**values, **self._words()})  # type: ignore[no-any-return]
