"""Int8 activations as the native levels make them, in float64, and whole experts of a real size."""

from __future__ import annotations

import itertools

import torch
from cpu.native_cases import USABLE, Matrix, make
from cpu.native_moe import Experts
from torch import Tensor
from torch.nn.functional import silu

from hal_backend_cpu import _native

#: Levels of int8 activations that this machine has, and matrix tiles on plain memory.
LEVELS = (*_native.int8_levels(), *(["emulated"] if "avx512bf16" in USABLE else []))
WORDS = [f"{level}:{way}" for level, way in itertools.product(LEVELS, _native.INT8_WAYS)]
TILES = [level for level in LEVELS if level != "avx512vnni"]


def span_of(word: str, m: Matrix) -> int:
    """k of one activation scale."""
    if word.endswith(":token"):
        return m.k
    return 128 if m.group >= m.k or (m.group > 128 and m.group % 128 == 0) else m.group


def quantized(x: Tensor, span: int) -> Tensor:
    """float64 values of the codes."""
    parts = []
    for part in x.double().split(span, dim=-1):
        step = part.abs().amax(-1, keepdim=True) / 127
        step = torch.where(step > 0, step, 1.0)
        parts.append((part / step).round() * step)
    return torch.cat(parts, -1)


def decibels(found: Tensor, truth: Tensor) -> float:
    """Signal to noise."""
    return float(-20 * torch.log10((found.double() - truth.double()).norm() / truth.double().norm()))


def gaussian_experts(experts: int, hidden: int, inner: int, group: int) -> Experts:
    """Normal weights rounded to symmetric int4 groups, as a quantizer of checkpoints leaves them."""
    return Experts(*(_gaussian(experts, n, k, group, i) for i, (n, k) in enumerate(((inner, hidden), (inner, hidden), (hidden, inner)))))


def _gaussian(experts: int, n: int, k: int, group: int, seed: int) -> Matrix:
    m = make(n, k, group, 4, lead=(experts,), seed=seed)
    w = torch.randn(experts, n, k // group, group, generator=torch.Generator().manual_seed(seed)) / k**0.5
    m.scales = (w.abs().amax(-1) / 7).to(torch.bfloat16)
    codes = (w / m.scales.float()[..., None]).round().clamp(-8, 7).reshape(experts, n, k).to(torch.int64)
    m.codes = codes & 15
    m.values = (m.codes[..., 0::2] | m.codes[..., 1::2] << 4).to(torch.uint8)
    return m


def float_experts(block: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The block in float32 from dequantized weights, SiLU and gated."""
    gate, up, down = (m.weight(torch.float32) for m in (block.gate, block.up, block.down))
    out = torch.zeros(x.shape[0], block.down.n)
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        h = silu(x[token].float() @ gate[e].T) * (x[token].float() @ up[e].T)
        out.index_add_(0, token, (h @ down[e].T) * weights[token, slot, None])
    return out
