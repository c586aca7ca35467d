"""The kernel contract: declarative attributes, from which the reasons to refuse are derived.

A kernel is one class with class attributes that answer every question a spec can ask. Nothing has a
permissive default: an unanswered attribute is refused at registration (``contract.py``), not at run time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from hal_core.numerics import Numerics, outside
from hal_core.refusal import Refusal
from hal_core.schemes import GranularityKind, WeightScheme, ZeroKind
from hal_core.spec import EmbeddingSpec, KVCacheSpec, LinearSpec, MoESpec

if TYPE_CHECKING:
    from torch import nn

    from hal_core.canonical import QuantizedTensor
    from hal_core.kv.op import KVOp, KVParams
    from hal_core.kv.scheme import KVScheme
    from hal_core.machine import Machine
    from hal_core.selection import Padding, Transform
    from hal_core.spec import Spec

__all__ = [
    "CONTRACT",
    "EmbeddingKernel",
    "KVEpilogue",
    "KVKernel",
    "KVSchemeSet",
    "Kernel",
    "LinearEpilogue",
    "LinearKernel",
    "LinearWeights",
    "MoEEpilogue",
    "MoEKernel",
    "MoEWeights",
    "SchemeSet",
    "ShapeLimit",
]

#: Version of this contract. A wheel states the version it was built for in hal_backend.json.
CONTRACT = 1

S = TypeVar("S", LinearSpec, MoESpec, EmbeddingSpec, KVCacheSpec)


@dataclass(frozen=True)
class SchemeSet:
    """Weight schemes that a kernel serves: every combination of these. ``group_multiple`` divides every served group size."""

    dtypes: tuple[str, ...]
    granularities: tuple[GranularityKind, ...]
    zeros: tuple[ZeroKind, ...]
    act_order: bool
    group_multiple: int = 1

    def refusals(self, scheme: WeightScheme, role: str) -> tuple[Refusal, ...]:
        out: list[Refusal] = []
        if scheme.dtype not in self.dtypes:
            served = ", ".join(self.dtypes)
            out.append(Refusal("scheme.dtype", f"{role} {scheme.dtype}", f"serves {served}", "requantize, or use another backend"))
        if not scheme.quantized:
            return tuple(out)
        g = scheme.granularity
        if g.kind not in self.granularities:
            served = ", ".join(kind.value for kind in self.granularities)
            out.append(Refusal("scheme.granularity", f"{role} scales per {g}", f"serves per {served}", "use another backend"))
        if g.group is not None and g.group % self.group_multiple:
            found = f"needs a multiple of {self.group_multiple}"
            out.append(Refusal("scheme.group", f"{role} group {g.group}", found, "requantize with such a group size"))
        if scheme.zero not in self.zeros:
            served = ", ".join(zero.value for zero in self.zeros)
            out.append(Refusal("scheme.zero", f"{role} zero {scheme.zero.value}", f"serves {served}", "use another backend"))
        elif scheme.zero is not ZeroKind.NONE and not scheme.dtype.startswith("int"):
            found = f"{scheme.dtype} codes are signed numbers that need none"
            out.append(Refusal("scheme.zero", f"{role} zero {scheme.zero.value}", found, "requantize without zero points"))
        if scheme.act_order and not self.act_order:
            fix = "requantize with desc_act=False, or use another backend"
            out.append(Refusal("scheme.act_order", f"{role} with g_idx", "no act-order", fix))
        return tuple(out)


@dataclass(frozen=True)
class ShapeLimit:
    """A limit on one dimension of the spec (``n``, ``k``, ``hidden``, ``intermediate``, ``rows``, ``dim`` ...)."""

    dim: str
    multiple: int = 1
    least: int = 1
    most: int | None = None

    def refusals(self, spec: Spec) -> tuple[Refusal, ...]:
        size, out = getattr(spec, self.dim), []
        if size % self.multiple:
            found = f"needs a multiple of {self.multiple}"
            out.append(Refusal("shape.multiple", f"{self.dim}={size}", found, "pad the dimension, or shard otherwise"))
        if size < self.least or (self.most is not None and size > self.most):
            top = "no limit" if self.most is None else str(self.most)
            out.append(Refusal("shape.range", f"{self.dim}={size}", f"serves {self.least} to {top}", "use another backend"))
        return tuple(out)


@dataclass(frozen=True)
class LinearEpilogue:
    """Which optional parts of a linear a kernel serves; every one is answered."""

    bias: bool
    lora: bool


@dataclass(frozen=True)
class KVSchemeSet:
    """Cache schemes that a kernel serves: texts of :class:`~hal_core.kv.scheme.KVScheme` or globs of them, for each side.

    mixed: whether keys and values may be stored in different ways.
    """

    keys: tuple[str, ...]
    values: tuple[str, ...]
    mixed: bool

    def refusals(self, keys: KVScheme, values: KVScheme) -> tuple[Refusal, ...]:
        out = [
            Refusal("kv.scheme", f"{role} in {scheme}", f"serves {', '.join(served)}", "use another scheme, or another backend")
            for role, scheme, served in (("keys", keys, self.keys), ("values", values, self.values))
            if not any(fnmatchcase(str(scheme), glob) for glob in served)
        ]
        if not self.mixed and values != keys.for_values():
            fix = "use one scheme for both, or another backend"
            out.append(Refusal("kv.mixed", f"keys in {keys}, values in {values}", "serves one scheme for both", fix))
        return tuple(out)


@dataclass(frozen=True)
class KVEpilogue:
    """Which parts of attention over a cache a kernel serves; every one is answered.

    gqa: fewer kv heads than query heads. value_dim: values of another size than keys. sink_tokens: leading tokens seen
    beside a window. sinks: a logit per head in the denominator.
    """

    gqa: bool
    value_dim: bool
    window: bool
    sink_tokens: bool
    sinks: bool
    soft_cap: bool


@dataclass(frozen=True)
class MoEEpilogue:
    """Which optional parts of an experts block a kernel serves; every one is answered."""

    activations: tuple[str, ...]
    alpha: bool
    limit: bool
    gated: bool
    ungated: bool
    bias: bool
    mixed_schemes: bool
    expert_map: bool
    expert_parallel: bool
    router_weight_on_input: bool
    routed_scaling: bool
    shared_experts: bool
    lora: bool


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """What a linear is prepared from: canonical ``[N, K]`` and optional float bias ``[N]``."""

    weight: QuantizedTensor
    bias: Any = None


@dataclass(frozen=True, eq=False)
class MoEWeights:
    """Canonical ``gate [E, I, H]`` (None if ungated), ``up [E, I, H]``, ``down [E, H, I]`` and optional biases ``[E, ..]``."""

    up: QuantizedTensor
    down: QuantizedTensor
    gate: QuantizedTensor | None = None
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None


class Kernel(ABC, Generic[S]):
    """Base of all kernels. Subclasses set every attribute below; see ``docs/write-a-backend.md``.

    name: unique inside its backend. devices: kinds it runs on (``cpu``, ``cuda``, ``xpu``, ``rocm``), or ``("any",)``.
    isa: processor features, all needed. architectures: device architectures, any of them; empty for all.
    numerics: what it does. layout: name of its packed form; kernels that share it can share weights.
    m_range: least and most rows of one call. error_bound: largest relative L2 error against the fp32 reference; of quantized activations
    more only where this rounding by itself goes further, as for a token whose terms cancel.
    priority: higher wins under ``auto``. provider: a library outside the wheel whose code runs; empty for the wheel's own. Where a
    provider's kernel was made for a problem and refuses it, the selection of a lower one of the same backend says so.
    """

    op: ClassVar[str]
    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]
    isa: ClassVar[tuple[str, ...]]
    architectures: ClassVar[tuple[str, ...]]
    schemes: ClassVar[SchemeSet]
    numerics: ClassVar[Numerics]
    dtypes: ClassVar[tuple[str, ...]]
    out_dtypes: ClassVar[tuple[str, ...]]
    limits: ClassVar[tuple[ShapeLimit, ...]]
    m_range: ClassVar[tuple[int, int | None]]
    layout: ClassVar[str]
    error_bound: ClassVar[float]
    priority: ClassVar[int]
    provider: ClassVar[str] = ""

    def refusals(self, spec: S, machine: Machine) -> tuple[Refusal, ...]:
        """Every reason why this kernel cannot serve ``spec`` on ``machine``; empty means it can."""
        return (
            *self._device_refusals(machine),
            *self._scheme_refusals(spec),
            *outside(spec.numerics, self.computes(spec), spec.dtype),
            *self._dtype_refusals(spec),
            *self._epilogue_refusals(spec),
            *(reason for limit in self.limits for reason in limit.refusals(spec)),
        )

    def computes(self, spec: S) -> Numerics:
        """``numerics``, unless it depends on the spec what the kernel does to activations. Pure, like ``refusals``."""
        return self.numerics

    def rank(self, spec: S, machine: Machine) -> int:
        """``priority``, unless the kernel knows that it is faster or slower on this machine. Pure, like ``refusals``."""
        return self.priority

    def by_name_only(self, spec: S, machine: Machine) -> bool:
        """Whether only a policy that names it may choose it here, as on a device for tests. Pure, like ``refusals``."""
        return False

    def lacks(self, machine: Machine) -> tuple[Refusal, ...]:
        """Software that it calls and that is not on ``machine``; ``refusals`` has these reasons too. For ``hal probe``."""
        return ()

    @abstractmethod
    def prepare(self, spec: S, weights: Any) -> nn.Module:
        """Pack canonical weights into this kernel's layout and return the op."""

    def transforms(self, spec: S) -> tuple[Transform, ...]:
        """Changes of the stored weights that lose information; a kernel that rescales or recasts lists them here."""
        return ()

    def padding(self, spec: S) -> tuple[Padding, ...]:
        """Dimensions of ``spec`` that this kernel widens in its packed form."""
        return ()

    def _device_refusals(self, machine: Machine) -> tuple[Refusal, ...]:
        kinds = {device.kind for device in machine.devices}
        if "any" not in self.devices and not kinds.intersection(self.devices):
            wanted, seen = " or ".join(self.devices), ", ".join(sorted(kinds)) or "none"
            return (Refusal("device.missing", f"a {wanted} device", f"devices: {seen}", "run on a machine with one"),)
        out = [
            Refusal("device.isa", feature, machine.why_not(feature), machine.remedy(feature))
            for feature in self.isa
            if feature not in machine.isa
        ]
        architectures = sorted({d.architecture for d in machine.devices if d.kind in self.devices}) if self.architectures else []
        if self.architectures and not set(architectures).intersection(self.architectures):
            asked, found = " or ".join(self.architectures), ", ".join(architectures) or "none"
            out.append(Refusal("device.arch", asked, found, "install a wheel built for it"))
        return tuple(out)

    def _scheme_refusals(self, spec: S) -> tuple[Refusal, ...]:
        return tuple(reason for role, scheme in _weight_roles(spec) for reason in self.schemes.refusals(scheme, role))

    def _dtype_refusals(self, spec: S) -> tuple[Refusal, ...]:
        out = []
        if spec.dtype not in self.dtypes:
            out.append(Refusal("dtype.activation", spec.dtype, f"takes {', '.join(self.dtypes)}", f"run the model in {self.dtypes[0]}"))
        if spec.output not in self.out_dtypes:
            out.append(Refusal("dtype.output", spec.output, f"writes {', '.join(self.out_dtypes)}", f"ask for {self.out_dtypes[0]} output"))
        return tuple(out)

    def _epilogue_refusals(self, spec: S) -> tuple[Refusal, ...]:
        return ()


def _weight_roles(spec: Spec) -> tuple[tuple[str, WeightScheme], ...]:
    if isinstance(spec, MoESpec):
        gate = (("gate", spec.gate),) if spec.gate else ()
        return (*gate, ("up", spec.up), ("down", spec.down))
    return () if isinstance(spec, KVCacheSpec) else (("weight", spec.weights),)


def _no(code: str, asked: str, fix: str) -> Refusal:
    return Refusal(code, asked, "not served by this kernel", fix)


class LinearKernel(Kernel[LinearSpec]):
    """A quantized linear. ``prepare`` takes :class:`LinearWeights` and returns a ``QuantLinear``."""

    op = "linear"
    epilogue: ClassVar[LinearEpilogue]

    def _epilogue_refusals(self, spec: LinearSpec) -> tuple[Refusal, ...]:
        asked = {"bias": spec.bias, "lora": spec.lora}
        return tuple(
            _no(f"epilogue.{f.name}", f.name, f"apply the {f.name} outside the op, or use another kernel")
            for f in fields(LinearEpilogue)
            if asked[f.name] and not getattr(self.epilogue, f.name)
        )


class EmbeddingKernel(Kernel[EmbeddingSpec]):
    """Row look-up; ``tied_head`` says whether the op also serves ``apply`` as the output head."""

    op = "embedding"
    tied_head: ClassVar[bool]

    def _epilogue_refusals(self, spec: EmbeddingSpec) -> tuple[Refusal, ...]:
        if spec.tied_head and not self.tied_head:
            return (_no("epilogue.tied_head", "a head tied to the embedding", "untie the head, or use another kernel"),)
        return ()


class KVKernel(Kernel[KVCacheSpec]):
    """A paged key/value cache. ``prepare`` takes ``KVParams`` and returns a ``KVOp``.

    schemes: how keys and values may be stored. head_dims: sizes of keys and of values served; empty for all.
    layout: name of its pages' form. m_range: query rows of one ``attend``. error_bound: largest relative L2 error of ``attend``
    against float32 attention over the dequantized cache.
    """

    op = "kv"
    schemes: ClassVar[KVSchemeSet]  # type: ignore[assignment]
    head_dims: ClassVar[tuple[int, ...]]
    epilogue: ClassVar[KVEpilogue]

    @abstractmethod
    def prepare(self, spec: KVCacheSpec, weights: KVParams) -> KVOp:
        """The stateless op over pages of this kernel's layout."""

    def _scheme_refusals(self, spec: KVCacheSpec) -> tuple[Refusal, ...]:
        out = list(self.schemes.refusals(spec.keys, spec.values))
        sizes = {"head_dim": spec.head_dim, "value_dim": spec.v_dim}
        served = ", ".join(map(str, self.head_dims))
        out += [
            Refusal("kv.head_dim", f"{name}={size}", f"serves {served}", "use another backend")
            for name, size in sizes.items()
            if self.head_dims and size not in self.head_dims
        ]
        return tuple(out)

    def _epilogue_refusals(self, spec: KVCacheSpec) -> tuple[Refusal, ...]:
        asked = {
            "gqa": spec.num_heads != spec.num_kv_heads,
            "value_dim": spec.v_dim != spec.head_dim,
            "window": spec.window is not None,
            "sink_tokens": spec.sink_tokens > 0,
            "sinks": spec.sinks,
            "soft_cap": spec.soft_cap is not None,
        }
        missing = [f.name for f in fields(KVEpilogue) if asked[f.name] and not getattr(self.epilogue, f.name)]
        return tuple(_no(f"epilogue.{name}", name, "use another kernel") for name in missing)


class MoEKernel(Kernel[MoESpec]):
    """A block of experts. ``routing`` lists the forms it takes; ``prepare`` takes :class:`MoEWeights`.

    rounds_products: the products of gate and up are rounded to the activations' dtype before the activation function sees them.
    """

    op = "moe"
    routing: ClassVar[tuple[str, ...]]
    epilogue: ClassVar[MoEEpilogue]
    rounds_products: ClassVar[bool] = False

    def _epilogue_refusals(self, spec: MoESpec) -> tuple[Refusal, ...]:
        e, out = self.epilogue, []
        if spec.activation.kind not in e.activations:
            found = f"serves {', '.join(e.activations)}"
            out.append(Refusal("epilogue.activation", spec.activation.kind, found, "use another kernel"))
        asked = {
            "alpha": spec.activation.alpha is not None,
            "limit": spec.activation.limit is not None,
            "bias": spec.bias,
            "mixed_schemes": len(set(spec.schemes)) > 1,
            "expert_map": spec.expert_map,
            "expert_parallel": spec.local != spec.num_experts,
            "router_weight_on_input": spec.router_weight_on_input,
            "routed_scaling": spec.routed_scaling != 1.0,
            "shared_experts": spec.shared_experts > 0,
            "lora": spec.lora,
        }
        missing = [name for name, on in asked.items() if on and not getattr(e, name)]
        out += [_no(f"epilogue.{name}", name, "do it outside the op, or use another kernel") for name in missing]
        if not (e.gated if spec.gate else e.ungated):
            out.append(_no("epilogue.gated", "gated experts" if spec.gate else "ungated experts", "use another kernel"))
        if spec.routing not in self.routing:
            out.append(Refusal("routing.form", spec.routing, f"takes {', '.join(self.routing)}", "convert the routing before the call"))
        return tuple(out)
