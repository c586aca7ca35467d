"""What Humming serves, as data: one recipe for each pair of weight elements and activations, and the words that Humming has for it."""

from __future__ import annotations

from dataclasses import dataclass

from hal_core.kernel import SchemeSet
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.schemes import GranularityKind, WeightScheme, ZeroKind
from hal_core.selection import Transform
from hal_core.triton.declared import FP8_BOUND, FP8_EXPERTS_BOUND

__all__ = ["DISTRIBUTION", "INSTALL", "RECIPES", "VERSIONS", "Recipe"]

DISTRIBUTION = "humming-kernels"
VERSIONS = ">=0.1.20,<0.2"
INSTALL = "pip install 'hal-backend-cuda[humming]'"

_CHANNEL, _GROUP, _BLOCK = GranularityKind.CHANNEL, GranularityKind.GROUP, GranularityKind.BLOCK
_NONE, _INTEGER = ZeroKind.NONE, ZeroKind.INTEGER
#: Humming's sources name these; tensor cores of sm_75 know no bf16, and those before sm_89 no fp8.
_ALL = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
_FP8 = _ALL[4:]
_HALVES = ("bf16", "fp16")
_ELEMENTS = {
    "int4": "uint4", "int8": "uint8", "fp8_e4m3": "float8e4m3", "mxfp4": "float4e2m1", "nvfp4": "float4e2m1",
}  # fmt: skip
_ACTIVATIONS = {"int8": "int8", "fp8_e4m3": "float8e4m3", "bf16": "bfloat16", "fp16": "float16"}
#: A rounding of scales to activations' dtype moves none by more than this part of itself.
_ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
#: A step of 1/127 of the largest of a token without outliers; hidden rows of experts have few large values.
INT8_BOUND, INT8_EXPERTS_BOUND = 4e-2, 0.15
#: Group scales of int8 products are 11-bit integers there: no scale moves by more than half of the largest / 1024.
INTEGER_SCALES = Transform("humming_integer_group_scales", 0.02)


@dataclass(frozen=True)
class Recipe:
    """Weights, activations and what follows from them. quant: how activations are quantized, None for not at all."""

    name: str
    schemes: SchemeSet
    architectures: tuple[str, ...]
    quant: ActivationQuant | None = None
    dtypes: tuple[str, ...] = _HALVES
    priority: int = 400
    transforms: tuple[Transform, ...] = ()

    @property
    def numerics(self) -> Numerics:
        """What is done: sums are float32, in an order that depends on the number of rows."""
        weights = "rescaled" if self.transforms else "as_stored"
        return Numerics(activations=(self.quant,) if self.quant else (), weights=weights)

    def error_bound(self, op: str) -> float:
        """Largest relative L2 error against the float32 reference, the rounding of activations included.

        Between the two products of experts activations are rounded once more, to their own dtype. Of few rows some cancel, and are off by
        more than the many.
        """
        if self.quant is None:
            return 2e-2 if op == "moe" else 6e-3
        if self.quant.dtype == "fp8_e4m3":
            return FP8_EXPERTS_BOUND if op == "moe" else FP8_BOUND
        return INT8_EXPERTS_BOUND if op == "moe" else INT8_BOUND

    @property
    def input_group(self) -> int:
        """Columns that share an activation scale; 0 for a whole row."""
        text = self.quant.granularity if self.quant else ""
        return int(text[1:]) if text.startswith("g") else 0

    @property
    def least_group(self) -> int:
        """One step of the tensor cores along K: 32 bytes of activations."""
        return 32 if self.quant else 16

    def operand(self, dtype: str) -> str:
        """Humming's word for the activations of a product."""
        return _ACTIVATIONS[self.quant.dtype if self.quant else dtype]

    def output(self, dtype: str) -> str:
        """Humming's word for the dtype of results, which is also that of scales that are not bytes."""
        return _ACTIVATIONS[dtype]

    def changes(self, scheme: WeightScheme, dtype: str, stacked: bool = False) -> tuple[Transform, ...]:
        """What is lost of the stored weights: scales of the checkpoint's own dtype are rounded to that of the activations.

        stacked: gate and up are one matrix, whose rows take the global scales of either.
        """
        floats = scheme.dtype in {"int4", "int8", "fp8_e4m3"} and scheme.granularity.block is None
        rounded = floats or (stacked and scheme.dtype == "nvfp4")
        return (*((Transform(f"recast_scales:{dtype}", _ROUNDING[dtype]),) if rounded else ()), *self.transforms)

    def narrow(self, scheme: WeightScheme, stacked: bool = False) -> bool:
        """Whether sums are rounded to the dtype of results before the scales of weights: sums of codes pass the range of fp16.

        So it is where a scale holds for a whole row; scales of groups are in the weights that are multiplied.
        """
        return scheme.granularity.kind is _CHANNEL or (stacked and scheme.dtype == "nvfp4")

    def weight_words(self, scheme: WeightScheme, stacked: bool = False) -> dict[str, object]:
        """Arguments of Humming's weight schema for ``scheme``; stacked: as in :meth:`changes`."""
        g = scheme.granularity
        words: dict[str, object] = {"b_dtype": _ELEMENTS[scheme.dtype], "has_zero_point": scheme.zero is _INTEGER}
        if g.group is not None:
            words["weight_scale_group_size"] = g.group
        if g.block is not None:
            words["weight_scale_group_size_n"], words["weight_scale_group_size"] = g.block
        if scheme.dtype == "mxfp4":
            words["bs_dtype"] = "float8e8m0"
        if scheme.dtype == "nvfp4":
            words["bs_dtype"], words["weight_scale_2_type"] = "float8e4m3", "channel" if stacked else "tensor"
        return words


def _set(dtypes: tuple[str, ...], kinds: tuple[GranularityKind, ...], zeros: tuple[ZeroKind, ...] = (_NONE,), group: int = 16) -> SchemeSet:
    return SchemeSet(dtypes=dtypes, granularities=kinds, zeros=zeros, act_order=False, group_multiple=group)


RECIPES: tuple[Recipe, ...] = (
    Recipe("w4a16", _set(("int4",), (_CHANNEL, _GROUP), (_NONE, _INTEGER)), _ALL),
    Recipe("w8a16", _set(("int8",), (_CHANNEL, _GROUP)), _ALL),
    Recipe("w4a8_int8", _set(("int4",), (_GROUP,), group=32), _ALL, ActivationQuant("int8", "token"), transforms=(INTEGER_SCALES,)),
    Recipe("w4a8_fp8", _set(("int4",), (_GROUP,), group=32), _FP8, ActivationQuant("fp8_e4m3", "token")),
    Recipe("w8a8", _set(("int8",), (_CHANNEL,)), _ALL[1:], ActivationQuant("int8", "token"), dtypes=("bf16",)),
    Recipe("fp8_block", _set(("fp8_e4m3",), (_BLOCK,)), _FP8, ActivationQuant("fp8_e4m3", "g128")),
    Recipe("fp8_channel", _set(("fp8_e4m3",), (_CHANNEL,)), _FP8, ActivationQuant("fp8_e4m3", "token"), dtypes=("bf16",)),
    Recipe("fp8_a16", _set(("fp8_e4m3",), (_CHANNEL, _BLOCK)), _ALL),
    Recipe("mxfp4", _set(("mxfp4",), (_GROUP,), group=32), _ALL[1:], dtypes=("bf16",)),
    Recipe("nvfp4", _set(("nvfp4",), (_GROUP,)), _ALL),
)
