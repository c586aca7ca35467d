"""The libraries' functions on the host, with the published parameters: they show what arguments mean, not that the libraries are right.

Ops of vllm-xpu-kernels are defined by the schemas of its wheel, and 4-bit experts converted by its own source.
"""

from __future__ import annotations

import sys
import types

import provider_wheels
import pytest
import torch

_TABLE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
E4M3 = torch.float8_e4m3fn


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """int64 codes 0..15 of bytes or words along the last dimension, the lowest first."""
    octets = words.contiguous().view(torch.uint8).long()
    return torch.stack([octets & 15, octets >> 4], -1).flatten(-2)


def signed(codes: torch.Tensor) -> torch.Tensor:
    return torch.where(codes >= 8, codes - 16, codes)


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    rows, columns = shape[-2] // scales.shape[-2], shape[-1] // scales.shape[-1]
    return scales.double().repeat_interleave(rows, -2).repeat_interleave(columns, -1)


def activated(kind: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    forms = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
    return forms[kind](gate) * up


class XpuFusedMoe:
    """Experts of vllm-xpu-kernels; the recipe is told by types, as there."""

    def __init__(
        self, w13, w13_scales, w13_bias, w2, w2_scales, w2_bias, n_experts_per_token, activation, num_experts, ep_rank=0, ep_size=1,
        expert_map=None, gemm1_clamp_limit=None, activation_situ_beta=None, activation_situ_linear_beta=None,
    ):  # fmt: skip
        assert w13.is_contiguous()
        assert w2.is_contiguous()
        if w13.dtype == torch.uint8:
            own = provider_wheels.VLLM.executed("vllm_xpu_kernels.fused_moe_interface.implement_zp", torch=torch)
            w13.data, w2.data = own(w13).to(torch.int8), own(w2).to(torch.int8)
        self.w13, self.w2, self.gemm1_wei_scales, self.gemm2_wei_scales = w13, w2, w13_scales, w2_scales
        self.kind, self.clamp, self.top_k = activation, gemm1_clamp_limit, n_experts_per_token

    @staticmethod
    def wide(weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """float64 ``[E, N, K]``."""
        if weight.dtype == torch.int8:
            codes = signed(nibbles(weight)).double()
            return codes * spread(scales, codes.shape)
        if weight.dtype == torch.float4_e2m1fn_x2:
            codes = nibbles(weight.view(torch.uint8))
            assert scales.dtype == torch.uint8
            values = torch.where(codes >= 8, -1, 1) * _TABLE[codes & 7]
            return values * spread(2.0 ** (scales.double() - 127), codes.shape)
        plain = weight.double()
        if scales is not None:
            assert scales.dtype == torch.float32
            assert scales.dim() == 3
            plain = plain * spread(scales, plain.shape)
        return plain.transpose(1, 2)

    def apply(self, output, hidden_states, topk_weights, topk_ids, expert_map=None, a1q_scale=None):
        assert topk_weights.dtype == torch.float32
        assert topk_ids.dtype == torch.int32
        assert topk_ids.shape == topk_weights.shape == (hidden_states.shape[0], self.top_k)
        first, second = self.wide(self.w13, self.gemm1_wei_scales), self.wide(self.w2, self.gemm2_wei_scales)
        total = torch.zeros(output.shape, dtype=torch.float64)
        for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weights.tolist(), strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                gate, up = (first[expert] @ hidden_states[token].double()).chunk(2)
                if self.clamp is not None:
                    gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
                total[token] += weight * (second[expert] @ activated(self.kind, gate, up))
        output.copy_(total)


def ark_moe(
    activations, weights, num_tokens_per_expert, *, scales=None, zeros=None, weight_bits=4, group_size=128, asym=False, phase="auto",
    decode_threshold=None,
):  # fmt: skip
    assert weights.shape[1] % 16 == 0
    assert scales.dtype == activations.dtype
    assert num_tokens_per_expert.dtype == torch.int32
    assert scales.shape == (weights.shape[0], weights.shape[1], activations.shape[1] // group_size)
    assert (zeros is not None) == asym
    if weights.dtype == E4M3:
        codes = weights.double()
    elif weight_bits == 4:
        codes = nibbles(weights) if asym else signed(nibbles(weights))
    else:
        codes = weights if asym else weights.view(torch.int8)
    codes = codes.double()
    if asym:
        codes = codes - spread(zeros, codes.shape)
    wide = codes * spread(scales, codes.shape)
    which = torch.arange(weights.shape[0]).repeat_interleave(num_tokens_per_expert)
    assert which.numel() == activations.shape[0]
    return torch.einsum("mnk,mk->mn", wide[which], activations.double()).to(activations.dtype)


def repack_core(QB, scaleB, zp, groupsize, compute_type, weight_type, scale_type, asym):
    """A blob that the product below can read; the library's own is another."""
    assert not asym
    assert QB.dtype == torch.int8
    assert scaleB.shape == (QB.shape[0] // groupsize, QB.shape[1])
    return torch.cat([QB.flatten(), scaleB.flatten().view(torch.int8)])


def repack(*args, **kwargs):
    return repack_core(**kwargs)


def woqgemm(A, B, bias, n, k, groupsize, compute_type, weight_type, scale_type, asym, out=None):
    codes, scales = B[: n * k].view(k, n).double(), B[n * k :].view(torch.float16).view(-1, n)
    y = A.double() @ (codes * scales.double().repeat_interleave(groupsize, 0))
    return (y + bias.double() if bias.numel() else y).to(A.dtype)


def int4_gemm_w4a16(A, B, bias, B_scale, B_zp, group_size, g_idx):
    codes = nibbles(B.t()).t()
    zero = torch.full_like(B_scale, float(B_zp)) if B_zp.dtype == torch.int8 else nibbles(B_zp)
    wide = (codes - zero.repeat_interleave(group_size, 0)) * B_scale.double().repeat_interleave(group_size, 0)
    y = A.double() @ wide
    return (y if bias is None else y + bias.double()).to(torch.float16)


def _fp8(A, A_scale, B, B_scale):
    scale = B_scale.double()
    if B_scale.shape == (B.shape[1], 1):
        scale = scale.t()
    wide = B.double() * (spread(scale, B.shape) if scale.dim() == 2 else scale)
    x = A.double() if A_scale is None else A.double() * A_scale.double().repeat_interleave(A.shape[1] // A_scale.shape[1], 1)
    return x @ wide


def fp8_gemm_w8a16(A, B, B_scale_, bias_):
    y = _fp8(A, None, B, B_scale_)
    return (y if bias_ is None else y + bias_.double()).to(A.dtype)


def fp8_gemm(A, B, out_dtype, A_scale_, B_scale_, bias_):
    assert A.dtype == E4M3
    y = _fp8(A, A_scale_, B, B_scale_)
    return (y if bias_ is None else y + bias_.double()).to(out_dtype)


def per_token(result, input, scale, scale_ub):  # noqa: A002 - the schema's own name
    scale.copy_(input.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448)
    result.copy_((input.float() / scale).clamp(-448, 448).to(E4M3))


def per_group(
    input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0, dummy_is_scale_transposed, dummy_is_tma_aligned,  # noqa: A002
):  # fmt: skip
    groups = input.float().view(input.shape[0], -1, group_size)
    output_s.copy_(groups.abs().amax(-1).clamp(min=eps) / fp8_max)
    output_q.copy_((groups / output_s[..., None]).clamp(fp8_min, fp8_max).view_as(input).to(E4M3))


def scaled_mm(
    mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a=None, swizzle_b=None, bias=None,
    output_dtype=torch.bfloat16, contraction_dim=(), use_fast_accum=False,
):  # fmt: skip
    """torch's recipes on an XPU: row-major scales, of which the last block may be smaller."""
    (m, k), n = mat_a.shape, mat_b.shape[1]
    assert mat_a.is_contiguous()
    assert mat_b.t().is_contiguous()
    recipes, kinds = (scale_recipe_a, scale_recipe_b), torch.nn.functional.ScalingType
    assert (scale_a.dtype, scale_b.dtype) == (torch.float32, torch.float32)
    assert scale_b.is_contiguous()
    if recipes == (kinds.RowWise, kinds.RowWise):
        assert (scale_a.shape, scale_b.shape) == ((m, 1), (1, n))
        left, right = scale_a.double(), scale_b.double()
    else:
        assert recipes == (kinds.BlockWise1x128, kinds.BlockWise128x128)
        assert (scale_a.shape, scale_b.shape) == ((m, -(-k // 128)), (-(-k // 128), -(-n // 128)))
        left = scale_a.double().repeat_interleave(128, 1)[:, :k]
        right = scale_b.double().repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    y = (mat_a.double() * left) @ (mat_b.double() * right)
    return (y if bias is None else y + bias.double()).to(output_dtype)


_OPS = {
    "torch.ops._xpu_C.int4_gemm_w4a16": int4_gemm_w4a16, "torch.ops._xpu_C.fp8_gemm_w8a16": fp8_gemm_w8a16,
    "torch.ops._xpu_C.fp8_gemm": fp8_gemm, "torch.ops._C.dynamic_per_token_scaled_fp8_quant": per_token,
    "torch.ops._C.per_token_group_fp8_quant": per_group,
}  # fmt: skip


@pytest.fixture
def libraries(monkeypatch):
    """Both libraries, installed for one test."""
    kept = []
    for path, function in _OPS.items():
        _, _, space, name = path.split(".")
        library = torch.library.Library(space, "FRAGMENT")
        library.define(provider_wheels.schema(path))
        library.impl(name, function, "CompositeExplicitAutograd")
        kept.append(library)
    ark = types.ModuleType("auto_round_kernel")
    ark.moe, ark.woqgemm, ark.repack_quantized_weight, ark._repack_quantized_weight_core = ark_moe, woqgemm, repack, repack_core
    fused = types.ModuleType("vllm_xpu_kernels.fused_moe_interface")
    fused.XpuFusedMoe = XpuFusedMoe
    parts = {name: types.ModuleType(name) for name in ("vllm_xpu_kernels", *(f"vllm_xpu_kernels.{n}" for n in ("_C", "_moe_C", "_xpu_C")))}
    for name, module in {**parts, "vllm_xpu_kernels.fused_moe_interface": fused, "auto_round_kernel": ark}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    yield
    for library in kept:
        library._destroy()
