"""The calls into Humming: its layer configuration, its re-laying of weights, its compiled tiles and its launcher."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal_backend_cuda.providers.humming.recipes import INSTALL
from hal_backend_cuda.providers.humming.tables import BlockTable, joined
from hal_backend_cuda.providers.steps import Sorted
from hal_core.dtypes import torch_dtype
from hal_core.errors import MissingDependencyError
from hal_core.op_parts import FixedBuffers
from hal_core.triton.repeat import called

if TYPE_CHECKING:
    from hal_backend_cuda.providers.humming.recipes import Recipe
    from hal_backend_cuda.providers.humming.tables import Row
    from hal_core.schemes import WeightScheme
    from hal_core.triton.launch import Epilogue

__all__ = ["HummingMatrix", "Problem", "compile_dense", "compile_experts", "library", "quantize_rows"]

#: Counters of Humming's split sums; one set for each matrix, since matrices may run side by side on streams.
_LOCKS = 2048


@functools.cache
def library() -> SimpleNamespace:
    """Humming's modules.

    Raises:
        MissingDependencyError: it is not installed, or something that it imports is not.
    """
    try:
        from humming import ops
        from humming.kernel.humming import HummingKernel
        from humming.schema import HummingInputSchema, HummingWeightSchema
        from humming.transform import prepare_layer_config, transform_humming_tensors
        from humming.tune import get_heuristics_config
    except ImportError as error:
        raise MissingDependencyError("kernels of humming", f"{error}", INSTALL) from error
    return SimpleNamespace(
        ops=ops, kernel=HummingKernel, inputs=HummingInputSchema, weights=HummingWeightSchema, configure=prepare_layer_config,
        transform=transform_humming_tensors, heuristics=get_heuristics_config, launcher=lambda: torch.ops.humming.launch_kernel.out,
    )  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One product ``[n, k]``; experts is 0 for a dense one. stacked: of two matrices, one below the other. grouped: of rows in groups."""

    recipe: Recipe
    scheme: WeightScheme
    n: int
    k: int
    dtype: str
    bias: bool
    experts: int = 0
    stacked: bool = False
    grouped: bool = False

    def configuration(self, device: torch.device | int) -> Any:
        """Humming's LayerConfig for this problem on a device."""
        lib, recipe = library(), self.recipe
        weights = lib.weights(**recipe.weight_words(self.scheme, self.stacked))
        inputs = lib.inputs(a_dtype=recipe.operand(self.dtype), input_scale_group_size=recipe.input_group)
        return lib.configure(
            shape_n=self.n, shape_k=self.k, weight_schema=weights, input_schema=inputs, num_experts=self.experts or None,
            has_bias=self.bias, torch_dtype=torch_dtype(self.dtype), device=device,
        )  # fmt: skip

    @property
    def gemm(self) -> str:
        if self.grouped:
            return "grouped_contiguous"
        return "indexed" if self.experts else "dense"

    def table(self, configuration: Any, device: torch.device | int) -> list[Row]:
        """Humming's own choice of tiles by number of rows."""
        return [tuple(row) for row in library().heuristics(configuration, gemm_type=self.gemm, device=device)]


class HummingMatrix(FixedBuffers):
    """Weights as Humming's kernels read them, and their launch. Buffers keep their addresses over :meth:`refill`."""

    def __init__(self, problem: Problem, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        device = tensors["weight"].device
        self.problem, self.configuration = problem, problem.configuration(device)
        for name, tensor in library().transform(self.configuration, tensors).items():
            self.register_buffer(name, tensor)
        self.register_buffer("locks", torch.zeros(_LOCKS, dtype=torch.int32, device=device), persistent=False)
        self.tiles: Tensor | None = None
        self.run: Any = None

    def refill(self, tensors: dict[str, Tensor]) -> None:
        """Other weights of the same scheme and shape into the same storage."""
        for name, tensor in library().transform(self.configuration, tensors).items():
            self._buffers[name].copy_(tensor)

    def compile(self, rows: list[Row]) -> None:
        """Build the table's tiles, and load each on the device, so that a first call under graph capture loads nothing."""
        device = self._buffers["weight"].device
        words = json.dumps({"gemm_type": self.problem.gemm})
        self.tiles = library().kernel.prepare_kernels(self.configuration.to_str(), words, rows, device)
        # there once the first tile is registered
        self.run = library().launcher()
        for pair in sorted({tuple(pair) for pair in self.tiles.view(-1, 4)[:, 2:].tolist()}):
            self._load(torch.tensor(pair, dtype=torch.int64))

    def _load(self, tile: Tensor) -> None:
        """Run one tile on one row that nobody reads."""
        p, device = self.problem, self._buffers["weight"].device
        x = torch.zeros(1, p.k, dtype=torch_dtype(p.dtype), device=device)
        codes, scales = quantize_rows(p.recipe, x)
        out = torch.empty(1, p.n, dtype=x.dtype, device=device)
        empty = [torch.zeros(size, dtype=torch.int32, device=device) for size in (256, 256, 1, p.experts + 1)]
        order = empty[3] if p.grouped else Sorted(*empty[:3]) if p.experts else None
        self.launch(codes, scales, out, order, tile=tile)

    def launch(
        self, x: Tensor, scales: Tensor | None, out: Tensor, rows: Sorted | Tensor | None = None, top_k: int = 1,
        tile: Tensor | None = None,
    ) -> None:  # fmt: skip
        """``x [M, K]`` to ``out [M * top_k, N]``; nothing waits. rows: sorted, or the bounds of their groups.

        Nothing is allocated but a small buffer of descriptors, by Humming, for groups of rows whose tile stores by them.
        """
        own = self._buffers
        order = (rows.ids, rows.experts, rows.padded, None) if isinstance(rows, Sorted) else (None, None, None, rows)
        called(
            self.run, self.tiles if tile is None else tile, x, own["weight"], own["weight_scale"], own.get("weight_scale_2"), scales, None,
            own.get("zero_point"), own.get("bias"), out, *order, own["locks"], top_k, 0, kernel=True,
        )  # fmt: skip


def quantize_rows(recipe: Recipe, x: Tensor, gate: Tensor | None = None, epilogue: Epilogue | None = None) -> tuple[Tensor, Tensor | None]:
    """Rows of activations as the recipe's products take them: ``(codes, scales [M, 1] or [M, K / group])``, or ``(x, None)``.

    gate, epilogue: of a recipe that quantizes, the activation of both, as this project's quantizers take it.
    """
    if recipe.quant is None:
        return x, None
    # Humming's own make numbers of NaN
    from hal_core.triton.launch import quantize_fp8, quantize_int8

    source = {} if epilogue is None else {"gate": gate, "epilogue": epilogue}
    if recipe.quant.dtype == "int8":
        codes, scales = quantize_int8(x, **source)
        return codes, scales[:, None]
    return quantize_fp8(x, recipe.input_group or None, **source)


def compile_dense(matrix: HummingMatrix) -> None:
    """Build a dense product's tiles."""
    matrix.compile(matrix.problem.table(matrix.configuration, matrix.locks.device))


def compile_experts(first: HummingMatrix, second: HummingMatrix) -> BlockTable:
    """Build the tiles of both products of experts over common blocks of rows; returns the blocks."""
    left, right = (m.problem.table(m.configuration, m.locks.device) for m in (first, second))
    left, right = joined(left, right)
    first.compile(left)
    second.compile(right)
    return BlockTable.of(left)
