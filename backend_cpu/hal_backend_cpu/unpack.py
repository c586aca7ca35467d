"""Reads checkpoints' packed words in one pass; the native library is loaded at the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CpuUnpacker"]


class CpuUnpacker:
    """The contract is ``hal_core.formats.unpack.Unpacker``."""

    name = "words"

    def codes(self, words: Tensor, order: str, bits: int, count: int, signed: bool) -> Tensor:
        from hal_backend_cpu import _native

        return _native.unpack_words(words, order, bits, count, signed=signed)

    def turn(self, matrix: Tensor) -> Tensor:
        from hal_backend_cpu import _native

        return _native.turn(matrix)
