"""Rotations of the rotated quantizers: orthogonal, made from a seed by arithmetic that every machine repeats.

A Hadamard matrix between two rounds of random signs: with one round or none a vector with a common offset, or one large channel,
keeps its structure and is quantized many times worse than a random one.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from hal_core.kv.codebook import distortion, solve

__all__ = ["hadamard", "mixed_seed", "projection_matrix", "random_signs", "rotation_matrix"]

_CPU = torch.device("cpu")
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
#: Attempts at a rotation, and what one may cost for structured vectors, in multiples of the optimum.
_ATTEMPTS, _LIMIT = 256, 1.2
#: Orders of Hadamard matrices by Paley's construction (order minus one is prime and 3 mod 4), beside the powers of two.
_PALEY = (12, 20, 24, 44, 48)


def _splitmix(x: int) -> int:
    """One output of SplitMix64 (Steele, Lea and Flood 2014) for state ``x``."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mixed_seed(seed: int, *words: int) -> int:
    """A seed for one of many uses of ``seed``, told apart by small numbers."""
    for word in words:
        seed = _splitmix((seed ^ _splitmix(word)) & _MASK)
    return seed


def random_signs(count: int, seed: int) -> Tensor:
    """float64 ``[count]`` of +1 and -1: the top bits of SplitMix64's outputs from state ``seed``."""
    return torch.tensor([1.0 - 2.0 * (_splitmix((seed + i * _GOLDEN) & _MASK) >> 63) for i in range(count)], dtype=torch.float64)


def _uniform(count: int, seed: int) -> Tensor:
    """float64 ``[count]`` in (0, 1)."""
    return torch.tensor([((_splitmix((seed + i * _GOLDEN) & _MASK) >> 11) + 0.5) / (1 << 53) for i in range(count)], dtype=torch.float64)


def _normal(rows: int, columns: int, seed: int) -> Tensor:
    """float64 ``[rows, columns]`` of standard normal numbers (Box and Muller 1958)."""
    count = rows * columns
    u = _uniform(2 * count, seed)
    return ((-2 * u[:count].log()).sqrt() * (2 * math.pi * u[count:]).cos()).reshape(rows, columns)


def _paley(order: int) -> Tensor:
    q = order - 1
    squares = {i * i % q for i in range(1, q)}
    character = [0.0] + [1.0 if i in squares else -1.0 for i in range(1, q)]
    skew = torch.zeros(order, order, dtype=torch.float64)
    skew[0, 1:], skew[1:, 0] = 1.0, -1.0
    skew[1:, 1:] = torch.tensor([[character[(j - i) % q] for j in range(q)] for i in range(q)], dtype=torch.float64)
    return skew + torch.eye(order, dtype=torch.float64)


@functools.cache
def hadamard(dim: int) -> Tensor | None:
    """float64 ``[dim, dim]`` of +1 and -1 with orthogonal rows, or None where this construction has none of that order.

    Sylvester's for powers of two; else a power of two times Paley's of order 12, 20, 24, 44 or 48.
    """
    for base in (1, *_PALEY):
        if dim % base == 0 and (dim // base).bit_count() == 1:
            matrix = torch.ones(1, 1, dtype=torch.float64) if base == 1 else _paley(base)
            pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
            for _ in range((dim // base).bit_length() - 1):
                matrix = torch.kron(pair, matrix)
            return matrix
    return None


def _candidate(dim: int, seed: int, attempt: int) -> Tensor:
    """float64 ``[dim, dim]``, orthogonal."""
    matrix = hadamard(dim)
    if matrix is None:
        factor, triangle = torch.linalg.qr(_normal(dim, dim, mixed_seed(seed, 3, attempt)))
        turned: Tensor = factor * triangle.diagonal().sign()
        return turned
    first, second = (random_signs(dim, mixed_seed(seed, word, attempt)) for word in (1, 2))
    return (matrix * second) @ (matrix * first) / dim


def _excess(matrix: Tensor) -> float:
    """Cost of the image of a constant vector, or of single channels, over the optimum: the worst of 1 to 4 bits, corrected norm or not."""
    dim, worst = len(matrix), 0.0
    images = torch.cat((matrix.sum(1, keepdim=True).T / math.sqrt(dim), matrix.T))
    for bits in (1, 2, 3, 4):
        levels = solve(bits, dim)
        read = levels[torch.bucketize(images, (levels[1:] + levels[:-1]) / 2)]
        lengths: Tensor = torch.linalg.vector_norm(read, dim=1, keepdim=True)
        for each in (read, read / lengths):
            error = (images - each).square().sum(1) / distortion(bits, dim)
            worst = max(worst, float(error[0]), float(error[1:].mean()))
    return worst


@functools.lru_cache(maxsize=256)
def rotation_matrix(dim: int, seed: int, device: torch.device = _CPU) -> Tensor:
    """float32 ``[dim, dim]``, orthogonal; a vector x becomes ``R @ x``. Not to be written to.

    ``R = H diag(s2) H diag(s1) / dim`` with a Hadamard matrix H and signs from ``mixed_seed(seed, 1, i)`` and ``(seed, 2, i)``; where there
    is no such H, the orthogonal factor of a random normal matrix, its diagonal made positive (uniform over rotations, Mezzadri 2007). A
    single direction may be unlucky in any rotation, and with a Hadamard matrix all single channels share their luck: ``i`` is the first
    attempt, of :data:`_ATTEMPTS`, in which neither a constant vector nor single channels cost over :data:`_LIMIT` times the optimum.
    """
    best, excess = None, math.inf
    for attempt in range(_ATTEMPTS):
        matrix = _candidate(dim, seed, attempt)
        found = _excess(matrix) if dim >= 4 else 0.0
        if found < excess:
            best, excess = matrix, found
        if excess <= _LIMIT:
            break
    assert best is not None  # the first attempt is one
    return best.float().to(device)


@functools.lru_cache(maxsize=256)
def projection_matrix(dim: int, seed: int, device: torch.device = _CPU) -> Tensor:
    """float32 ``[dim, dim]`` with independent random rows of length one, for the signs of a residual. Not to be written to."""
    rows = _normal(dim, dim, mixed_seed(seed, 4))
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return (rows / lengths).float().to(device)
