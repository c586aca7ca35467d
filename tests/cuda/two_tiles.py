"""Humming with two tiles a product: its table for a shape has dozens, and each takes seconds to compile."""

from __future__ import annotations

from hal_backend_cuda.providers.humming import runtime

__all__ = ["table"]


def table(self, configuration, device):
    """In place of ``runtime.Problem.table``: one tile for few rows, one for many."""
    tile = {m: runtime.library().heuristics(configuration, shape_m=m, gemm_type=self.gemm, device=device) for m in (8, 600)}
    return [(0, 16, tile[8]), (16, 1 << 30, tile[600])]
