"""Peer: torch's own ops. Variants: `int4` (`_weight_int4pack_mm_for_cpu`), `bf16` (oneDNN where torch has it)."""

from __future__ import annotations

import sys
from typing import Any

import torch
from runner import Matrix, Peer, Problem, bf16, gated, loop_over_experts, nbytes, serve
from torch import Tensor

aten = torch.ops.aten
#: oneDNN lays bf16 weights out in blocks where it multiplies bf16 itself.
PREPACK = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class TorchOps(Peer):
    def __init__(self, variant: str) -> None:
        self.variant = variant

    def prepare(self, problem: Problem) -> dict[str, Any]:
        self.problem = problem
        problem.need(problem.dtype == "bf16", f"is run with bf16 activations, not {problem.dtype}")
        if self.variant == "int4":
            problem.need_int4()
            problem.need(problem.group in (32, 64, 128, 256), f"serves groups of 32, 64, 128 and 256, not {problem.group}")
        parts = problem.matrices()
        if problem.op == "moe":
            gate, up, down = (parts[name] for name in ("gate", "up", "down"))
            experts = range(problem.experts)
            one = [(self.packed(gate.expert(e), up.expert(e)), self.packed(down.expert(e))) for e in experts]
        else:
            one = [(self.packed(parts["weight"]), ())]
        size = problem.parameters * 2 if self.variant == "bf16" else sum(nbytes(*a, *b) for a, b in one)
        self.copies = problem.copies_of(size)
        self.sets = [one] + [[(copied(a), copied(b)) for a, b in one] for _ in range(self.copies - 1)]
        names = {"int4": "_weight_int4pack_mm", "bf16": "bf16 linear"}
        return {"name": names[self.variant], "numerics": "exact", "kind": "float", "weight_bytes": size / problem.experts}

    def packed(self, *stacked: Matrix) -> tuple[Tensor, ...]:
        """One matrix of the rows of all of them."""
        if self.variant == "bf16":
            w = torch.cat([m.dequantized() for m in stacked]).to(bf16)
            return (torch.ops.mkldnn._reorder_linear_weight(w) if PREPACK else w,)
        codes = torch.cat([m.codes for m in stacked])
        scales, zeros = torch.cat([m.scales for m in stacked]), torch.cat([m.zeros for m in stacked])
        low = (8 - zeros) * scales if stacked[0].mins is None else torch.cat([m.mins for m in stacked]) + 8 * scales
        pairs = torch.stack([scales.T, low.T], -1).to(bf16).contiguous()
        return aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1), pairs

    def product(self, weight: tuple[Tensor, ...], x: Tensor) -> Tensor:
        if self.variant == "bf16":
            if PREPACK:
                return torch.ops.mkldnn._linear_pointwise(x, weight[0], None, "none", [], "")
            return torch.nn.functional.linear(x, weight[0])
        return aten._weight_int4pack_mm_for_cpu(x, weight[0], self.problem.group, weight[1])

    def load(self, x: Tensor, ids: Tensor | None, scores: Tensor | None) -> None:
        self.x, self.ids, self.scores = x, ids, scores

    def bind(self, copy: int, routing: int):
        weights, x = self.sets[copy], self.x
        if self.ids is None:
            return lambda: self.product(weights[0][0], x)
        ids, scores = self.ids[routing], self.scores[routing]
        return lambda: loop_over_experts(x, ids, scores, lambda e, rows: gated(self.product, *weights[e], rows), len(weights))


def copied(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.clone() for t in tensors)


if __name__ == "__main__":
    serve(TorchOps(sys.argv[1]))
