"""A plain torch loop over tokens and slots, float64: what the native experts op must equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cpu.native_cases import Matrix, make
from torch import Tensor
from torch.nn import functional

from hal_backend_cpu import _native


@dataclass
class Experts:
    """Weights of all experts and how they are used."""

    gate: Matrix | None
    up: Matrix
    down: Matrix
    activation: str = "silu"
    alpha: float | None = None
    limit: float | None = None
    scaling: float = 1.0
    on_input: bool = False
    perms: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    expert_map: Tensor | None = None

    def arguments(self, x: Tensor, ids: Tensor, weights: Tensor, *, reduce: bool = True, isa: str = "auto") -> list[object]:
        none = [None] * 6
        parts: list[object] = []
        for m, perm, bias in zip((self.gate, self.up, self.down), self.perms, self.biases, strict=True):
            parts += none if m is None else [*m.packed, perm, bias]
        gate = self.gate or self.up
        return [
            x, ids, weights, *parts, self.expert_map, self.up.values.shape[0], self.up.n,
            gate.group, self.up.group, self.down.group, gate.bits, self.up.bits, self.down.bits,
            self.activation, self.alpha, self.limit, self.scaling, self.on_input, reduce, isa,
        ]  # fmt: skip

    def native(self, x, ids, weights, *, reduce=True, isa="auto") -> Tensor:
        return _native.ops.moe(*self.arguments(x, ids, weights, reduce=reduce, isa=isa))

    def truth(self, x, ids, weights, *, reduce=True) -> Tensor:
        matrices = [None if m is None else m.weight() for m in (self.gate, self.up, self.down)]
        out = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float64)
        for t, row in enumerate(ids.tolist()):
            for slot, global_id in enumerate(row):
                e = global_id if global_id < 0 or self.expert_map is None else int(self.expert_map[global_id])
                if e < 0:
                    continue
                weight = weights[t, slot].double()
                rows = x[t].double() * (weight if self.on_input else 1)
                y = self._expert(matrices, e, rows)
                out[t, slot] = y if self.on_input else y * weight
        return (out.sum(1) if reduce else out) * self.scaling

    def _expert(self, matrices, e, x):
        def product(i, v):
            perm, bias = self.perms[i], self.biases[i]
            y = (v if perm is None else v[perm[e].long()]) @ matrices[i][e].T
            return y if bias is None else y + bias[e].double()

        up = product(1, x)
        gate = None if matrices[0] is None else product(0, x)
        return product(2, self._activate(gate, up))

    def _activate(self, gate, up):
        if self.limit is not None:
            up = up.clamp(-self.limit, self.limit)
            gate = None if gate is None else gate.clamp(max=self.limit)
        if self.activation == "swiglu_oai":
            return (up + 1) * gate * torch.sigmoid((1.702 if self.alpha is None else self.alpha) * gate)
        g = up if gate is None else gate
        y = {
            "silu": lambda: g * torch.sigmoid((1.0 if self.alpha is None else self.alpha) * g),
            "gelu": lambda: functional.gelu(g),
            "gelu_tanh": lambda: functional.gelu(g, approximate="tanh"),
            "relu2": lambda: functional.relu(g).square(),
        }[self.activation]()
        return y if gate is None else y * up


def experts(count=6, hidden=96, inner=72, bits=4, zero="zeros", group=24, *, gated=True, **rest) -> Experts:
    gate = make(inner, hidden, group, bits, zero, lead=(count,), seed=1) if gated else None
    up = make(inner, hidden, group, bits, zero, lead=(count,), seed=2)
    down = make(hidden, inner, group, bits, zero, lead=(count,), seed=3)
    return Experts(gate, up, down, **rest)


def routing(tokens, count, slots, seed=5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(count, generator=g)[:slots] for _ in range(tokens)]) if tokens else torch.zeros(0, slots)
    return ids.to(torch.int32), torch.rand(tokens, slots, generator=g) + 0.1
