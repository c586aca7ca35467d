"""Problems for the Triton kernels, with their truth in float64: the same ones for the interpreter and for a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.numerics import Numerics
from hal_core.schemes import WeightScheme
from hal_core.spec import Activation, MoESpec
from hal_core.testing import truth
from hal_core.testing.data import random_input, random_weight, to_device
from hal_core.triton import ops
from hal_core.triton.launch import FloatMatrix, IntegerMatrix
from hal_core.triton.layout import StepMatrix

#: Relative L2 distance of kernels that are exact up to the rounding of outputs and of what lies between two products.
BOUND = {"bf16": 6e-3, "fp16": 2e-3}
#: e4m3 holds 4 significant bits: each of two operands rounds by up to 2**-4, about 2.6e-2 of an element in the L2 sense.
FP8_BOUND = 6e-2


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """NaN, where something was not written, is never within a bound."""
    return float((found.double() - wanted).norm() / wanted.norm())


def matrix(weight, bias=None):
    """A canonical weight as its kernel takes it."""
    scheme = weight.scheme
    if scheme.dtype.startswith("int"):
        return IntegerMatrix.of(StepMatrix(weight).to(weight.device), bias)
    if not scheme.quantized:
        return FloatMatrix(weight.values, None, bias)
    scales = weight.scales.float()
    block = scheme.granularity.block
    return FloatMatrix(weight.values, scales if block else scales.expand(*weight.shape[:-1], 1).squeeze(-1).contiguous(), bias, block)


@dataclass
class Linear:
    """One linear: random weights, inputs with outliers."""

    scheme: str
    n: int
    k: int
    m: int
    dtype: str = "bf16"
    bias: bool = False

    def run(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        rng = torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())
        weight = to_device(random_weight(WeightScheme.parse(self.scheme), (self.n, self.k), rng), torch.device(device))
        bias = torch.randn(self.n, generator=rng).to(device) if self.bias else None
        x = random_input((self.m, self.k), rng, self.dtype, outliers=True).to(device)
        out = torch.full((self.m, self.n), float("nan"), dtype=x.dtype, device=device)
        packed = matrix(weight, bias)
        if isinstance(packed, IntegerMatrix):
            ops.integer_linear(x, packed, out)
        else:
            ops.float_linear(x, packed, out)
        return out, truth.linear(LinearWeights(weight, bias), x)


@dataclass
class Block:
    """One block of experts. wrong: an id out of range stands in the middle."""

    scheme: str
    hidden: int
    inner: int
    tokens: int
    experts: int = 6
    top_k: int = 3
    activation: Activation = field(default_factory=Activation)
    dtype: str = "bf16"
    gated: bool = True
    bias: bool = False
    mapped: bool = False
    router_on_input: bool = False
    scaling: float = 1.0
    reduce: bool = True
    wrong: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(torch.randint(1 << 30, ()).item())
        scheme = WeightScheme.parse(self.scheme)
        local = max(1, self.experts // 2) if self.mapped else self.experts
        self.spec = MoESpec(
            self.experts, self.top_k, self.hidden, self.inner, scheme, scheme, scheme if self.gated else None, self.activation, None,
            Numerics(), self.dtype, routed_scaling=self.scaling, router_weight_on_input=self.router_on_input, bias=self.bias,
            expert_map=self.mapped, local_experts=local,
        )  # fmt: skip
        names = ("gate", "up", "down") if self.gated else ("up", "down")
        shapes = {n: (self.hidden, self.inner) if n == "down" else (self.inner, self.hidden) for n in names}
        weights = {n: to_device(random_weight(scheme, (local, *s), rng), torch.device(self.device)) for n, s in shapes.items()}
        biases = {f"{n}_bias": torch.randn(local, s[0], generator=rng).to(self.device) for n, s in shapes.items()} if self.bias else {}
        self.weights = MoEWeights(**weights, **biases)
        self.x = random_input((self.tokens, self.hidden), rng, self.dtype, outliers=True).to(self.device)
        ids = torch.randint(0, self.experts, (self.tokens, self.top_k), generator=rng).to(torch.int32)
        ids[torch.rand(ids.shape, generator=rng) < 0.1] = -1
        self.scores = (torch.rand(ids.shape, generator=rng) + 0.05).to(self.device)
        self.map = None
        if self.mapped:
            mapping = torch.full((self.experts,), -1, dtype=torch.int32)
            mapping[torch.randperm(self.experts, generator=rng)[:local]] = torch.arange(local, dtype=torch.int32)
            self.map = mapping.to(self.device)
        self.good = ids.to(self.device)
        self.ids = self.good.clone()
        if self.wrong:
            self.ids[self.tokens // 2, 0] = self.experts + 3
            self.good[self.tokens // 2, 0] = -1

    def made(self) -> ops.Experts:
        """The matrices as the kernels take them."""
        parts = {n: matrix(w, getattr(self.weights, f"{n}_bias")) for n in ("up", "down", "gate") if (w := getattr(self.weights, n))}
        act = self.activation
        return ops.Experts(
            parts["up"], parts["down"], parts.get("gate"), act.kind, 1.702 if act.alpha is None else act.alpha, act.limit, self.experts,
            self.spec.local, self.scaling, self.router_on_input,
        )  # fmt: skip

    def run(self, tiles=None) -> torch.Tensor:
        shape = (self.tokens, self.hidden) if self.reduce else (self.tokens, self.top_k, self.hidden)
        out = torch.full(shape, float("nan"), dtype=self.x.dtype, device=self.device)
        return ops.moe(self.x, self.ids, self.scores, self.map, self.made(), out, tiles)

    def truth(self) -> torch.Tensor:
        slots = truth.experts(self.spec, self.weights, self.x, self.good, self.scores, self.map) * self.scaling
        return slots.sum(1) if self.reduce else slots

    @property
    def bound(self) -> float:
        return FP8_BOUND if self.scheme.startswith("fp8") else BOUND[self.dtype]


LINEARS = tuple(
    Linear(scheme, n, k, m, dtype, bias)
    for scheme, n, k, m, dtype, bias in (
        ("int4:g32", 33, 131, 3, "bf16", True),
        ("int4:g128:zero", 128, 256, 17, "fp16", False),
        ("int4:g64", 70, 192, 5, "bf16", False),
        ("int4:channel:min", 64, 96, 1, "bf16", True),
        ("int4:g32:zero:act_order", 65, 160, 4, "bf16", False),
        ("int4:tensor", 17, 128, 2, "fp16", True),
        ("int4:g96", 40, 200, 6, "bf16", False),
        ("int4:g256", 40, 600, 6, "bf16", False),
        ("int8:channel", 33, 131, 20, "fp16", False),
        ("int8:g64:min", 128, 256, 3, "bf16", False),
        ("int8:g32:zero", 31, 100, 33, "bf16", True),
        ("int8:g128", 1, 64, 7, "fp16", False),
        ("bf16", 40, 72, 19, "bf16", True),
        ("fp8_e4m3:b128x128", 160, 200, 5, "bf16", False),
        ("fp8_e4m3:channel", 65, 130, 18, "bf16", True),
    )
)

BLOCKS = (
    {"scheme": "int4:g32", "hidden": 64, "inner": 96, "tokens": 9, "wrong": True},
    {"scheme": "int4:g32", "hidden": 64, "inner": 96, "tokens": 2, "wrong": True},
    {"scheme": "int4:g32", "hidden": 64, "inner": 96, "tokens": 2, "wrong": True, "reduce": False},
    {"scheme": "int4:g128:zero", "hidden": 128, "inner": 128, "tokens": 16, "bias": True, "reduce": False,
     "activation": Activation("gelu", limit=0.6)},
    {"scheme": "int8:channel", "hidden": 40, "inner": 72, "tokens": 33, "bias": True, "mapped": True, "scaling": 2.5, "dtype": "fp16",
     "activation": Activation("swiglu_oai", limit=7.0)},
    {"scheme": "int4:g32:min", "hidden": 33, "inner": 17, "tokens": 5, "gated": False, "router_on_input": True,
     "activation": Activation("relu2")},
    {"scheme": "int4:g64", "hidden": 128, "inner": 64, "tokens": 31, "gated": False, "activation": Activation("gelu_tanh")},
    {"scheme": "int4:g32:zero:act_order", "hidden": 64, "inner": 64, "tokens": 7, "activation": Activation("swiglu_oai", alpha=1.2)},
    {"scheme": "bf16", "hidden": 128, "inner": 48, "tokens": 20, "bias": True, "mapped": True},
    {"scheme": "bf16", "hidden": 64, "inner": 96, "tokens": 4, "reduce": False, "scaling": 0.5},
    {"scheme": "fp8_e4m3:b128x128", "hidden": 128, "inner": 256, "tokens": 7},
    {"scheme": "fp8_e4m3:channel", "hidden": 128, "inner": 130, "tokens": 12},
)  # fmt: skip
