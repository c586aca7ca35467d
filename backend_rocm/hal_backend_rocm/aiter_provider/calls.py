"""Calls into AITER as data, resolved against the signature of the installed function before they are made.

AITER's functions gain and lose parameters between releases. Keywords alone are passed; those that a call declares optional may be
dropped where the installed function lacks them, and any other difference is an error that names it.
"""

from __future__ import annotations

import importlib
import inspect

from hal_core.calls import Bound, Call, resolve
from hal_core.errors import ContractError, MissingDependencyError

__all__ = ["NEWER", "bind", "signature_from"]

_FIX = "install a version of amd-aiter that this backend was made for"

#: Parameters of the source of August 2026, by our own reading; ``=`` marks those with a default. They stand in too where the installed
#: function hides its own behind ``**kwargs``.
NEWER = {
    "aiter.fused_moe.fused_moe": (
        "hidden_states w1 w2 topk_weight topk_ids expert_mask= activation= quant_type= doweight_stage1= w1_scale= w2_scale= a1_scale= "
        "a2_scale= block_size_M= num_local_tokens= moe_sorting_dispatch_policy= dtype= hidden_pad= intermediate_pad= bias1= bias2= "
        "splitk= swiglu_limit= beta= linear_beta= gate_mode= shared_w1= shared_w2= shared_w1_scale= shared_w2_scale= "
        "shared_expert_id= stage2_scatter="
    ),
    "aiter.ops.cache.reshape_and_cache": "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale= v_scale= asm_layout=",
    "aiter.ops.attention.paged_attention_rocm": (
        "out exp_sums max_logits tmp_out query key_cache value_cache num_kv_heads scale block_tables context_lens block_size "
        "max_context_len alibi_slopes kv_cache_dtype k_scale v_scale fp8_out_scale= partition_size= mtp= q_scale="
    ),
    "aiter.ops.gemm_op_a8w8.gemm_a8w8": "XQ WQ x_scale w_scale bias= dtype= splitK=",
    "aiter.ops.gemm_op_a8w8.gemm_a8w8_bpreshuffle": "XQ WQ x_scale w_scale bias= dtype= check=",
    "aiter.ops.gemm_op_a8w8.gemm_a8w8_blockscale": "XQ WQ x_scale w_scale dtype= isBpreshuffled=",
}


def signature_from(text: str) -> inspect.Signature:
    """The signature that a row of :data:`NEWER` writes."""
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    names = text.split()
    return inspect.Signature([inspect.Parameter(n.rstrip("="), kind, default=None if n.endswith("=") else empty) for n in names])


def bind(call: Call) -> Bound:
    """The installed function of ``call``.

    Raises:
        MissingDependencyError: AITER cannot be imported. ContractError: it has no such function, or another signature.
    """
    module, _, name = call.function.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise MissingDependencyError(call.function, f"{error}", "pip install --pre amd-aiter, on a machine with ROCm") from error
    if function is None:
        raise ContractError(call.function, f"{module} has no {name}", _FIX)
    signature = inspect.signature(function)
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        signature = signature_from(NEWER[call.function])
    return Bound(function, resolve(call, signature, _FIX))
