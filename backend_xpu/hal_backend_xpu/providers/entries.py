"""Foreign functions as data: what each serves, and the conditions under which it does. Nothing here imports a library.

Where a condition has a source, it is a line of the published wheel (vllm-xpu-kernels 0.1.16.2, auto-round-lib 0.16.0); where it has
none, it is a margin of ours. No entry has run on a GPU here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_backend_xpu.providers.libraries import ARK, TORCH, VLLM, Library
from hal_core.calls import Call
from hal_core.kernel import SchemeSet
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.refusal import Refusal
from hal_core.schemes import GranularityKind, ZeroKind
from hal_core.spec import ACTIVATIONS

if TYPE_CHECKING:
    from hal_core.schemes import WeightScheme
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["LINEARS", "MOES", "Condition", "Entry", "entry_refusals"]

_TENSOR, _CHANNEL, _GROUP, _BLOCK = GranularityKind.TENSOR, GranularityKind.CHANNEL, GranularityKind.GROUP, GranularityKind.BLOCK
_NONE, _INTEGER = ZeroKind.NONE, ZeroKind.INTEGER
_HALVES = ("bf16", "fp16")
_XE2 = ("bmg", "lnl")
_BLOCK_SIZE = (128, 128)


@dataclass(frozen=True)
class Condition:
    """A dimension of the spec that must be a multiple. source: where the library says so, or "" where the margin is ours."""

    dim: str
    multiple: int
    source: str = ""


@dataclass(frozen=True)
class Entry:
    """One kernel. calls: the functions it makes use of, by a word of ours.

    whole_groups: the group must divide K. zeros_source, target_source: lines that limit zero points and architectures.
    """

    name: str
    library: Library
    calls: tuple[tuple[str, Call], ...]
    schemes: SchemeSet
    dtypes: tuple[str, ...]
    conditions: tuple[Condition, ...] = ()
    activations: tuple[str, ...] = ()
    quant: ActivationQuant | None = None
    targets: tuple[str, ...] = ()
    target_source: str = ""
    whole_groups: bool = True
    limit: bool = False
    bias: bool = False

    @property
    def numerics(self) -> Numerics:
        return Numerics((self.quant,) if self.quant else ())

    def call(self, word: str) -> Call:
        return dict(self.calls)[word]


def _set(dtype: str, kinds: tuple[GranularityKind, ...], zeros: tuple[ZeroKind, ...] = (_NONE,), group: int = 1) -> SchemeSet:
    return SchemeSet((dtype,), kinds, zeros, act_order=False, group_multiple=group)


_FUSED = "vllm_xpu_kernels.fused_moe_interface.XpuFusedMoe"
_MOE_CALLS = (
    ("make", Call(_FUSED, (
        "w13", "w13_scales", "w13_bias", "w2", "w2_scales", "w2_bias", "n_experts_per_token", "activation", "num_experts",
        "gemm1_clamp_limit",
    ))),
    ("apply", Call(f"{_FUSED}.apply", ("output", "hidden_states", "topk_weights", "topk_ids"))),
)  # fmt: skip
_GATED = ("silu", "gelu", "gelu_tanh")
_DEFAULT = "libgrouped_gemm_xe_default.so takes bf16 and fp16 weights alone, libgrouped_gemm_xe_2.so the others"
_REMAP = "_moe_C remap_hidden_states: hidden_size must be divisible by ElemsPerItem"
_ZP = "fused_moe_interface.py implement_zp: only support default zero point now"


def _vllm_moe(name: str, schemes: SchemeSet, multiple: int, dtypes: tuple[str, ...] = _HALVES) -> Entry:
    conditions = (Condition("hidden", multiple, _REMAP), Condition("intermediate", multiple))
    targets, source = ((), "") if name in dtypes else (_XE2, _DEFAULT)
    return Entry(f"vllm_{name}", VLLM, _MOE_CALLS, schemes, dtypes, conditions, _GATED, targets=targets, target_source=source, limit=True)


_ARK_MOE = Call(
    "auto_round_kernel.moe",
    ("activations", "weights", "num_tokens_per_expert", "scales", "zeros", "weight_bits", "group_size", "asym", "phase"),
)
_VALIDATE = "auto_round_kernel/__init__.py _validate_moe_quant_args: N must be a multiple of 16"


def _ark_moe(name: str, schemes: SchemeSet) -> Entry:
    # gate above up is one matrix of twice the intermediate size
    conditions = (Condition("hidden", 16, _VALIDATE), Condition("intermediate", 16, _VALIDATE))
    return Entry(f"ark_{name}", ARK, (("moe", _ARK_MOE),), schemes, _HALVES, conditions, ACTIVATIONS[:4], limit=True)


MOES = (
    _vllm_moe("bf16", _set("bf16", (_CHANNEL,)), 16, ("bf16",)),
    _vllm_moe("fp16", _set("fp16", (_CHANNEL,)), 16, ("fp16",)),
    _vllm_moe("int4", _set("int4", (_GROUP,), group=32), 32),
    _vllm_moe("mxfp4", _set("mxfp4", (_GROUP,), group=32), 32),
    _vllm_moe("fp8_block", _set("fp8_e4m3", (_BLOCK,)), 128),
    _ark_moe("int4", _set("int4", (_CHANNEL, _GROUP), (_NONE, _INTEGER), 2)),
    _ark_moe("int8", _set("int8", (_CHANNEL, _GROUP), (_NONE, _INTEGER))),
    _ark_moe("fp8", _set("fp8_e4m3", (_CHANNEL, _GROUP))),
)

_XPU_C, _C = "torch.ops._xpu_C", "torch.ops._C"
_W4A16 = Call(f"{_XPU_C}.int4_gemm_w4a16", ("A", "B", "bias", "B_scale", "B_zp", "group_size", "g_idx"))
_W8A16 = Call(f"{_XPU_C}.fp8_gemm_w8a16", ("A", "B", "B_scale_", "bias_"))
_W8A8 = Call(f"{_XPU_C}.fp8_gemm", ("A", "B", "out_dtype", "A_scale_", "B_scale_", "bias_"))
_PER_TOKEN = Call(f"{_C}.dynamic_per_token_scaled_fp8_quant", ("result", "input", "scale", "scale_ub"))
_PER_GROUP = Call(f"{_C}.per_token_group_fp8_quant", (
    "input", "output_q", "output_s", "group_size", "eps", "fp8_min", "fp8_max", "scale_ue8m0", "dummy_is_scale_transposed",
    "dummy_is_tma_aligned",
))  # fmt: skip
_ARK_WOQ = Call("auto_round_kernel.woqgemm", ("A", "B", "bias", "n", "k", "groupsize", "compute_type", "weight_type", "scale_type", "asym"))
_ARK_REPACK = Call(
    "auto_round_kernel.repack_quantized_weight",
    ("QB", "scaleB", "zp", "groupsize", "compute_type", "weight_type", "scale_type", "asym"),
    through="auto_round_kernel._repack_quantized_weight_core",
)
_WORDS = "qlinear.py QuantLinear: codes and zero points in words of 32 along both dimensions"


def _vllm_fp8(name: str, kinds: tuple[GranularityKind, ...], multiple: int, quant: ActivationQuant | None) -> Entry:
    calls = (("product", _W8A16 if quant is None else _W8A8),)
    if quant is not None:
        calls = (*calls, ("quantize", _PER_TOKEN if quant.granularity == "token" else _PER_GROUP))
    conditions = (Condition("n", multiple), Condition("k", multiple))
    return Entry(f"vllm_{name}", VLLM, calls, _set("fp8_e4m3", kinds), _HALVES, conditions, quant=quant, bias=True)


_SCALED_MM = Call(
    "torch.nn.functional.scaled_mm",
    ("mat_a", "mat_b", "scale_a", "scale_recipe_a", "scale_b", "scale_recipe_b", "bias", "output_dtype"),
)
_SIXTEEN = "aten/src/ATen/native/mkldnn/xpu/ScaledBlas.cpp: sizes must be divisible by 16"


def _torch_scaled(name: str, kind: GranularityKind, quant: ActivationQuant) -> Entry:
    conditions = (Condition("n", 16, _SIXTEEN), Condition("k", 16, _SIXTEEN))
    calls = (("product", _SCALED_MM),)
    return Entry(f"torch_scaled_{name}", TORCH, calls, _set("fp8_e4m3", (kind,)), _HALVES, conditions, quant=quant, bias=True)


def _ark_linear(name: str, schemes: SchemeSet) -> Entry:
    conditions = (Condition("n", 32, _WORDS), Condition("k", 32, _WORDS))
    calls = (("product", _ARK_WOQ), ("repack", _ARK_REPACK))
    return Entry(f"ark_{name}", ARK, calls, schemes, ("fp16",), conditions, bias=True)


LINEARS = (
    # The op writes fp16 whatever it is given, so bf16 models are not served.
    Entry(
        "vllm_int4", VLLM, (("product", _W4A16),), _set("int4", (_CHANNEL, _GROUP), (_NONE, _INTEGER), 32), ("fp16",),
        (Condition("n", 32), Condition("k", 32)), bias=True,
    ),
    _vllm_fp8("fp8_w8a16", (_CHANNEL,), 16, None),
    _vllm_fp8("fp8_w8a16_block", (_BLOCK,), 128, None),
    _vllm_fp8("fp8_w8a8", (_CHANNEL,), 16, ActivationQuant("fp8_e4m3", "token")),
    _vllm_fp8("fp8_w8a8_block", (_BLOCK,), 128, ActivationQuant("fp8_e4m3", "g128")),
    _torch_scaled("channel", _CHANNEL, ActivationQuant("fp8_e4m3", "token")),
    _torch_scaled("block", _BLOCK, ActivationQuant("fp8_e4m3", "g128")),
    # qlinear.py QuantLinear.post_init: asymmetric quantization is only supported on CPU devices.
    _ark_linear("int4", _set("int4", (_CHANNEL, _GROUP), group=32)),
    _ark_linear("int8", _set("int8", (_CHANNEL, _GROUP), group=32)),
)  # fmt: skip


def _group_refusals(entry: Entry, schemes: tuple[WeightScheme, ...], sizes: tuple[int, ...]) -> list[Refusal]:
    out = []
    for scheme, k in zip(schemes, sizes, strict=True):
        group = scheme.granularity.group
        if entry.whole_groups and group is not None and k % group:
            out.append(Refusal("shape.multiple", f"K={k}", f"needs a multiple of the group, {group}", "use another kernel"))
        block = scheme.granularity.block
        if block is not None and tuple(block) != _BLOCK_SIZE:
            out.append(Refusal("scheme.granularity", f"scales per {scheme.granularity}", "serves blocks of 128x128", "use another kernel"))
    return out


def entry_refusals(entry: Entry, spec: LinearSpec | MoESpec, target: str) -> tuple[Refusal, ...]:
    """Why a library's function cannot serve ``spec`` on one architecture; preparation asks again before weights are converted."""
    out = []
    if entry.targets and target not in entry.targets:
        found = f"{target}; serves {', '.join(entry.targets)} ({entry.target_source})"
        out.append(Refusal("device.arch", f"{entry.library.distribution}: {entry.name}", found, "use another kernel"))
    for condition in entry.conditions:
        size = getattr(spec, condition.dim)
        if size % condition.multiple:
            found = f"needs a multiple of {condition.multiple} ({condition.source or 'a margin of ours'})"
            out.append(Refusal("shape.multiple", f"{condition.dim}={size}", found, "shard otherwise, or use another kernel"))
    if hasattr(spec, "schemes"):
        sizes = (spec.hidden, spec.hidden, spec.intermediate)[-len(spec.schemes) :]
        return (*out, *dict.fromkeys(_group_refusals(entry, spec.schemes, sizes)))
    return (*out, *_group_refusals(entry, (spec.weights,), (spec.k,)))
