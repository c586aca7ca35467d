"""What a method's configuration says of a module, and how the module's tensors are laid out.

A ``Rule`` is one module's answer from the configuration; a ``Packing`` turns a module's tensors into a canonical
weight by that rule, after checking every shape against it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from hal_core.errors import FormatError, HalError
from hal_core.schemes import Granularity, WeightScheme, ZeroKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.formats.safetensors_file import TensorInfo
    from hal_core.schemes import ActivationScheme

__all__ = [
    "Decision",
    "Packing",
    "Plan",
    "Rule",
    "Rules",
    "all_finite",
    "check_scales",
    "check_symmetric",
    "expect",
    "expect_float",
    "expect_part",
]

_FLOAT_WORDS = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Rule:
    """How a quantized module is stored.

    group: inputs that share a scale; -1 is all of them. symmetric: None when the configuration does not say, then the
    zero points are kept. zero_minus_one: the stored zero point is one less than the true one. act_order: ``g_idx``
    counts. per_tensor: one scale for the whole matrix. element: the element type where it is no plain integer. block: rows
    of N and columns of K that share a scale. by_shape: the scales' own shape says whether they are per tensor or channel.
    """

    packing: Packing
    bits: int
    group: int
    symmetric: bool | None
    zero_minus_one: bool = False
    act_order: bool = False
    activations: ActivationScheme | None = None
    per_tensor: bool = False
    element: str = ""
    block: tuple[int, int] | None = None
    by_shape: bool = False

    def scheme(self, k: int) -> WeightScheme:
        """The canonical scheme of a weight with K inputs.

        A group larger than K is a group of K. Activation order means nothing when there is one group.
        """
        granularity = Granularity.channel() if self.group == -1 else Granularity.groups(min(self.group, k))
        if self.per_tensor:
            granularity = Granularity.tensor()
        if self.block is not None:
            granularity = Granularity.groups(self.block[1]) if self.block[0] == 1 else Granularity.blocks(*self.block)
        zero = ZeroKind.NONE if self.symmetric else ZeroKind.INTEGER
        return WeightScheme(self.element or f"int{self.bits}", granularity, zero, self.act_order and 0 < self.group < k)


@dataclass(frozen=True)
class Decision:
    """One module's answer.

    rule: how the module is stored if it is quantized. quantized: None when only its tensors can tell. reason: the field
    that decided. explicit: the configuration names this very module, so that a plain weight contradicts it.
    """

    rule: Rule
    quantized: bool | None
    reason: str
    explicit: bool = False


class Rules(Protocol):
    """The configuration, asked module by module. suffixes: names of the tensors that quantized modules may have."""

    @property
    def suffixes(self) -> tuple[str, ...]: ...

    def decide(self, module: str) -> Decision: ...


@dataclass(frozen=True)
class Plan:
    """One quantized module: its rule, its tensors by suffix, and the canonical shape and scheme of what they hold."""

    module: str
    rule: Rule
    parts: Mapping[str, TensorInfo]
    shape: tuple[int, ...]
    scheme: WeightScheme

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.parts.values())


class Packing(ABC):
    """A layout of one linear layer's tensors in a checkpoint file; ``unpack(pack(x)) == x``, bit for bit."""

    #: Name in messages and in the layout registry.
    name: str
    #: Suffixes of a module's tensors, beside ``bias``. One that begins with ``_`` follows the name without a dot.
    suffixes: tuple[str, ...]
    #: Those of them that :meth:`unpack` only reads, and keeps no part of: they are mapped while it runs, not copied. It makes
    #: the largest part of its result first, so that the allocator can use the memory of the last weight again.
    transient: tuple[str, ...] = ()
    #: Fused experts: the published parameter is called like the module, and ``[E, K, N]`` with rows of gate and up in turn.
    fused: bool = False

    @abstractmethod
    def plan(self, module: str, parts: Mapping[str, TensorInfo], rule: Rule) -> Plan:
        """Check every shape and dtype against the rule; headers only.

        Raises:
            FormatError: a tensor is missing, or is not what the rule needs; the tensor is named.
        """

    @abstractmethod
    def unpack(self, tensors: Mapping[str, Tensor], plan: Plan) -> QuantizedTensor:
        """Canonical weight of a module's tensors, which may be overwritten, the transient ones apart."""

    @abstractmethod
    def pack(self, weight: QuantizedTensor, rule: Rule) -> dict[str, Tensor]:
        """A module's tensors by suffix; used to write checkpoints."""

    def read(self, plan: Plan) -> QuantizedTensor:
        """Fetch and unpack; what the tensors say is checked too."""
        tensors = {suffix: info.map() if suffix in self.transient else info.read() for suffix, info in plan.parts.items()}
        try:
            return self.unpack(tensors, plan)
        except FormatError:
            raise
        except HalError as error:
            raise FormatError(f"module {plan.module}", str(error)) from error


def expect_part(module: str, parts: Mapping[str, TensorInfo], suffix: str) -> TensorInfo:
    """A tensor that must exist."""
    if suffix not in parts:
        have = ", ".join(sorted(parts))
        raise FormatError(f"tensor {module}.{suffix}", f"missing; the module has {have}", "the checkpoint is incomplete: fetch it again")
    return parts[suffix]


def expect(info: TensorInfo, dtypes: tuple[str, ...] | str, shape: tuple[int, ...], why: str) -> None:
    """A tensor's dtype and shape. ``why`` says where the expectation comes from."""
    allowed = (dtypes,) if isinstance(dtypes, str) else dtypes
    if info.dtype not in allowed:
        raise FormatError(
            f"tensor {info.name}",
            f"dtype {info.dtype}, expected {' or '.join(allowed)}",
            "the file was written by another tool or is damaged",
        )
    if info.shape != shape:
        raise FormatError(
            f"tensor {info.name}", f"shape {list(info.shape)}, expected {list(shape)} ({why})", "file and config do not belong together"
        )


def expect_float(info: TensorInfo, shape: tuple[int, ...], why: str) -> None:
    """A tensor of a float dtype, whichever."""
    expect(info, _FLOAT_WORDS, shape, why)


def all_finite(tensor: Tensor) -> bool:
    """No NaN and no infinity. Told from the exponent bits, some times faster than by ``isfinite``."""
    infinity = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}.get(tensor.dtype)
    if infinity is None or not tensor.numel():
        return bool(torch.isfinite(tensor).all())
    return int((tensor.view(torch.int16) & 0x7FFF).max()) < infinity


def check_scales(scales: Tensor, name: str) -> None:
    """Scales must be finite: a NaN would spread silently through a model."""
    if not all_finite(scales):
        bad = int((~torch.isfinite(scales)).sum())
        raise FormatError(
            f"tensor {name}", f"{bad} of {scales.numel()} scales are NaN or infinite", "the checkpoint is damaged: fetch or make it again"
        )


def check_symmetric(zeros: Tensor, bits: int, name: str) -> None:
    """A symmetric checkpoint stores the middle code as every zero point; it is then not kept."""
    middle = 1 << (bits - 1)
    wrong = zeros != middle
    if bool(wrong.any()):
        value = int(zeros[wrong][0])
        raise FormatError(
            f"tensor {name}", f"the config says symmetric, so every zero point must be {middle}; found {value}",
            "set the config's symmetric field to false if the tensor is right",
        )  # fmt: skip
