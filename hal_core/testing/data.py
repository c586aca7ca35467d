"""Random canonical weights and inputs: outliers, negative and zero scales, extreme zero points, uneven tails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.canonical import QuantizedTensor
from hal_core.dtypes import torch_dtype
from hal_core.schemes import GranularityKind, WeightScheme, ZeroKind

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GENERATED", "GRANULARITIES", "random_input", "random_weight", "to_device"]

#: Element types that the kit can make weights of.
GENERATED = (
    "int2", "int3", "int4", "int5", "int6", "int7", "int8", "iq4_nl", "mxfp4", "nvfp4", "mxfp8",
    "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "bf16", "fp16", "fp32",
)  # fmt: skip
#: Granularities that the kit can make weights of.
GRANULARITIES = ("tensor", "channel", "group", "block", "superblock")
_FP8 = {
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "fp8_e4m3fnuz": torch.float8_e4m3fnuz, "mxfp8": torch.float8_e4m3fn,
}  # fmt: skip
#: Size of a typical code, for elements that are no plain integers.
_CODE = {"iq4_nl": 70.0, "mxfp4": 2.5, "nvfp4": 2.5}
#: Standard deviation of a weight's typical element, so that activations keep their size from layer to layer.
_SPREAD = 0.12


def random_weight(scheme: WeightScheme, shape: tuple[int, ...], rng: torch.Generator, scales: str = "fp16") -> QuantizedTensor:
    """A canonical weight ``[.., N, K]`` with scales, zero points and minima of every sign and some outliers."""
    n, k = shape[-2:]
    if not scheme.quantized:
        values = (torch.randn(shape, generator=rng) * _SPREAD).to(torch_dtype(scheme.dtype))
        return QuantizedTensor(scheme, shape, values)
    grid = (*shape[:-2], *_grid(scheme, n, k))
    parts: dict[str, Tensor | None] = dict(_superblock_factors(scheme, shape, rng))
    scale = _scales(scheme, grid, rng, levelled=bool(parts))
    if scheme.zero is ZeroKind.INTEGER:
        zeros = torch.randint(0, 1 << scheme.bits, grid, generator=rng).to(torch.uint8)
        zeros[torch.rand(grid, generator=rng) < 0.1] = 0
        parts["zeros"] = zeros
    if scheme.zero is ZeroKind.MINIMUM:
        size = _SPREAD / 30 if parts else _SPREAD
        parts["mins"] = (torch.randn(grid, generator=rng) * size).to(torch_dtype(scales))
    if scheme.act_order:
        parts["g_idx"] = _activation_order(shape, scheme.granularity.group or k, rng)
    if scheme.dtype == "nvfp4":
        parts["global_scale"] = torch.rand(shape[:-2], generator=rng) / 64 + 1 / 256
    return QuantizedTensor(scheme, shape, _values(scheme, shape, rng), _stored_scales(scheme, scale, scales), **parts)


def _values(scheme: WeightScheme, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    if scheme.dtype in _FP8:
        return torch.randn(shape, generator=rng).to(_FP8[scheme.dtype])
    return _integers(scheme, shape, rng)


def _scales(scheme: WeightScheme, grid: tuple[int, ...], rng: torch.Generator, *, levelled: bool) -> Tensor:
    code = _CODE.get(scheme.dtype) or (2.0 ** (scheme.bits - 1) * 0.6 if scheme.dtype.startswith("int") else 1.0)
    size = _SPREAD / code / (20 if levelled else 1)
    scale = torch.randn(grid, generator=rng) * size
    if scale.numel() <= 8:  # a single scale near zero would leave nothing to measure
        return torch.where(scale.abs() < size / 4, size, scale)
    scale[torch.rand(grid, generator=rng) < 0.02] *= 10
    scale[torch.rand(grid, generator=rng) < 0.01] = 0
    return scale


def _stored_scales(scheme: WeightScheme, scale: Tensor, dtype: str) -> Tensor:
    """In the type of the format: powers of two for mx elements, fp8 beside a global scale for nvfp4."""
    if scheme.dtype in {"mxfp4", "mxfp8"}:
        return scale.abs().clamp(min=2.0**-20).log2().round().add(127).to(torch.uint8)
    if scheme.dtype == "nvfp4":
        return (scale * 100).to(torch.float8_e4m3fn)
    return scale.to(torch_dtype(dtype))


def _superblock_factors(scheme: WeightScheme, shape: tuple[int, ...], rng: torch.Generator) -> dict[str, Tensor]:
    g = scheme.granularity
    if g.superblock is None or g.group is None:
        return {}
    grid = (*shape[:-1], -(-shape[-1] // g.group))
    factors = {"sub_scales": torch.randint(-32, 64, grid, generator=rng).to(torch.int8)}
    if scheme.zero is ZeroKind.MINIMUM:
        factors["sub_mins"] = torch.randint(0, 64, grid, generator=rng).to(torch.uint8)
    return factors


def _grid(scheme: WeightScheme, n: int, k: int) -> tuple[int, int]:
    g = scheme.granularity
    if g.group is not None:
        return n, -(-k // (g.superblock or g.group))
    if g.block is not None:
        return -(-n // g.block[0]), -(-k // g.block[1])
    return (n, 1) if g.kind is GranularityKind.CHANNEL else (1, 1)


def _integers(scheme: WeightScheme, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Stored codes; the 4-bit ones two to a byte, written here once more so that a fault of the packer is seen."""
    signed = scheme.zero is ZeroKind.NONE and scheme.dtype.startswith("int")
    low = -(1 << (scheme.bits - 1)) if signed else 0
    codes = torch.randint(low, low + (1 << scheme.bits), shape, generator=rng)
    if scheme.bits != 4:
        return codes.to(torch.int8 if signed else torch.uint8)
    codes = codes % 16
    if shape[-1] % 2:
        codes = torch.cat([codes, codes.new_zeros((*shape[:-1], 1))], dim=-1)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def _activation_order(shape: tuple[int, ...], group: int, rng: torch.Generator) -> Tensor:
    """Groups of full size in random order, for each matrix its own."""
    k, lead = shape[-1], shape[:-2]
    groups = torch.arange(k) // group
    count = 1
    for size in lead:
        count *= size
    orders = [groups[torch.randperm(k, generator=rng)] for _ in range(count)]
    return torch.stack(orders).reshape(*lead, k).to(torch.int32)


def random_input(shape: tuple[int, ...], rng: torch.Generator, dtype: str, *, outliers: bool) -> Tensor:
    """Activations; ``outliers`` puts in the few large elements that coarse quantization cannot hold."""
    x = torch.randn(shape, generator=rng)
    if outliers:
        x[torch.rand(shape, generator=rng) < 0.01] *= 15
    return x.to(torch_dtype(dtype))


def to_device(weight: QuantizedTensor, device: torch.device) -> QuantizedTensor:
    """The same weight there, in memory of its own."""
    parts = {name: tensor.to(device, copy=True) for name, tensor in weight.tensors().items()}
    return QuantizedTensor(weight.scheme, weight.shape, **parts)
