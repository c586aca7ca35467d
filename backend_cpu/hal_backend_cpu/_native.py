"""Loads the native library and gives its ops, ``torch.ops.hal_cpu.*``, their fake kernels.

Packed layout ``cpu.tile16``: outputs are padded to whole tiles of 16. Codes are int32
``[..., ceil(n/16), ceil(k/8), 16]`` for 4 bits and ``[..., ceil(n/16), ceil(k/4), 16]`` for 8;
scales, zeros and mins are ``[..., ceil(n/16), G, 16]`` in their own dtype. What pads is zero.
"""

from __future__ import annotations

from pathlib import Path

import torch

TILE = 16
#: Each has exact kernels; ``avx512vnni`` and ``amx`` those of a level below.
ISA_LEVELS = ("avx2", "avx512", "avx512vnni", "avx512bf16", "amx")
#: What ``avx512vnni:`` and ``amx:`` do to activations; ``amx:`` also knows ``rescaled`` (with weights) and ``bf16``. The level
#: ``emulated`` is amx on plain memory, for tests.
INT8_WAYS = ("token", "group")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2")

_LIBRARY = Path(__file__).with_name("_hal_backend_cpu.so")


def _load() -> None:
    try:
        torch.ops.load_library(str(_LIBRARY))
    except OSError as error:
        raise ImportError(
            f"{_LIBRARY.name} does not load with torch {torch.__version__}; it needs torch >= 2.11 on x86-64 Linux: {error}"
        ) from error


_load()
ops = torch.ops.hal_cpu


def usable_isa() -> str:
    """Highest of ISA_LEVELS that this process may use, lowered by HAL_CPU_ISA; "none" without AVX2."""
    return ops.usable_isa()


def preferred_isa() -> str:
    """The usable level that is fastest here, which "auto" means."""
    return ops.preferred_isa()


def int8_levels() -> tuple[str, ...]:
    """The levels that take int8 activations and that this process may use."""
    usable = usable_isa()
    at = ISA_LEVELS.index(usable) if usable in ISA_LEVELS else -1
    return tuple(level for level in ("avx512vnni", "amx") if ISA_LEVELS.index(level) <= at)


def packed_shape(n: int, k: int, bits: int) -> tuple[int, int, int]:
    """Shape of the packed codes of one [n, k] matrix."""
    return (_div_up(n, TILE), _div_up(k, 32 // bits), TILE)


def groups_shape(n: int, groups: int) -> tuple[int, int, int]:
    """Shape of the packed scales, zeros or mins of one matrix with that many groups."""
    return (_div_up(n, TILE), groups, TILE)


def pack(values: torch.Tensor, k: int, bits: int) -> torch.Tensor:
    """Canonical values [..., N, ceil(k*bits/8)] (uint8, or int8 for 8 bits) to packed codes."""
    return ops.pack(values.contiguous(), k, bits)


def unpack(packed: torch.Tensor, n: int, k: int, bits: int, *, signed: bool = False) -> torch.Tensor:
    """The exact inverse of `pack`; ``signed`` returns 8-bit values as int8."""
    return ops.unpack(packed.contiguous(), n, k, bits, signed)


def pack_groups(groups: torch.Tensor) -> torch.Tensor:
    """Scales, zeros or mins [..., N, G] to tiles; uint8, fp16, bf16 or fp32, bits unchanged."""
    return ops.pack_groups(groups.contiguous())


def unpack_groups(groups: torch.Tensor, n: int) -> torch.Tensor:
    """The exact inverse of `pack_groups`."""
    return ops.unpack_groups(groups.contiguous(), n)


def join(parts: list[torch.Tensor]) -> torch.Tensor:
    """Packed tensors [tiles, ...] of matrices that differ in their number of outputs, one behind the other."""
    return ops.join(parts)


def unpack_words(words: torch.Tensor, order: str, bits: int, count: int, *, signed: bool = False, isa: str = "auto") -> torch.Tensor:
    """A checkpoint's packed int32 words to canonical values, as ``hal_core.formats.unpack.torch_codes``; isa: plain, avx2 or auto."""
    return ops.unpack_words(words, order, bits, count, signed, isa)


def turn(matrix: torch.Tensor, isa: str = "auto") -> torch.Tensor:
    """[R, C] of elements of 1, 2 or 4 bytes to a contiguous [C, R]."""
    return ops.turn(matrix, isa)


def _div_up(a: int, b: int) -> int:
    return -(-a // b)


@torch.library.register_fake("hal_cpu::pack")
def _(values, k, bits):
    lead, n = values.shape[:-2], values.shape[-2]
    return values.new_empty((*lead, *packed_shape(n, k, bits)), dtype=torch.int32)


@torch.library.register_fake("hal_cpu::unpack")
def _(packed, n, k, bits, signed):
    width = _div_up(k, 2) if bits == 4 else k
    dtype = torch.int8 if signed else torch.uint8
    return packed.new_empty((*packed.shape[:-3], n, width), dtype=dtype)


@torch.library.register_fake("hal_cpu::pack_groups")
def _(groups):
    lead, (n, count) = groups.shape[:-2], groups.shape[-2:]
    return groups.new_empty((*lead, *groups_shape(n, count)))


@torch.library.register_fake("hal_cpu::unpack_groups")
def _(groups, n):
    return groups.new_empty((*groups.shape[:-3], n, groups.shape[-2]))


@torch.library.register_fake("hal_cpu::join")
def _(parts):
    return torch.empty_like(torch.cat(parts))


@torch.library.register_fake("hal_cpu::unpack_words")
def _(words, order, bits, count, signed, isa):
    n = words.shape[0] if order == "rows" else words.shape[1] * (8 if order == "awq" else 1)
    dtype = torch.int8 if signed and bits != 4 else torch.uint8
    return words.new_empty((n, _div_up(count, 2) if bits == 4 else count), dtype=dtype)


@torch.library.register_fake("hal_cpu::turn")
def _(matrix, isa):
    return matrix.new_empty((matrix.shape[1], matrix.shape[0]))


@torch.library.register_fake("hal_cpu::linear")
def _(x, packed, scales, zeros, mins, perm, bias, n, k, group, bits, isa):
    return x.new_empty((*x.shape[:-1], n))


@torch.library.register_fake("hal_cpu::linear_out")
def _(x, packed, scales, zeros, mins, perm, bias, n, k, group, bits, isa, out):
    return None


@torch.library.register_fake("hal_cpu::lookup")
def _(ids, packed, scales, zeros, mins, perm, n, k, group, bits, dtype):
    return ids.new_empty((*ids.shape, k), dtype=dtype)


@torch.library.register_fake("hal_cpu::attention")
@torch.library.register_fake("hal_cpu::mlp")
def _(x, *args):
    return torch.empty_like(x)


@torch.library.register_fake("hal_cpu::moe")
def _(x, topk_ids, *args):
    # `reduce` is the last argument but one; the thirty before it do not shape the result.
    reduce = args[-2]
    return x.new_empty(x.shape if reduce else (*topk_ids.shape, x.shape[1]))


@torch.library.register_fake("hal_cpu::moe_out")
def _(*args):
    return None
