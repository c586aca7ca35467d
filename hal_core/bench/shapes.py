"""The shapes that ``hal bench`` knows by name, and those given by numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hal_core.errors import SettingError
from hal_core.numerics import Numerics
from hal_core.schemes import WeightScheme
from hal_core.spec import LinearSpec, MoESpec

__all__ = ["EXPERTS", "MATRICES", "ExpertsShape", "MatrixShape", "experts_shape", "matrix_shape", "parse_rows"]

#: No batch of a serving engine comes near; a larger number is a mistake.
_MAX_ROWS = 1 << 20


@dataclass(frozen=True)
class ExpertsShape:
    """A gated block of experts with SiLU; ``name`` is as the user gave it."""

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int

    def spec(self, scheme: WeightScheme, numerics: Numerics, dtype: str) -> MoESpec:
        return MoESpec(
            self.experts, self.top_k, self.hidden, self.intermediate, scheme, scheme, scheme, numerics=numerics, dtype=dtype
        )  # fmt: skip


@dataclass(frozen=True)
class MatrixShape:
    """A linear ``[n, k]``."""

    name: str
    n: int
    k: int

    def spec(self, scheme: WeightScheme, numerics: Numerics, dtype: str) -> LinearSpec:
        return LinearSpec(self.n, self.k, scheme, numerics=numerics, dtype=dtype)


#: From the models' published configurations: number of experts, hidden and intermediate size, experts of a token.
EXPERTS = {
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "deepseek-v3": (256, 7168, 2048, 8),
    "gpt-oss-20b": (32, 2880, 2880, 4),
    "mixtral": (8, 4096, 14336, 2),
    "small": (16, 1024, 512, 4),
}
#: Outputs and inputs: a square projection, and one to a wider feed-forward layer.
MATRICES = {"square": (4096, 4096), "wide": (12288, 4096)}


def experts_shape(text: str) -> ExpertsShape:
    """A name of :data:`EXPERTS`, or ``E,H,I,k``.

    Raises:
        SettingError: neither, or more experts of a token than there are.
    """
    sizes = EXPERTS.get(text) or _numbers(text, 4, f"one of {', '.join(EXPERTS)}, or E,H,I,k as in 128,2048,768,8")
    if sizes[3] > sizes[0]:
        raise SettingError(f"--shape {text}", f"{sizes[3]} experts of a token among {sizes[0]}", "give k no larger than E")
    return ExpertsShape(text, *sizes)


def matrix_shape(text: str) -> MatrixShape:
    """A name of :data:`MATRICES`, or ``N,K``.

    Raises:
        SettingError: neither.
    """
    return MatrixShape(text, *(MATRICES.get(text) or _numbers(text, 2, f"one of {', '.join(MATRICES)}, or N,K as in 4096,4096")))


def parse_rows(text: str) -> tuple[int, ...]:
    """Batch sizes of ``1,4,16``, in the order given, each once.

    Raises:
        SettingError: not whole numbers from 1 on.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 and 1 <= int(word) <= _MAX_ROWS for word in words):
        raise SettingError(f"--m {text}", f"not batch sizes between 1 and {_MAX_ROWS}", "give them as in 1,4,16")
    return tuple(dict.fromkeys(map(int, words)))


def _numbers(text: str, count: int, fix: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    good = len(words) == count and all(word.isascii() and word.isdigit() and len(word) < 10 and int(word) > 0 for word in words)
    if not good:
        raise SettingError(f"--shape {text}", "not understood", f"give {fix}")
    return tuple(map(int, words))
