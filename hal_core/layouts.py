"""Checkpoint layouts by name, each a bijection between a canonical weight and a file's tensors.

``unpack(pack(x)) == x``, bit for bit, for every weight that the layout accepts. The readers of `hal_core.formats` use the
same code on files; here it stands alone, to write checkpoints and to move a weight from one layout to another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hal_core.errors import FormatError
from hal_core.formats.autoround_floats import FLOAT_PACKINGS
from hal_core.formats.awq_tensors import AWQGemvPacking, AWQPacking
from hal_core.formats.compressed_tensors import ELEMENTS
from hal_core.formats.ct_tensors import CTPackedPacking, CTTensPacking
from hal_core.formats.fp8 import fp8_packing
from hal_core.formats.gguf_blocks import QUANTIZED, block_scheme, block_size, pack_blocks, unpack_blocks
from hal_core.formats.gpt_oss import FusedBlocks
from hal_core.formats.gptq_tensors import GPTQPacking
from hal_core.formats.modelopt import PACKING as MODELOPT
from hal_core.formats.packing import Plan, Rule
from hal_core.formats.quark import PACKING as QUARK
from hal_core.schemes import GranularityKind, ZeroKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.formats.packing import Packing
    from hal_core.schemes import WeightScheme

__all__ = ["LAYOUTS", "Layout", "layout"]


class Layout(ABC):
    """One layout of a matrix ``[N, K]`` in a checkpoint file, or of a stack of experts ``[E, N, K]`` where ``dims`` is 3."""

    name: str
    dims: int = 2

    @abstractmethod
    def obstacle(self, scheme: WeightScheme, shape: tuple[int, ...]) -> str:
        """Why a weight has no form in this layout; empty when it has one."""

    @abstractmethod
    def pack(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        """The file's tensors by suffix.

        Raises:
            FormatError: the weight has no form in this layout.
        """

    @abstractmethod
    def unpack(self, tensors: Mapping[str, Tensor], scheme: WeightScheme, shape: tuple[int, ...]) -> QuantizedTensor:
        """The canonical weight, in fresh memory; inverse of :meth:`pack`.

        Raises:
            FormatError: tensors that do not hold such a weight.
        """

    def _check(self, scheme: WeightScheme, shape: tuple[int, ...]) -> None:
        kind = "[N, K]" if self.dims == 2 else "[E, N, K]"
        found = f"shape {list(shape)} is not {kind}" if len(shape) != self.dims else self.obstacle(scheme, shape)
        if found:
            raise FormatError(f"layout {self.name} for {scheme}", found, "choose another layout")


@dataclass(frozen=True)
class IntegerLayout(Layout):
    """A packing of integer codes. n_step, k_step: at 32 bits a word, what N and K must be multiples of, by bits."""

    name: str
    packing: Packing
    zero_minus_one: bool = False
    bits: tuple[int, ...] = (2, 3, 4, 8)
    act_order: bool = True
    per_tensor: bool = False
    whole_words_n: bool = True
    whole_words_k: bool = True

    def obstacle(self, scheme: WeightScheme, shape: tuple[int, ...]) -> str:
        kind = scheme.granularity.kind
        kinds = [GranularityKind.CHANNEL, GranularityKind.GROUP] + [GranularityKind.TENSOR] * self.per_tensor
        if not scheme.dtype.startswith("int") or scheme.bits not in self.bits:
            return f"it holds integers of {', '.join(map(str, self.bits))} bits"
        if kind not in kinds or (kind is GranularityKind.TENSOR and scheme.zero is not ZeroKind.NONE):
            return f"it has no granularity {scheme.granularity} with zero kind {scheme.zero.value}"
        if scheme.zero is ZeroKind.MINIMUM or (scheme.act_order and not self.act_order):
            return "it has no float minimum" if scheme.zero is ZeroKind.MINIMUM else "it has no activation order"
        for name, size, whole in (("N", shape[0], self.whole_words_n), ("K", shape[1], self.whole_words_k)):
            if whole and size * scheme.bits % 32:
                return f"{name}={size} codes of {scheme.bits} bits do not fill whole words"
        if (
            isinstance(self.packing, AWQGemvPacking)
            and scheme.granularity.group not in (32, 64)
            and (scheme.granularity.group or shape[1]) < 128
        ):
            return "it has groups of 32, 64, and 128 or more"
        return ""

    def _rule(self, scheme: WeightScheme) -> Rule:
        return Rule(
            self.packing, scheme.bits, scheme.granularity.group or -1, scheme.zero is ZeroKind.NONE, self.zero_minus_one, scheme.act_order,
            per_tensor=scheme.granularity.kind is GranularityKind.TENSOR,
        )  # fmt: skip

    def pack(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        self._check(weight.scheme, weight.shape)
        return self.packing.pack(weight, self._rule(weight.scheme))

    def unpack(self, tensors: Mapping[str, Tensor], scheme: WeightScheme, shape: tuple[int, ...]) -> QuantizedTensor:
        self._check(scheme, shape)
        plan = Plan("weight", self._rule(scheme), {}, shape, scheme)
        return self.packing.unpack({suffix: tensor.clone() for suffix, tensor in tensors.items()}, plan)


@dataclass(frozen=True)
class BlockLayout(Layout):
    """A GGUF type; its one tensor is called ``data``, uint8 ``[N, bytes of a row]``."""

    name: str
    kind: str

    def obstacle(self, scheme: WeightScheme, shape: tuple[int, ...]) -> str:
        if scheme != block_scheme(self.kind):
            return f"it holds {block_scheme(self.kind)}"
        size = block_size(self.kind)
        return f"K={shape[1]} is not a multiple of {size}" if shape[1] % size else ""

    def pack(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        self._check(weight.scheme, weight.shape)
        return {"data": pack_blocks(weight, self.kind)}

    def unpack(self, tensors: Mapping[str, Tensor], scheme: WeightScheme, shape: tuple[int, ...]) -> QuantizedTensor:
        self._check(scheme, shape)
        return unpack_blocks(tensors["data"], self.kind, (shape[0], shape[1]), "data")


@dataclass(frozen=True)
class ElementLayout(Layout):
    """A packing of elements of their own type. scales: the dtypes that the layout's files hold."""

    name: str
    packing: Packing
    dtypes: tuple[str, ...]
    granularities: tuple[str, ...]
    scales: tuple[torch.dtype, ...]
    zeros: bool = False

    def obstacle(self, scheme: WeightScheme, shape: tuple[int, ...]) -> str:
        g = scheme.granularity
        if scheme.dtype not in self.dtypes:
            return f"it holds {', '.join(self.dtypes)}"
        if str(g) not in self.granularities and g.kind.value not in self.granularities:
            return f"it has scales per {', '.join(self.granularities)}"
        if scheme.act_order or scheme.zero is ZeroKind.MINIMUM or (scheme.zero is ZeroKind.INTEGER and not self.zeros):
            return f"it has no {'activation order' if scheme.act_order else f'zero kind {scheme.zero.value}'}"
        return f"K={shape[1]} elements of 4 bits do not fill whole bytes" if scheme.bits == 4 and shape[1] % 2 else ""

    def _rule(self, scheme: WeightScheme) -> Rule:
        g = scheme.granularity
        return Rule(
            self.packing, scheme.bits, g.group or -1, scheme.zero is ZeroKind.NONE, per_tensor=g.kind is GranularityKind.TENSOR,
            element=scheme.dtype, block=g.block,
        )  # fmt: skip

    def pack(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        self._check(weight.scheme, weight.shape)
        if weight.scales is None or weight.scales.dtype not in self.scales:
            found = f"scales are {None if weight.scales is None else weight.scales.dtype}"
            raise FormatError(f"layout {self.name} for {weight.scheme}", found, f"it holds {', '.join(map(str, self.scales))}")
        return self.packing.pack(weight, self._rule(weight.scheme))

    def unpack(self, tensors: Mapping[str, Tensor], scheme: WeightScheme, shape: tuple[int, ...]) -> QuantizedTensor:
        self._check(scheme, shape)
        plan = Plan("weight", self._rule(scheme), {}, shape, scheme)
        return self.packing.unpack({suffix: tensor.clone() for suffix, tensor in tensors.items()}, plan)


@dataclass(frozen=True)
class StackLayout(Layout):
    """gpt-oss's experts, ``[E, N, K]`` in one pair of tensors."""

    name: str
    packing: Packing
    dims: int = 3

    def obstacle(self, scheme: WeightScheme, shape: tuple[int, ...]) -> str:
        if str(scheme) != "mxfp4:g32":
            return "it holds mxfp4:g32"
        return f"K={shape[-1]} is not a multiple of 32" if shape[-1] % 32 else ""

    def pack(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        self._check(weight.scheme, weight.shape)
        return self.packing.pack(weight, Rule(self.packing, 4, 32, True, element="mxfp4"))

    def unpack(self, tensors: Mapping[str, Tensor], scheme: WeightScheme, shape: tuple[int, ...]) -> QuantizedTensor:
        self._check(scheme, shape)
        plan = Plan("weight", Rule(self.packing, 4, 32, True, element="mxfp4"), {}, shape, scheme)
        return self.packing.unpack({suffix: tensor.clone() for suffix, tensor in tensors.items()}, plan)


_EACH, _FLOATS = ("tensor", "channel", "group"), (torch.float32, torch.bfloat16, torch.float16)
#: compressed-tensors' forms: granularities and dtypes of scales.
_FORMS: dict[str, tuple[tuple[str, ...], tuple[torch.dtype, ...]]] = {
    "int-quantized": (_EACH, _FLOATS),
    "float-quantized": ((*_EACH, "block"), _FLOATS),
    "mxfp8-quantized": (("g32",), (torch.uint8,)),
    "mxfp4-pack-quantized": (("g32",), (torch.uint8,)),
    "nvfp4-pack-quantized": (("g16",), (torch.float8_e4m3fn,)),
}
#: Granularities and dtypes of scales of the elements that have one form only.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[torch.dtype, ...]]] = {
    "mxfp8": _FORMS["mxfp8-quantized"], "mxfp4": _FORMS["mxfp4-pack-quantized"], "nvfp4": _FORMS["nvfp4-pack-quantized"],
}  # fmt: skip
_FP8S = ("fp8_e4m3", "fp8_e5m2")
_LLMC = FLOAT_PACKINGS["auto_round:llm_compressor"]
#: Tools whose files hold several kinds of elements: tool, packing, name, element types, and granularities with dtypes of scales.
_TOOLS: tuple[tuple[str, Packing, str, tuple[str, ...], tuple[tuple[str, ...], tuple[torch.dtype, ...]] | None], ...] = (
    ("modelopt", MODELOPT, "fp8", ("fp8_e4m3",), (("tensor", "channel", "block"), _FLOATS)),
    ("modelopt", MODELOPT, "mxfp8", ("mxfp8",), None),
    ("modelopt", MODELOPT, "nvfp4", ("nvfp4",), None),
    ("quark", QUARK, "int8", ("int8",), (("tensor", "channel"), _FLOATS)),
    ("quark", QUARK, "fp8", ("fp8_e4m3",), (("tensor", "channel"), _FLOATS)),
    ("quark", QUARK, "mxfp4", ("mxfp4",), None),
    ("auto-round", FLOAT_PACKINGS["auto_round:fp8"], "fp8", _FP8S, ((*_EACH, "block"), _FLOATS)),
    ("auto-round", FLOAT_PACKINGS["auto_round:fp8_static"], "fp8_static", _FP8S, ((*_EACH, "block"), _FLOATS)),
    ("auto-round:llm_compressor", _LLMC, "int8", ("int8",), (_EACH, _FLOATS)),
    ("auto-round:llm_compressor", _LLMC, "fp8", _FP8S, ((*_EACH, "block"), _FLOATS)),
    ("auto-round:llm_compressor", _LLMC, "mxfp8", ("mxfp8",), None),
    ("auto-round:llm_compressor", _LLMC, "mxfp4", ("mxfp4",), None),
    ("auto-round:llm_compressor", _LLMC, "nvfp4", ("nvfp4",), None),
)
#: Every checkpoint layout by name.
LAYOUTS: Mapping[str, Layout] = {
    each.name: each
    for each in (
        IntegerLayout("gptq", GPTQPacking(), zero_minus_one=True),
        IntegerLayout("gptq_v2", GPTQPacking()),
        IntegerLayout("awq:gemm", AWQPacking(), bits=(4,), act_order=False, whole_words_k=False),
        IntegerLayout("awq:gemv", AWQGemvPacking(), bits=(4,), act_order=False, whole_words_n=False),
        IntegerLayout("compressed-tensors:pack-quantized", CTPackedPacking(), per_tensor=True, whole_words_n=False, whole_words_k=False),
        IntegerLayout(CTTensPacking.name, CTTensPacking(), bits=(3,), per_tensor=True, whole_words_n=False, whole_words_k=False),
        *(
            ElementLayout(ELEMENTS[form][2].name, ELEMENTS[form][2], (ELEMENTS[form][0],), *kinds, zeros=form == "int-quantized")
            for form, kinds in _FORMS.items()
        ),
        ElementLayout(
            "fp8",
            fp8_packing("fp8"),
            ("fp8_e4m3", "fp8_e5m2"),
            ("tensor", "channel", "block"),
            (*_FLOATS, torch.uint8),
        ),
        *(ElementLayout(f"{tool}:{name}", packing, dtypes, *(kinds or _KINDS[name])) for tool, packing, name, dtypes, kinds in _TOOLS),
        StackLayout("gpt-oss:mxfp4", FusedBlocks()),
        *(BlockLayout(f"gguf:{kind}", kind) for kind in QUANTIZED),
    )
}


def layout(name: str) -> Layout:
    """The layout of that name.

    Raises:
        FormatError: there is none; the message lists them.
    """
    if name not in LAYOUTS:
        raise FormatError(f"layout {name!r}", "not known", f"known: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
