"""Peer: auto-round-lib's linear on the CPU (`woqgemm`).

It takes fp32 activations: the conversion from bf16 and back is timed, as in its own module. Where it has no int8 kernel for the
processor it computes with floats instead, which its distance from the truth shows.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import torch
from runner import Peer, Problem, RefusedError, bf16, serve
from torch import Tensor


class Ark(Peer):
    def __init__(self, variant: str) -> None:
        self.compute = variant

    def prepare(self, problem: Problem) -> dict[str, Any]:
        problem.need(problem.op == "linear", "has no experts on the CPU")
        problem.need_int4()
        problem.need(problem.zero != "minimum", "serves integer zeros, no minimums")
        try:
            import auto_round_kernel as library
        except (ImportError, OSError) as error:
            raise RefusedError(f"its library does not load: {error}") from error
        self.problem, self.library = problem, library
        (m,) = problem.matrices().values()
        self.group, self.asymmetric = m.group, not m.symmetric
        codes = (m.codes.to(torch.int16) - 8).to(torch.int8).T.contiguous()
        zeros = (m.zeros - 8).to(torch.int8).T.contiguous() if self.asymmetric else torch.empty(0, dtype=torch.int8)
        scales = m.scales.T.contiguous()
        blob = library.repack_quantized_weight(codes, scales, zeros, m.group, self.compute, "int4", "fp32", self.asymmetric)
        self.copies = problem.copies_of(blob.numel() * blob.element_size())
        self.sets = [blob.clone() for _ in range(self.copies)]
        self.bias = torch.empty(0)
        versions = {"auto-round-lib": importlib.metadata.version("auto-round-lib")}
        numerics, kind = ("int8 activations allowed", "int8") if self.compute == "int8" else ("exact", "float")
        size = blob.numel() * blob.element_size()
        return {"name": f"woqgemm {self.compute}", "numerics": numerics, "kind": kind, "weight_bytes": size, "versions": versions}

    def load(self, x: Tensor, ids: Tensor | None, scores: Tensor | None) -> None:
        self.x = x.to(bf16)

    def bind(self, copy: int, routing: int):
        x, blob, p = self.x, self.sets[copy], self.problem
        arguments = (p.n, p.k, self.group, self.compute, "int4", "fp32", self.asymmetric)
        return lambda: self.library.woqgemm(x.float(), blob, self.bias, *arguments).to(bf16)


if __name__ == "__main__":
    serve(Ark(sys.argv[1]))
