"""What FlashInfer's entries for experts compute, from their documentation, in float32 on the host: from a call's own arguments.

Layouts are undone by the inverses that test_flashinfer_layouts.py holds to be inverses of FlashInfer's own functions.
"""

from __future__ import annotations

import torch
from hal_backend_cuda.providers.flashinfer.moe_layouts import deinterleaved, first_rows, inverse, shuffle_order, unblocked

from hal_core.canonical import unpack_nibbles
from hal_core.codebooks import codebook

MXINT4, NVFP4, MXFP4 = "trtllm_mxint4", "trtllm_nvfp4", "trtllm_mxfp4"


def four_bits(packed, kind):
    codes = unpack_nibbles(packed, packed.shape[-1] * 2)
    if kind == "int":
        return ((codes ^ 8).to(torch.int16) - 8).float()
    return codebook("mxfp4", packed.device)[codes.int()].float()


def spread(scales, group, columns):
    return scales.repeat_interleave(group, dim=-1)[..., :columns]


def e8m0(bytes_):
    return torch.exp2(bytes_.view(torch.uint8).float() - 127)


def rows_back(matrix, *, first):
    rows = matrix.shape[1]
    order = first_rows(rows, 128, gated=True) if first else shuffle_order(rows, 128)
    return matrix[:, inverse(order)]


def matrices(form, a):
    """Both products' weights in float32, up before gate, without the factors of outputs."""
    one, two = (
        (a["fc1_expert_weights"], a["fc2_expert_weights"]) if form.startswith("cutlass") else (a["gemm1_weights"], a["gemm2_weights"])
    )
    if form == "cutlass_bf16":
        return one.float(), two.float()
    if form in {"cutlass_fp8_block", "trtllm_fp8_block"}:
        scales = a["quant_scales"] if form.startswith("cutlass") else [a["gemm1_weights_scale"], a["gemm2_weights_scale"]]
        return tuple(
            m.float() * s.repeat_interleave(128, -2)[:, : m.shape[1]].repeat_interleave(128, -1)[..., : m.shape[2]]
            for m, s in zip((one, two), scales, strict=True)
        )
    if form == "trtllm_bf16":
        assert (a["use_shuffled_weight"], a["weight_layout"]) == (True, 2)
        return tuple(rows_back(unblocked(m), first=f).float() for m, f in ((one, True), (two, False)))
    if form == "trtllm_fp8_tensor":
        return tuple(rows_back(m, first=f).float() for m, f in ((one, True), (two, False)))
    return blocks(form, a, one, two)


def blocks(form, a, one, two):
    if form == "cutlass_mxfp4":
        first_scale, ones, second_scale, more = a["quant_scales"]
        assert bool((ones == 1).all() and (more == 1).all())
        one, two = one.view(torch.uint8), two.view(torch.uint8)
        scales = [first_scale.view(torch.uint8), second_scale.view(torch.uint8)]
    else:
        scales = [a["gemm1_weights_scale"], a["gemm2_weights_scale"]]
    if form == MXINT4:
        one, two = unblocked(one), unblocked(two)
    group = 16 if form == NVFP4 else 32
    out = []
    for matrix, scale, first in ((one, scales[0], True), (two, scales[1], False)):
        values = four_bits(matrix, "int" if form == MXINT4 else "float")
        factors = deinterleaved(scale, matrix.shape[1], values.shape[-1] // group)
        factors = factors.float() if form in {MXINT4, NVFP4} else e8m0(factors)
        if form != "cutlass_mxfp4":
            values, factors = rows_back(values, first=first), rows_back(factors, first=first)
        out.append(values * spread(factors, group, values.shape[-1]))
    return tuple(out)


def inputs(form, a):
    if form == "cutlass_mxfp4":
        assert a["use_mxfp8_act_scaling"]
        assert not a["swizzled_input_sf"]
        return a["input"].float() * spread(e8m0(a["input_sf"]), 32, a["input"].shape[1])
    if form.startswith("cutlass"):
        return a["input"].float()
    x, scale = a["hidden_states"], a.get("hidden_states_scale")
    if form == "trtllm_fp8_block":
        return x.float() * spread(scale.T, 128, x.shape[1])
    if form == NVFP4:
        return four_bits(x, "float") * spread(scale.float(), 16, x.shape[1] * 2)
    return x.float()


def routes(form, a):
    if form.startswith("cutlass"):
        return a["token_selected_experts"].long(), a["token_final_scales"]
    packed = a["topk_ids"]
    return (packed >> 16).long(), (packed & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()


def factor(a, names, experts):
    found = next((a[name] for name in names if a.get(name) is not None), None)
    return torch.ones(experts) if found is None else found.float()


def emulated(form):
    """A function that takes the entry's arguments and gives its result."""

    def run(**a):
        one, two = matrices(form, a)
        x, (ids, weights) = inputs(form, a), routes(form, a)
        experts, half = one.shape[0], one.shape[1] // 2
        assert a["activation_type"] == 3 if "activation_type" in a else True
        gate_factor = factor(a, ("output1_scales_gate_scalar", "output1_scale_gate_scalar"), experts)
        up_factor = factor(a, ("output1_scales_scalar", "output1_scale_scalar"), experts)
        down_factor = factor(a, ("output2_scales_scalar", "output2_scale_scalar"), experts)
        out = torch.zeros(x.shape[0], two.shape[1])
        for e in range(experts):
            token, slot = torch.where(ids == e)
            y = x[token] @ one[e].T
            up, gate = y[:, :half] * up_factor[e], y[:, half:] * gate_factor[e]
            if a.get("gemm1_bias") is not None:
                bias = rows_back(a["gemm1_bias"].unsqueeze(-1), first=True)[e, :, 0]
                up, gate = up + bias[:half], gate + bias[half:]
            if a.get("gemm1_clamp_limit") is not None:
                limit = a["gemm1_clamp_limit"][e]
                up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
            alpha = 1.0 if a.get("gemm1_alpha") is None else a["gemm1_alpha"][e]
            beta = 0.0 if a.get("gemm1_beta") is None else a["gemm1_beta"][e]
            z = ((up + beta) * gate * torch.sigmoid(alpha * gate)) @ two[e].T * down_factor[e]
            if a.get("gemm2_bias") is not None:
                z = z + rows_back(a["gemm2_bias"].unsqueeze(-1), first=False)[e, :, 0]
            out.index_add_(0, token, z * weights[token, slot, None])
        if a.get("output") is not None:
            a["output"].copy_(out)
            return [a["output"]]
        return out.to(torch.bfloat16)

    return run
