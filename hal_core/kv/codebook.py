"""Codebooks of the rotated quantizers, solved from the law of a rotated unit vector's coordinate, never tabulated.

A coordinate of a vector spread evenly over the unit sphere in ``dim`` dimensions has density proportional to
``(1 - t^2)^((dim - 3) / 2)``. The codebook is the scalar quantizer with the least mean square error under it (Lloyd 1982, Max 1960).
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from hal_core.errors import ShapeError

__all__ = ["codebook", "distortion", "midpoints", "solve"]

_CPU = torch.device("cpu")
_NODES = 160
_MOST_STEPS = 60


@functools.cache
def _quadrature() -> tuple[Tensor, Tensor]:
    """Nodes and weights of the Gauss-Legendre rule on [0, 1], by the eigenvalues of its Jacobi matrix (Golub and Welsch 1969)."""
    i = torch.arange(1, _NODES, dtype=torch.float64)
    off = i / (4 * i * i - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return (nodes + 1) / 2, vectors[0] ** 2


class _Law:
    """The coordinate's law over the angle ``a`` with ``t = sin a``: density proportional to ``cos(a)^(dim - 2)``, smooth for every dim."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        # Beyond this angle less than 1e-20 of the mass is left, and a narrow law would be missed by the quadrature.
        self.end = min(math.pi / 2, 14 / math.sqrt(dim))
        ends = torch.tensor([-self.end, 0.0, self.end], dtype=torch.float64)
        self.total = float(self._integrals(ends[:-1], ends[1:])[0].sum())

    def _integrals(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Of 1 and of t; the latter's closed form would cancel in the far cells."""
        nodes, weights = _quadrature()
        at = low[:, None] + (high - low)[:, None] * nodes
        density = at.cos() ** (self.dim - 2) * (high - low)[:, None]
        return density @ weights, (density * at.sin()) @ weights

    def cells(self, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mass and first moment of each cell between the edges ``[n - 1]`` (as t), and the density of t at each edge."""
        end = torch.tensor([self.end], dtype=torch.float64)
        angles = torch.cat((-end, edges.clamp(-1, 1).asin(), end))
        mass, moment = self._integrals(angles[:-1], angles[1:])
        return mass / self.total, moment / self.total, (1 - edges.square()).clamp(min=0) ** ((self.dim - 3) / 2) / self.total


@functools.cache
def solve(bits: int, dim: int) -> Tensor:
    """float64 ``[2^bits]``, rising and symmetric: the optimal codebook for a coordinate of a unit vector of ``dim`` channels.

    Newton's method on the stationarity of the mean square error, after steps of Lloyd's; the result moves by less than 1e-12 a step.
    """
    if not 0 <= bits <= 8 or dim < 4:
        raise ShapeError(f"codebook of {bits} bits for {dim} channels", "out of range", "give 0 to 8 bits and at least 4 channels")
    law, count = _Law(dim), 1 << bits
    if bits == 0:
        return torch.zeros(1, dtype=torch.float64)
    levels = _start(count, dim)
    for _ in range(5):
        mass, moment, _density = law.cells((levels[1:] + levels[:-1]) / 2)
        levels = moment / mass
    for _ in range(_MOST_STEPS):
        step = _newton_step(law, levels)
        levels = _kept_rising(levels, step)
        if float(step.abs().max()) < 1e-12:
            return (levels - levels.flip(0)) / 2
    raise ShapeError(f"codebook of {bits} bits for {dim} channels", "did not converge", "report this")


def _start(count: int, dim: int) -> Tensor:
    """Where a fine quantizer puts its levels: evenly under the cube root of the density (Panter and Dite 1951)."""
    grid = torch.linspace(-1, 1, 200_001, dtype=torch.float64)
    below = ((1 - grid.square()) ** ((dim - 3) / 6)).cumsum(0)
    wanted = (torch.arange(count, dtype=torch.float64) + 0.5) / count * below[-1]
    return grid[torch.searchsorted(below, wanted)]


def _newton_step(law: _Law, levels: Tensor) -> Tensor:
    """The step for ``level * mass - moment = 0`` in every cell; edges are midpoints, so the derivative is tridiagonal."""
    edges = (levels[1:] + levels[:-1]) / 2
    mass, moment, density = law.cells(edges)
    half = density / 2
    upper, lower = half * (levels[:-1] - edges), half * (edges - levels[1:])
    slope = torch.diag(mass)
    slope += torch.diag(torch.cat((upper, upper.new_zeros(1)))) + torch.diag(torch.cat((lower.new_zeros(1), lower)))
    slope += torch.diag(upper, 1) + torch.diag(lower, -1)
    step: Tensor = torch.linalg.solve(slope, levels * mass - moment)
    return -step


def _kept_rising(levels: Tensor, step: Tensor) -> Tensor:
    for _ in range(40):
        moved = levels + step
        if bool((moved[1:] > moved[:-1]).all()) and float(moved.abs().max()) < 1:
            return moved
        step = step / 2
    return levels


@functools.cache
def distortion(bits: int, dim: int) -> float:
    """Least mean square error of a unit vector of ``dim`` channels, each coordinate in ``bits`` bits."""
    levels = solve(bits, dim)
    mass, moment, _ = _Law(dim).cells((levels[1:] + levels[:-1]) / 2)
    return 1.0 + dim * float((levels.square() * mass - 2 * levels * moment).sum())


@functools.cache
def codebook(bits: int, dim: int, device: torch.device = _CPU) -> Tensor:
    """float32 ``[2^bits]``, rising: :func:`solve`, rounded; not to be written to."""
    return solve(bits, dim).float().to(device)


@functools.cache
def midpoints(bits: int, dim: int, device: torch.device = _CPU) -> Tensor:
    """float32 ``[2^bits - 1]``: a coordinate's code is the number of midpoints below it (strictly); not to be written to.

    The mean of two neighbours of :func:`codebook`, in float32.
    """
    levels = codebook(bits, dim)
    return ((levels[1:] + levels[:-1]) * 0.5).to(device)
