"""FlashInfer's entries for blocks of experts as data: function, keywords, what each serves and on which devices.

Of them CUTLASS's with bf16 and with fp8 blocks ran in this project's hands, on sm_90; the others need sm_100. Each call is bound against
the real signatures of the oldest and the newest version served.
"""

from __future__ import annotations

from dataclasses import dataclass

from hal_backend_cuda.providers.flashinfer import VERSIONS
from hal_core.calls import Call
from hal_core.kernel import SchemeSet
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.schemes import GranularityKind, ZeroKind

__all__ = ["ENTRIES", "QUANTIZERS", "Entry"]

_MOE = "flashinfer.fused_moe"
_BLACKWELL = ("sm_100", "sm_103")
_CUTLASS = ("input", "token_selected_experts", "token_final_scales", "fc1_expert_weights", "fc2_expert_weights", "output_dtype",
            "quant_scales", "output", "activation_type")  # fmt: skip
_ROUTED = ("topk_ids", "hidden_states", "gemm1_weights", "gemm2_weights", "num_experts", "top_k", "n_group", "topk_group",
           "intermediate_size", "local_expert_offset", "local_num_experts", "routed_scaling_factor", "routing_method_type")  # fmt: skip
_OAI = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
_BLOCK_SCALES = ("gemm1_weights_scale", "gemm2_weights_scale")
_OUTPUT_SCALES = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
#: Functions of FlashInfer that quantize activations for these entries.
QUANTIZERS = {
    "mxfp8": Call("flashinfer.mxfp8_quantize", ("input", "is_sf_swizzled_layout")),
    "nvfp4": Call("flashinfer.fp4_quantize", ("input", "global_scale", "sf_vec_size", "sf_use_ue8m0", "is_sf_swizzled_layout")),
}


@dataclass(frozen=True)
class Entry:
    """One kernel. form: which preparation of weights and arguments it takes, a key of ``moe_weights.FORMS``.

    tile: rows of an epilogue's tile, for shuffled weights; None for rows as they are. versions: of FlashInfer.
    """

    name: str
    call: Call
    form: str
    schemes: SchemeSet
    architectures: tuple[str, ...]
    quant: ActivationQuant | None = None
    activations: tuple[str, ...] = ("silu",)
    limits: bool = False
    bias: bool = False
    tile: int | None = None
    versions: str = VERSIONS

    @property
    def numerics(self) -> Numerics:
        return Numerics(activations=(self.quant,) if self.quant else ())


def _set(dtype: str, kind: GranularityKind, group: int = 1) -> SchemeSet:
    return SchemeSet(dtypes=(dtype,), granularities=(kind,), zeros=(ZeroKind.NONE,), act_order=False, group_multiple=group)


_CHANNEL, _GROUP, _BLOCK, _TENSOR = GranularityKind.CHANNEL, GranularityKind.GROUP, GranularityKind.BLOCK, GranularityKind.TENSOR
ENTRIES: tuple[Entry, ...] = (
    Entry("cutlass_bf16", Call(f"{_MOE}.cutlass_fused_moe", _CUTLASS), "cutlass_bf16", _set("bf16", _CHANNEL), ("sm_90", *_BLACKWELL)),
    Entry(
        "cutlass_fp8_block", Call(f"{_MOE}.cutlass_fused_moe", (*_CUTLASS, "use_deepseek_fp8_block_scale")), "cutlass_fp8_block",
        _set("fp8_e4m3", _BLOCK), ("sm_90",), ActivationQuant("fp8_e4m3", "g128"),
    ),
    Entry(
        "cutlass_mxfp4_mxfp8", Call(f"{_MOE}.cutlass_fused_moe", (*_CUTLASS, "input_sf", "use_mxfp8_act_scaling", "swizzled_input_sf")),
        "cutlass_mxfp4", _set("mxfp4", _GROUP, 32), _BLACKWELL, ActivationQuant("mxfp8", "g32"),
    ),
    Entry(
        "trtllm_bf16",
        Call(f"{_MOE}.trtllm_bf16_routed_moe",
             (*_ROUTED, "use_shuffled_weight", "weight_layout", "activation_type", "output"), ("output",)),
        "trtllm_bf16", _set("bf16", _CHANNEL), _BLACKWELL, tile=128,
    ),
    Entry(
        "trtllm_fp8_tensor",
        Call(f"{_MOE}.trtllm_fp8_per_tensor_scale_routed_moe",
             (*_ROUTED, "routing_bias", "output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar",
              "use_routing_scales_on_input", "activation_type", "output"), ("routing_bias",)),
        "trtllm_fp8_tensor", _set("fp8_e4m3", _TENSOR), _BLACKWELL, ActivationQuant("fp8_e4m3", "tensor", dynamic=False), tile=128,
        versions=">=0.7,<0.8",
    ),
    Entry(
        "trtllm_fp8_block",
        Call(f"{_MOE}.trtllm_fp8_block_scale_routed_moe",
             (*_ROUTED, *_BLOCK_SCALES, "routing_bias", "hidden_states_scale", "use_shuffled_weight", "weight_layout", "output")),
        "trtllm_fp8_block", _set("fp8_e4m3", _BLOCK), _BLACKWELL, ActivationQuant("fp8_e4m3", "g128"),
    ),
    Entry(
        "trtllm_nvfp4",
        Call(f"{_MOE}.trtllm_fp4_block_scale_routed_moe",
             (*_ROUTED, *_BLOCK_SCALES, *_OAI, *_OUTPUT_SCALES, "routing_bias", "hidden_states_scale", "gemm1_bias", "gemm2_bias",
              "activation_type", "output")),
        "trtllm_nvfp4", _set("nvfp4", _GROUP, 16), _BLACKWELL, ActivationQuant("nvfp4", "g16", dynamic=False), tile=128,
    ),
    Entry(
        "trtllm_mxfp4",
        Call(f"{_MOE}.trtllm_fp4_block_scale_routed_moe",
             (*_ROUTED, *_BLOCK_SCALES, *_OAI, *_OUTPUT_SCALES, "routing_bias", "hidden_states_scale", "gemm1_bias", "gemm2_bias",
              "activation_type", "output")),
        "trtllm_mxfp4", _set("mxfp4", _GROUP, 32), _BLACKWELL, activations=("silu", "swiglu_oai"), limits=True, bias=True, tile=128,
    ),
    Entry(
        "trtllm_mxint4",
        Call(f"{_MOE}.trtllm_mxint4_block_scale_routed_moe", (*_ROUTED, *_BLOCK_SCALES, *_OAI, "output")),
        "trtllm_mxint4", _set("int4", _GROUP, 32), _BLACKWELL, activations=("silu", "swiglu_oai"), limits=True, tile=128,
    ),
)  # fmt: skip
