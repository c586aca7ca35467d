"""What the reference serves: every scheme that a canonical tensor can dequantize."""

from __future__ import annotations

from dataclasses import replace

from hal_core.kernel import SchemeSet
from hal_core.schemes import GranularityKind, ZeroKind

__all__ = ["EVERY_ROW_SCHEME", "EVERY_SCHEME", "OUTPUT_ROUNDING"]

#: Sums are float32, about 1e-6 from exact; a bfloat16 result is then rounded to 8 significand bits, 2**-8 at most.
OUTPUT_ROUNDING = 4e-3

EVERY_SCHEME = SchemeSet(
    dtypes=(
        "int2",
        "int3",
        "int4",
        "int5",
        "int6",
        "int7",
        "int8",
        "iq4_nl",
        "mxfp4",
        "nvfp4",
        "mxfp8",
        "fp8_e4m3",
        "fp8_e4m3fnuz",
        "fp8_e5m2",
        "bf16",
        "fp16",
        "fp32",
    ),
    granularities=tuple(kind for kind in GranularityKind if kind is not GranularityKind.TOKEN),
    zeros=tuple(ZeroKind),
    act_order=True,
)
#: A row of a block-scaled table shares its scales with other rows, so a look-up of rows cannot slice them.
EVERY_ROW_SCHEME = replace(EVERY_SCHEME, granularities=tuple(g for g in EVERY_SCHEME.granularities if g is not GranularityKind.BLOCK))
