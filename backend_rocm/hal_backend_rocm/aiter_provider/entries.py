"""AITER's entries as data: the function, what it serves, and the conditions under which it does. Nothing here imports AITER.

Each condition names the line of amd-aiter 0.1.7.post2.dev18 that it comes from; ``csrc`` and ``hsa`` are folders of its aiter_meta.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_backend_rocm.aiter_provider import VERSIONS
from hal_backend_rocm.targets import PRODUCTS
from hal_core.calls import Call
from hal_core.kernel import SchemeSet
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.refusal import Refusal
from hal_core.schemes import GranularityKind, ZeroKind
from hal_core.spec import Activation, MoESpec

if TYPE_CHECKING:
    from hal_core.spec import LinearSpec

__all__ = ["LINEARS", "MOES", "Condition", "Entry", "entry_refusals"]

_GEMM = "aiter.ops.gemm_op_a8w8"
_CDNA3 = ("gfx942", "gfx950")
_SHUFFLE = "aiter/ops/shuffle.py:17-18"


@dataclass(frozen=True)
class Condition:
    """A dimension of the spec that must be a multiple. source: where AITER says so, or "" where the margin is ours."""

    dim: str
    multiple: int
    source: str


@dataclass(frozen=True)
class Entry:
    """One kernel.

    targets: architectures, with the line that limits them where there is one. versions: of AITER, where not all that are known.
    quant_type: AITER's word for its scales, for experts. activation: with the numbers that AITER fixes, and the line where it does.
    form: how weights lie: ``plain``, in AITER's ``tiles``, ``int4`` words of them, ``mxfp4`` bytes in tiles, or ``mxfp4_striped``, the
    same with gate and up by turns. pad: hidden and intermediate are widened to a multiple, with zeros.
    """

    name: str
    call: Call
    schemes: SchemeSet
    targets: tuple[str, ...]
    conditions: tuple[Condition, ...]
    quant_type: str = ""
    quant: ActivationQuant | None = None
    form: str = "tiles"
    target_source: str = ""
    activation: Activation = Activation("silu")
    activation_source: str = ""
    bias: bool = False
    pad: int = 1
    versions: str = VERSIONS

    @property
    def numerics(self) -> Numerics:
        return Numerics((self.quant,) if self.quant else ())

    @property
    def fp8(self) -> bool:
        return self.schemes.dtypes == ("fp8_e4m3",)

    @property
    def shuffled(self) -> bool:
        """What AITER is told of the weights; it looks only where both orders are served, which int4 is not."""
        return self.form not in {"plain", "int4"}

    def padded(self, size: int) -> int:
        """A size of the packed weights."""
        return -(-size // self.pad) * self.pad


def _set(dtype: str, kind: GranularityKind) -> SchemeSet:
    return SchemeSet((dtype,), (kind,), (ZeroKind.NONE,), act_order=False)


def _moe(*more: str) -> Call:
    given = ("hidden_states", "w1", "w2", "topk_weight", "topk_ids", "expert_mask", "activation", "quant_type", *more, "dtype")
    return Call("aiter.fused_moe.fused_moe", (*given, "hidden_pad", "intermediate_pad"), ("hidden_pad", "intermediate_pad"))


_CHANNEL, _BLOCK, _GROUP = GranularityKind.CHANNEL, GranularityKind.BLOCK, GranularityKind.GROUP
_MXFP4 = SchemeSet(("mxfp4",), (_GROUP,), (ZeroKind.NONE,), act_order=False, group_multiple=32)
_CK4 = "csrc/ck_gemm_moe_2stages_codegen/gemm_moe_ck2stages_common.py"
_SCALED = PRODUCTS["mxfp4", "gfx942"].why
_SWIGLU = "3rdparty/composable_kernel/include/ck_tile/ops/flatmm/kernel/moe_flatmm_kernel.hpp:155"
_TOKENS, _GROUPS = ActivationQuant("fp8_e4m3", "token"), ActivationQuant("fp8_e4m3", "g128")
_STAGE1 = "csrc/py_itfs_cu/asm_moe_2stage.cu:187, hsa/*/fmoe_2stages/*.csv tile_n"
_SCALES = ("w1_scale", "w2_scale")
_LINEAR = ("XQ", "WQ", "x_scale", "w_scale", "dtype")

MOES = (
    Entry(
        "bf16", _moe(), _set("bf16", _CHANNEL), _CDNA3,
        (Condition("hidden", 32, _SHUFFLE), Condition("intermediate", 32, _SHUFFLE)), "No",
    ),
    Entry(
        "fp8_ptpc", _moe(*_SCALES), _set("fp8_e4m3", _CHANNEL), _CDNA3,
        (Condition("hidden", 32, _SHUFFLE), Condition("intermediate", 128, _STAGE1)), "per_Token", _TOKENS,
    ),
    Entry(
        "fp8_block", _moe(*_SCALES), _set("fp8_e4m3", _BLOCK), _CDNA3,
        (Condition("hidden", 128, "aiter/fused_moe.py:385-390"), Condition("intermediate", 128, _STAGE1)), "per_128x128", _GROUPS,
    ),
    Entry(
        "int8", _moe(*_SCALES), _set("int8", _CHANNEL), ("gfx942",),
        (Condition("hidden", 32, _SHUFFLE), Condition("intermediate", 128, "csrc/py_itfs_cu/asm_fmoe.cu:277, 300")),
        "per_Token", ActivationQuant("int8", "token"), target_source="aiter/fused_moe.py:459 has int8 for gfx942 alone",
    ),
    Entry(
        "int4_fp8", _moe(*_SCALES), _set("int4", _CHANNEL), _CDNA3,
        (Condition("hidden", 128, f"{_CK4}:183-186"), Condition("intermediate", 128, f"{_CK4}:277-280")), "per_Token", _TOKENS, "int4",
    ),
    # Kernels find a row's scales by K alone, and scales lie in tiles of 8 groups of 32: widths are multiples of 256.
    Entry(
        "mxfp4", _moe(*_SCALES), _MXFP4, ("gfx950",), (), "per_1x32", ActivationQuant("mxfp4", "g32"), "mxfp4", pad=256,
        target_source=_SCALED,
    ),
    # Newer sources quantize the inputs of large batches, so that only the release is known to be exact.
    Entry(
        "mxfp4_bf16", _moe(*_SCALES, "bias1", "bias2"), _MXFP4, ("gfx950",), (), "per_1x32", None, "mxfp4_striped", pad=256, bias=True,
        activation=Activation("swiglu_oai", 1.702, 7.0), activation_source=_SWIGLU, versions=">=0.1.7.dev0,<0.1.8",
        target_source=_SCALED,
    ),
)  # fmt: skip
LINEARS = (
    Entry(
        "a8w8_int8", Call(f"{_GEMM}.gemm_a8w8", _LINEAR), _set("int8", _CHANNEL), _CDNA3,
        (Condition("n", 16, ""), Condition("k", 16, "")), quant=ActivationQuant("int8", "token"), form="plain",
    ),
    Entry(
        "a8w8_fp8", Call(f"{_GEMM}.gemm_a8w8_bpreshuffle", _LINEAR), _set("fp8_e4m3", _CHANNEL), _CDNA3,
        (Condition("n", 16, _SHUFFLE), Condition("k", 32, _SHUFFLE)), quant=_TOKENS,
    ),
    Entry(
        "a8w8_fp8_block", Call(f"{_GEMM}.gemm_a8w8_blockscale", _LINEAR), _set("fp8_e4m3", _BLOCK), _CDNA3,
        (Condition("n", 128, ""), Condition("k", 128, "")), quant=_GROUPS, form="plain",
    ),
)  # fmt: skip


def entry_refusals(entry: Entry, spec: LinearSpec | MoESpec, target: str) -> tuple[Refusal, ...]:
    """Why AITER's function cannot serve ``spec`` on one architecture.

    Selection asks this, and preparation asks it again before weights are converted: what is converted is what is called.
    """
    out = []
    if target not in entry.targets:
        because = f" ({entry.target_source})" if entry.target_source else ""
        found = f"{target}; serves {', '.join(entry.targets)}{because}"
        out.append(Refusal("device.arch", f"AITER's {entry.name}", found, "use the Triton kernels"))
    for condition in entry.conditions:
        size = getattr(spec, condition.dim)
        if size % condition.multiple:
            because = condition.source or "a margin of ours"
            found = f"needs a multiple of {condition.multiple} ({because})"
            out.append(Refusal("shape.multiple", f"{condition.dim}={size}", found, "shard otherwise, or use the Triton kernels"))
    schemes = spec.schemes if hasattr(spec, "schemes") else (spec.weights,)
    blocks = {tuple(s.granularity.block) for s in schemes if s.granularity.block is not None} - {(128, 128)}
    asked = [f"scales per block of {rows}x{columns}" for rows, columns in sorted(blocks)]
    out += [Refusal("scheme.granularity", a, "serves blocks of 128x128", "use another kernel") for a in asked]
    if isinstance(spec, MoESpec) and spec.activation.kind == entry.activation.kind and spec.activation != entry.activation:
        found = f"serves {entry.activation} ({entry.activation_source})"
        out.append(Refusal("epilogue.activation", str(spec.activation), found, "use another kernel"))
    return tuple(out)
