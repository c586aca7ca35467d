"""FlashInfer's blocks of experts as kernels: one for each entry. Declared and bound on every machine; two ran here.

Whatever stands in an entry's ``architectures`` comes from FlashInfer's own sources; see docs/backend-cuda-providers.md for what ran.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hal_backend_cuda.providers.flashinfer import DISTRIBUTION, INSTALL
from hal_backend_cuda.providers.flashinfer.beside import LaterRepeats, launch_merge, merge_on_host
from hal_backend_cuda.providers.flashinfer.moe_entries import ENTRIES, QUANTIZERS, Entry
from hal_backend_cuda.providers.flashinfer.moe_layouts import up
from hal_backend_cuda.providers.flashinfer.moe_weights import STEP, prepared_weights
from hal_backend_cuda.providers.flashinfer.mxfp8 import MXFP8, check_mxfp8, mxfp8_arguments
from hal_core.calls import bind
from hal_core.check import device_flag
from hal_core.kernel import MoEEpilogue, MoEKernel, ShapeLimit
from hal_core.op_parts import FixedBuffers, Numbered, NumberedOp, check_out, check_routing, check_rows
from hal_core.ops import MoEExperts, QuantizedActivation, Routed
from hal_core.packages import package_refusals
from hal_core.refusal import Refusal
from hal_core.selection import Padding
from hal_core.weight_checks import check_moe_weights, check_same_kind, kinds_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hal_core.kernel import MoEWeights
    from hal_core.machine import Machine
    from hal_core.spec import MoESpec

__all__ = ["KERNELS", "FlashInferExperts", "MoEFlashInfer", "packed_routing"]

#: Values of FlashInfer's enumerations ActivationType, WeightLayout and RoutingMethodType.
_SWIGLU, _MAJOR_K, _BLOCK_MAJOR_K, _TOP_K = 3, 0, 2, 5


def packed_routing(ids: Tensor, weights: Tensor) -> Tensor:
    """int32 ``[T, k]``: the expert in the upper 16 bits, the weight's bf16 in the lower; a skipped slot is expert 0 with weight 0."""
    skipped = ids < 0
    bits = torch.where(skipped, 0.0, weights).to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    return (torch.where(skipped, 0, ids).to(torch.int32) << 16) | bits


@dataclass(frozen=True, eq=False)
class _Call:
    """What arguments are made from."""

    spec: MoESpec
    tensors: Mapping[str, Tensor | None]
    x: Any
    routing: Routed
    out: Tensor


def _cutlass(entry: Entry, call: _Call) -> dict[str, Any]:
    """Arguments of ``cutlass_fused_moe``: routing, of which it leaves out -1, and scales in the order that the weights' type asks for."""
    t = call.tensors
    values: dict[str, Any] = {
        "input": call.x, "token_selected_experts": call.routing.topk_ids, "token_final_scales": call.routing.topk_weights,
        "fc1_expert_weights": t["first"], "fc2_expert_weights": t["second"], "output_dtype": torch.bfloat16, "quant_scales": [],
        "output": call.out, "activation_type": _SWIGLU,
    }  # fmt: skip
    if entry.form == "cutlass_fp8_block":
        values |= {"quant_scales": [t["first_scale"], t["second_scale"]], "use_deepseek_fp8_block_scale": True}
    if entry.form == "cutlass_mxfp4":
        values |= {"quant_scales": [t["first_scale"], t["ones"], t["second_scale"], t["ones"]], **mxfp8_arguments(True, call.x)}
    return values


def _trtllm(entry: Entry, call: _Call) -> dict[str, Any]:
    """Arguments of the ``trtllm_*_routed_moe`` functions; those that an entry's call does not name are left out by the caller."""
    spec, t = call.spec, call.tensors
    size = up(spec.intermediate, STEP)
    values: dict[str, Any] = {
        "topk_ids": packed_routing(call.routing.topk_ids, call.routing.topk_weights),
        "gemm1_weights": t["first"], "gemm2_weights": t["second"], "num_experts": spec.num_experts, "n_group": None, "topk_group": None,
        "top_k": call.routing.topk_ids.shape[1], "intermediate_size": size, "local_expert_offset": 0, "local_num_experts": spec.local,
        "routed_scaling_factor": None, "routing_method_type": _TOP_K, "activation_type": _SWIGLU, "output": call.out, "routing_bias": None,
        "gemm1_weights_scale": t.get("first_scale"), "gemm2_weights_scale": t.get("second_scale"), "gemm1_alpha": t.get("alpha"),
        "gemm1_beta": t.get("beta"), "gemm1_clamp_limit": t.get("limit"), "gemm1_bias": t.get("first_bias"),
        "gemm2_bias": t.get("second_bias"), "use_routing_scales_on_input": False,
    }  # fmt: skip
    for name in ("output1_scale", "output1_scales"):
        values |= {f"{name}_scalar": t.get("scale_up"), f"{name}_gate_scalar": t.get("scale_gate")}
    values |= {"output2_scale_scalar": t.get("scale_down"), "output2_scales_scalar": t.get("scale_down")}
    if entry.form == "trtllm_bf16":
        values |= {"use_shuffled_weight": True, "weight_layout": _BLOCK_MAJOR_K}
    if entry.form == "trtllm_fp8_block":
        values |= {"use_shuffled_weight": False, "weight_layout": _MAJOR_K}
    return {**values, **_activations(entry, call)}


def _activations(entry: Entry, call: _Call) -> dict[str, Any]:
    """The first product's input as the entry takes it, and its scales."""
    x, t = call.x, call.tensors
    if entry.form == "trtllm_fp8_block":
        codes, scales = group_fp8(x, 128)
        # FlashInfer reads these scales by groups first
        return {"hidden_states": codes, "hidden_states_scale": scales.T.contiguous()}
    if entry.form == "trtllm_fp8_tensor":
        codes = (x.float() / t["input_scale"]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return {"hidden_states": codes}
    if entry.form == "trtllm_nvfp4":
        bound = bind(QUANTIZERS["nvfp4"])
        codes, scales = bound.target(
            input=x, global_scale=t["input_scale"].reciprocal(), sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=False
        )
        return {"hidden_states": codes, "hidden_states_scale": scales.view(torch.float8_e4m3fn)}
    return {"hidden_states": x, "hidden_states_scale": None}


def group_fp8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """``[T, H]`` to e4m3 codes and float32 scales ``[T, H / group]``, the largest of a group being 448."""
    parts = x.float().unflatten(-1, (-1, group))
    largest = parts.abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / 448.0, 1.0)
    return (parts / scales).clamp(-448.0, 448.0).flatten(-2).to(torch.float8_e4m3fn), scales.squeeze(-1)


def _slots_apart(x: Tensor | QuantizedActivation, routing: Routed) -> tuple[Tensor | QuantizedActivation, Routed]:
    """Each slot as a token of one slot: FlashInfer sums a token's itself."""
    ids, weights = (t.view(-1, 1) for t in (routing.topk_ids, routing.topk_weights))
    times = routing.topk_ids.shape[1]
    if isinstance(x, QuantizedActivation):
        return replace(x, values=x.values.repeat_interleave(times, 0), scales=x.scales.repeat_interleave(times, 0)), Routed(ids, weights)
    return x.repeat_interleave(times, 0), Routed(ids, weights)


class FlashInferExperts(FixedBuffers, NumberedOp, MoEExperts):
    """One call of FlashInfer over buffers that :meth:`update` refills in place."""

    numbers: ClassVar[Numbered[Any]] = Numbered()

    def __init__(self, spec: MoESpec, weights: MoEWeights, entry: Entry, device: torch.device | None = None) -> None:
        super().__init__()
        check_moe_weights(spec, weights)
        self.spec, self.entry, self.kinds = spec, entry, kinds_of(weights)
        self.bound = bind(entry.call)
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        device_flag(self.device)  # now, so that no captured graph makes it
        self.repeats = LaterRepeats()
        for name, tensor in prepared_weights(entry, spec, weights).items():
            self.register_buffer(name, tensor.to(self.device))
        self.enrol()

    def arguments(self, x: Any, routing: Routed, out: Tensor) -> dict[str, Any]:
        """What the call is made with, by the names of the installed version's parameters."""
        make = _cutlass if self.entry.form.startswith("cutlass") else _trtllm
        values = make(self.entry, _Call(self.spec, self._buffers, x, routing, out))
        return self.bound.arguments({name: values[name] for name in self.entry.call.keywords})

    def compute(
        self, x: Any, routing: Any, expert_map: Tensor | None, out: Tensor | None, workspace: Tensor | None, reduce: bool
    ) -> Tensor:
        asked = f"flashinfer {self.entry.name} experts"
        given = x.values if isinstance(x, QuantizedActivation) else x
        routing = check_routing(asked, self.spec, given, routing, expert_map)
        if self.entry.form == "cutlass_mxfp4":
            rows: Any = check_mxfp8(asked, x, self.spec.hidden, self.device)
        else:
            rows = check_rows(asked, x, self.spec.hidden, torch.bfloat16, self.device)
        shape = (given.shape[0], self.spec.hidden) if reduce else (*routing.topk_ids.shape, self.spec.hidden)
        if not reduce:
            rows, routing = _slots_apart(rows, routing)
        room = functools.partial(check_out, asked, out, shape, torch.bfloat16, self.device)
        if torch.compiler.is_compiling():
            codes, scales = (rows.values, rows.scales) if isinstance(rows, QuantizedActivation) else (rows, None)
            y = _EXPERTS(codes, scales, routing.topk_ids, routing.topk_weights, self.spec.hidden, self.number).view(shape)
            return y if out is None else room().copy_(y)
        y = room()
        self.run(rows, routing, y.view(-1, self.spec.hidden))
        return y

    def run(self, rows: Tensor | QuantizedActivation, routing: Routed, y: Tensor) -> None:
        """Checked rows to ``y``."""
        if not len(y):
            return
        found = self.bound.target(**self.arguments(rows, self._merged(routing), y))
        found = found[0] if isinstance(found, (list, tuple)) else found
        if found.data_ptr() != y.data_ptr():  # versions without an ``output`` parameter give memory of their own
            y.copy_(found)

    def _merged(self, routing: Routed) -> Routed:
        """No expert twice for a token, no id out of range; ``hal.check()`` raises those that there were. Weights are scaled."""
        ids, weights, count, scaling = routing.topk_ids, routing.topk_weights, self.spec.num_experts, self.spec.routed_scaling
        if not ids.is_cuda:
            return Routed(*merge_on_host(ids, weights, count, scaling))
        given, out, flag = (ids, weights), (torch.empty_like(ids), torch.empty_like(weights)), device_flag(ids.device)
        self.repeats(tuple(ids.shape), (*given, *out), lambda: launch_merge(given, out, flag, count, self.spec.top_k, scaling))
        return Routed(*out)

    def update(self, weights: MoEWeights) -> None:
        check_moe_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        for name, tensor in prepared_weights(self.entry, self.spec, weights).items():
            target = self._buffers[name]
            assert target is not None  # made from weights of the same kinds
            target.copy_(tensor)

    def workspace_size(self, max_tokens: int) -> int:
        return 0


def _experts(x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, hidden: int, number: int) -> Tensor:
    rows, y = x if scales is None else QuantizedActivation(x, scales, MXFP8), _experts_fake(x, scales, ids, weights, hidden, number)
    FlashInferExperts.numbers[number].run(rows, Routed(ids, weights), y)
    return y


#: The block as ``torch.compile`` sees it.
_EXPERTS = torch.library.custom_op(
    "hal_cuda::flashinfer_experts", _experts, mutates_args=(),
    schema="(Tensor x, Tensor? scales, Tensor ids, Tensor weights, int hidden, int number) -> Tensor",
)  # fmt: skip


@_EXPERTS.register_fake
def _experts_fake(x, scales, ids, weights, hidden, number):
    return x.new_empty(x.shape[0], hidden, dtype=torch.bfloat16)


class MoEFlashInfer(MoEKernel):
    """A block of experts by one of FlashInfer's entries; output is bf16 and nothing else."""

    devices = ("cuda",)
    isa = ()
    dtypes = ("bf16",)
    out_dtypes = ("bf16",)
    routing = ("routed",)
    limits = (ShapeLimit("hidden", multiple=128),)
    m_range = (1, None)

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.name = f"moe_flashinfer_{entry.name}"
        self.architectures, self.schemes, self.numerics = entry.architectures, entry.schemes, entry.numerics
        self.epilogue = MoEEpilogue(
            activations=entry.activations, alpha=entry.limits, limit=entry.limits, gated=True, ungated=False, bias=entry.bias,
            mixed_schemes=False, expert_map=False, expert_parallel=False, router_weight_on_input=False, routed_scaling=True,
            shared_experts=False, lora=False,
        )  # fmt: skip
        self.layout = f"flashinfer.{entry.name}"
        self.error_bound = 1e-2 if entry.quant is None else 0.15
        # below Triton's: cutlass_bf16 was slower than moe_bf16_triton from 1 to 4096 tokens, and no entry was seen to be faster than it
        self.priority = 50

    def refusals(self, spec: MoESpec, machine: Machine) -> tuple[Refusal, ...]:
        out = [*super().refusals(spec, machine), *package_refusals(machine, DISTRIBUTION, self._entry.versions, INSTALL)]
        g = spec.up.granularity
        exact = {"trtllm_nvfp4": 16, "trtllm_mxfp4": 32, "cutlass_mxfp4": 32, "trtllm_mxint4": 32}.get(self._entry.form)
        if exact is not None and g.group not in {None, exact}:
            out.append(Refusal("scheme.group", str(spec.up), f"serves groups of {exact}", "requantize with such a group size"))
        if g.block is not None and g.block != (STEP, STEP):
            out.append(Refusal("scheme.granularity", str(spec.up), f"serves blocks of {STEP}x{STEP}", "use another kernel"))
        return tuple(out)

    def padding(self, spec: MoESpec) -> tuple[Padding, ...]:
        size = up(spec.intermediate, STEP)
        return () if size == spec.intermediate else (Padding("intermediate", spec.intermediate, size),)

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> FlashInferExperts:
        return FlashInferExperts(spec, weights, self._entry)


KERNELS = tuple(MoEFlashInfer(entry) for entry in ENTRIES)
