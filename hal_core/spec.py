"""The problems that kernels solve, as frozen values: shapes *after* sharding, schemes, numerics, epilogue, dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from hal_core.errors import ValueDecodeError
from hal_core.jsonable import JsonValue, from_json, to_json
from hal_core.kv.scheme import KV_GROUP, KVScheme, positive
from hal_core.numerics import Numerics
from hal_core.schemes import ActivationScheme, WeightScheme

__all__ = [
    "ACTIVATIONS",
    "FLOATS",
    "KV_SCALES",
    "OPS",
    "ROUTING_FORMS",
    "Activation",
    "EmbeddingSpec",
    "KVCacheSpec",
    "LinearSpec",
    "MoESpec",
    "Spec",
    "spec_from_json",
    "spec_to_json",
]

OPS = ("linear", "moe", "embedding", "kv")
#: silu, gelu, gelu_tanh: act(gate) * up. swiglu_oai: (up + 1) * gate * sigmoid(alpha * gate). relu2: relu(up)^2.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2")
ROUTING_FORMS = ("routed", "grouped", "batched")
#: Types of activations and outputs.
FLOATS = ("fp32", "bf16", "fp16")
#: Where the static scales of a cache come from: the checkpoint, tokens seen, or nowhere (1.0).
KV_SCALES = ("calibrated", "computed", "default")
#: No dimension of a real model comes near; a larger number is a mistake or an attack.
_MAX_DIM = 1 << 31


def _check_dims(owner: str, **dims: int) -> None:
    for name, size in dims.items():
        if type(size) is not int or not 1 <= size < _MAX_DIM:
            raise ValueDecodeError(f"{owner}.{name}", f"{size!r:.40} is not between 1 and {_MAX_DIM - 1}")


def _check_word(owner: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise ValueDecodeError(owner, f"{word!r} is unknown", f"use one of {', '.join(known)}")


@dataclass(frozen=True)
class Activation:
    """An expert's activation function. ``limit`` clamps gate from above and up on both sides before it."""

    kind: str = "silu"
    alpha: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        _check_word("activation.kind", self.kind, ACTIVATIONS)
        if self.alpha is not None and self.kind != "swiglu_oai":
            raise ValueDecodeError("activation.alpha", f"{self.alpha} with {self.kind}", "alpha is the sigmoid slope of swiglu_oai only")
        if self.limit is not None and not positive(self.limit):
            raise ValueDecodeError("activation.limit", f"{self.limit!r:.40} is not positive", "leave it out for no limit")

    def __str__(self) -> str:
        extra = [f"alpha={self.alpha:g}"] if self.alpha is not None else []
        extra += [f"limit={self.limit:g}"] if self.limit is not None else []
        return self.kind + (f"({', '.join(extra)})" if extra else "")


@dataclass(frozen=True)
class LinearSpec:
    """``y [.., n] = x [.., k] @ w [n, k].T + bias``."""

    __json_tag__: ClassVar[str] = "op"
    op: ClassVar[str] = "linear"
    n: int
    k: int
    weights: WeightScheme
    activations: ActivationScheme | None = None
    numerics: Numerics = Numerics()
    dtype: str = "bf16"
    out_dtype: str | None = None
    bias: bool = False
    lora: bool = False

    def __post_init__(self) -> None:
        _check_dims("LinearSpec", n=self.n, k=self.k)
        _check_word("LinearSpec.dtype", self.dtype, FLOATS)
        _check_word("LinearSpec.out_dtype", self.output, FLOATS)

    @property
    def output(self) -> str:
        return self.out_dtype or self.dtype

    def __str__(self) -> str:
        return f"linear {self.n}x{self.k} {self.weights} {self.dtype}{' +bias' * self.bias} [{self.numerics}]"


@dataclass(frozen=True)
class EmbeddingSpec:
    """Row look-up in a quantized table ``[rows, dim]``; with ``tied_head`` the same weights are also the output head."""

    __json_tag__: ClassVar[str] = "op"
    op: ClassVar[str] = "embedding"
    rows: int
    dim: int
    weights: WeightScheme
    numerics: Numerics = Numerics()
    dtype: str = "bf16"
    tied_head: bool = False

    def __post_init__(self) -> None:
        _check_dims("EmbeddingSpec", rows=self.rows, dim=self.dim)
        _check_word("EmbeddingSpec.dtype", self.dtype, FLOATS)

    @property
    def output(self) -> str:
        return self.dtype

    def __str__(self) -> str:
        return f"embedding {self.rows}x{self.dim} {self.weights} {self.dtype}{' +tied head' * self.tied_head} [{self.numerics}]"


@dataclass(frozen=True)
class MoESpec:
    """A block of experts: ``sum over slots of weight * down(act(gate(x)) * up(x))``.

    num_experts counts global ids; local_experts those whose weights are here (default: all); ``gate`` is None when ungated.
    """

    __json_tag__: ClassVar[str] = "op"
    op: ClassVar[str] = "moe"
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    up: WeightScheme
    down: WeightScheme
    gate: WeightScheme | None = None
    activation: Activation = Activation()
    activations: ActivationScheme | None = None
    numerics: Numerics = Numerics()
    dtype: str = "bf16"
    out_dtype: str | None = None
    routing: str = "routed"
    local_experts: int | None = None
    bias: bool = False
    expert_map: bool = False
    router_weight_on_input: bool = False
    routed_scaling: float = 1.0
    shared_experts: int = 0
    lora: bool = False

    def __post_init__(self) -> None:
        _check_dims("MoESpec", num_experts=self.num_experts, top_k=self.top_k, hidden=self.hidden, intermediate=self.intermediate)
        _check_dims("MoESpec", local_experts=self.local)
        _check_word("MoESpec.dtype", self.dtype, FLOATS)
        _check_word("MoESpec.out_dtype", self.output, FLOATS)
        _check_word("MoESpec.routing", self.routing, ROUTING_FORMS)
        if self.top_k > self.num_experts or self.local > self.num_experts:
            raise ValueDecodeError("MoESpec", f"top_k {self.top_k} or local_experts {self.local} exceeds num_experts {self.num_experts}")
        if self.gate is None and self.activation.kind == "swiglu_oai":
            raise ValueDecodeError("MoESpec.gate", "missing", "swiglu_oai multiplies by a gate")
        if not math.isfinite(self.routed_scaling):
            raise ValueDecodeError("MoESpec.routed_scaling", f"{self.routed_scaling} is not finite")
        if self.shared_experts < 0:
            raise ValueDecodeError("MoESpec.shared_experts", f"{self.shared_experts} is negative")

    @property
    def output(self) -> str:
        return self.out_dtype or self.dtype

    @property
    def local(self) -> int:
        return self.num_experts if self.local_experts is None else self.local_experts

    @property
    def schemes(self) -> tuple[WeightScheme, ...]:
        return ((self.gate,) if self.gate else ()) + (self.up, self.down)

    def __str__(self) -> str:
        schemes = list(dict.fromkeys(str(s) for s in self.schemes))
        return (
            f"moe E{self.num_experts} k{self.top_k} H{self.hidden} I{self.intermediate} {'/'.join(schemes)} "
            f"{self.activation}{'' if self.gate else ' ungated'}{' +bias' * self.bias} {self.dtype} [{self.numerics}]"
        )


@dataclass(frozen=True)
class KVCacheSpec:
    """A paged key/value cache of one layer: how keys and values are stored, page size in tokens, attention over it.

    values: integers per channel become integers per token, which is what the same word means for values.
    value_dim: channels of a value; None for head_dim.
    window: tokens that a query sees, its own included; None for all. sink_tokens: leading tokens seen beside the window.
    sinks: each query head has a learned logit in the softmax denominator. soft_cap: logits become ``cap * tanh(logit / cap)``.
    scales: where static scales come from, a word of :data:`KV_SCALES`; of no account for schemes without them.
    seed: of the rotations of turboquant schemes; pages are read with the seed they were written with.
    """

    __json_tag__: ClassVar[str] = "op"
    op: ClassVar[str] = "kv"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    keys: KVScheme
    values: KVScheme
    numerics: Numerics = Numerics()
    dtype: str = "bf16"
    value_dim: int | None = None
    window: int | None = None
    sink_tokens: int = 0
    sinks: bool = False
    soft_cap: float | None = None
    scales: str = "default"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("keys", "values"):
            if not isinstance(getattr(self, name), KVScheme):
                raise ValueDecodeError(f"KVCacheSpec.{name}", f"{getattr(self, name)!r} is not a KVScheme", "use KVScheme.parse(text)")
        object.__setattr__(self, "values", self.values.for_values())
        _check_dims("KVCacheSpec", num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        _check_dims("KVCacheSpec", head_dim=self.head_dim, page_size=self.page_size, value_dim=self.v_dim)
        _check_dims("KVCacheSpec", window=1 if self.window is None else self.window, sink_tokens=self.sink_tokens + 1)
        _check_word("KVCacheSpec.dtype", self.dtype, FLOATS)
        _check_word("KVCacheSpec.scales", self.scales, KV_SCALES)
        self._check_relations()

    def _check_relations(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueDecodeError("KVCacheSpec.num_heads", f"{self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.keys.grouped and self.page_size % KV_GROUP:
            found = f"{self.page_size} is not a multiple of {KV_GROUP}, the tokens that share a scale of {self.keys} keys"
            raise ValueDecodeError("KVCacheSpec.page_size", found)
        if self.sink_tokens and self.window is None:
            raise ValueDecodeError("KVCacheSpec.sink_tokens", f"{self.sink_tokens} without a window", "all tokens are visible without one")
        if self.soft_cap is not None and not positive(self.soft_cap):
            raise ValueDecodeError("KVCacheSpec.soft_cap", f"{self.soft_cap!r:.40} is not positive", "leave it out for no cap")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise ValueDecodeError("KVCacheSpec.seed", f"{self.seed!r:.40} is not between 0 and 2**63 - 1")
        for scheme, dim in ((self.keys, self.head_dim), (self.values, self.v_dim)):
            if scheme.bits is not None:
                scheme.sections(dim)

    @property
    def output(self) -> str:
        return self.dtype

    @property
    def v_dim(self) -> int:
        """Channels of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def token_bytes(self) -> float:
        """Bytes of one token's keys and values of all heads, scales that tokens carry included."""
        return self.num_kv_heads * (self.keys.vector_bytes(self.head_dim) + self.values.vector_bytes(self.v_dim))

    def __str__(self) -> str:
        size = str(self.head_dim) if self.v_dim == self.head_dim else f"{self.head_dim}/{self.v_dim}"
        parts = [f"kv {self.num_heads}/{self.num_kv_heads} heads x{size} page {self.page_size} k={self.keys} v={self.values}"]
        parts += [f"{self.scales} scales"] if self.keys.scaled or self.values.scaled else []
        parts += [f"window {self.window}"] if self.window is not None else []
        parts += [f"{self.sink_tokens} sink tokens"] if self.sink_tokens else []
        parts += ["+sinks"] * self.sinks + ([f"soft cap {self.soft_cap:g}"] if self.soft_cap is not None else [])
        return " ".join((*parts, self.dtype))


Spec = LinearSpec | MoESpec | EmbeddingSpec | KVCacheSpec
_SPECS: dict[str, type[LinearSpec | MoESpec | EmbeddingSpec | KVCacheSpec]] = {
    "linear": LinearSpec, "moe": MoESpec, "embedding": EmbeddingSpec, "kv": KVCacheSpec,
}  # fmt: skip


def spec_to_json(spec: Spec) -> JsonValue:
    """The spec's fields with its ``op``."""
    return to_json(spec)


def spec_from_json(data: JsonValue) -> Spec:
    """Inverse of :func:`spec_to_json`.

    Raises:
        ValueDecodeError: unknown op, unknown field, wrong type.
    """
    op = data.get("op") if isinstance(data, dict) else data
    if not isinstance(op, str) or op not in _SPECS or not isinstance(data, dict):
        raise ValueDecodeError("spec.op", f"{op!r} is unknown", f"use one of {', '.join(_SPECS)}")
    return from_json(_SPECS[op], data)
