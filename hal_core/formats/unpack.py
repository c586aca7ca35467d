"""Packed words in canonical order: in torch, which is the definition, or by the op of a backend, which must equal it bit for bit.

A backend's object may offer ``unpackers()``. The first installed one whose trial passes serves large tensors; one that raises, or
gives other bytes, is told once and not asked again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hal_core.formats.bitstream import byte_rows, canonical_codes, unpack_fields
from hal_core.formats.nibble_pairs import pair_rows
from hal_core.notes import say
from hal_core.turn import turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from hal_core.registry import RegisteredUnpacker

__all__ = ["ORDERS", "Unpacker", "torch_codes", "turned", "turned_fields", "turned_words", "unpacked"]

#: How words are packed, and what becomes of them. ``rows``: int32 ``[N, ceil(K*b/32)]``, a stream along each row. ``columns``:
#: int32 ``[K*b/32, N]``, a stream down each column, of whole words. ``awq``: int32 ``[K, N/8]``, 4 bits, columns interleaved.
ORDERS = ("rows", "columns", "awq")
#: Words of a tensor below which torch serves without asking for backends.
_LEAST = 1 << 16
_lock = threading.Lock()
#: By an unpacker's id and question: the unpacker, held so that its id is given to no other, and whether its trial passed.
_verdicts: dict[tuple[int, str], tuple[Unpacker, bool]] = {}


class Unpacker(Protocol):
    """What a backend may offer to readers of checkpoints; called with contiguous tensors on the CPU, at any address."""

    #: Letters, digits and underscores.
    name: str

    def codes(self, words: Tensor, order: str, bits: int, count: int, signed: bool) -> Tensor:
        """Canonical storage in fresh memory, equal to :func:`torch_codes`.

        Args:
            words: int32, packed as the order says.
            order: one of ``ORDERS``.
            bits: 2, 3, 4 or 8.
            count: K, the codes of a row of the result.
            signed: codes are stored plus half their range, and wanted as two's complement.
        """

    def turn(self, matrix: Tensor) -> Tensor:
        """``[R, C]`` of elements of 1, 2 or 4 bytes to a contiguous ``[C, R]`` in fresh memory."""


def torch_codes(words: Tensor, order: str, bits: int, count: int, signed: bool) -> Tensor:
    """The definition: nibble pairs uint8 ``[N, ceil(K/2)]`` for 4 bits, else ``[N, K]`` uint8, or int8 when signed; fresh memory."""
    if order == "rows":
        return canonical_codes(words, bits, count, signed)
    turned_words = pair_rows(words) if order == "awq" else turn(words)
    return canonical_codes(turned_words, bits, count, signed, reuse=True)


def unpacked(words: Tensor, order: str, bits: int, count: int, signed: bool) -> Tensor:
    """As :func:`torch_codes`, by a backend's op where there is one."""

    def ask(unpacker: Unpacker) -> Tensor:
        return unpacker.codes(words, order, bits, count, signed)

    def trial(unpacker: Unpacker) -> bool:
        # odd sizes, and more than a vector of them
        shape = {"rows": (37, -(-75 * bits // 32)), "columns": (9 * bits, 37), "awq": (75, 37)}[order]
        small = _random_words(shape)
        k = shape[0] * 32 // bits if order == "columns" else 75
        return _same(unpacker.codes(small, order, bits, k, signed), torch_codes(small, order, bits, k, signed))

    found = _asked(words, f"{order}:{bits}:{signed}", ask, trial)
    if found is not None:
        return found
    return torch_codes(words, order, bits, count, signed)


def turned(matrix: Tensor) -> Tensor:
    """``[R, C]`` to a contiguous ``[C, R]`` in fresh memory."""

    def trial(unpacker: Unpacker) -> bool:
        small = _random_words((37, 41 * matrix.itemsize)).view(torch.uint8)[:, : 41 * matrix.itemsize].contiguous().view(matrix.dtype)
        return _same(unpacker.turn(small), turn(small))

    found = _asked(matrix, f"turn:{matrix.dtype}", lambda unpacker: unpacker.turn(matrix), trial) if matrix.itemsize in (1, 2, 4) else None
    return turn(matrix) if found is None else found


def turned_fields(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 ``[G, ceil(N*b/32)]``, packed along each row, to the fields of each column, uint8 ``[N, G]``."""
    if bits not in (4, 8):
        return turned(unpack_fields(words, bits, count))
    return _split_rows(turned(byte_rows(words)), bits, count)


def turned_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 ``[ceil(N*b/32), G]``, packed along each column, to uint8 ``[N, G]``."""
    if bits not in (4, 8):
        return turned(unpack_fields(turned(words), bits, count))
    size, groups = words.shape
    return _split_rows(turn(byte_rows(words).view(size, groups, 4)).view(4 * size, groups), bits, count)


def _split_rows(rows: Tensor, bits: int, count: int) -> Tensor:
    """Of 4-bit fields each row of bytes makes two, the low nibbles first."""
    if bits == 4:
        both = torch.empty(rows.shape[0], 2, rows.shape[1], dtype=torch.uint8)
        torch.bitwise_and(rows, 15, out=both[:, 0])
        torch.bitwise_right_shift(rows, 4, out=both[:, 1])
        rows = both.flatten(0, 1)
    return rows if rows.shape[0] == count else rows[:count].clone()


def _asked(data: Tensor, question: str, ask: Callable[[Unpacker], Tensor], trial: Callable[[Unpacker], bool]) -> Tensor | None:
    """A backend's answer, or None when there is no backend for it."""
    if data.numel() < _LEAST or data.device.type != "cpu" or data.dim() != 2 or not data.is_contiguous():
        return None
    from hal_core.registry import default_registry  # when reading starts: importing this package loads no backend

    for registered in default_registry().unpackers():
        key = (id(registered.unpacker), question)
        with _lock:
            if key not in _verdicts:
                _verdicts[key] = registered.unpacker, _tried(registered, question, trial)
        if not _verdicts[key][1]:
            continue
        try:
            return ask(registered.unpacker)
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything; torch serves instead
            _verdicts[key] = registered.unpacker, False
            _told(registered, question, f"raised {type(error).__name__}: {error}")
    return None


def _tried(registered: RegisteredUnpacker, question: str, trial: Callable[[Unpacker], bool]) -> bool:
    try:
        if trial(registered.unpacker):
            return True
        found = "gives other bytes than torch"
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything; torch serves instead
        found = f"raised {type(error).__name__}: {error}"
    _told(registered, question, found)
    return False


def _told(registered: RegisteredUnpacker, question: str, found: str) -> None:
    line = " ".join(found.split())[:200]
    say(f"unpacker {registered.name} {line} ({question}); checkpoints are read with torch, which is slower", None)


def _random_words(shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)


def _same(found: Tensor, wanted: Tensor) -> bool:
    alike = found.dtype == wanted.dtype and found.shape == wanted.shape and found.is_contiguous()
    return alike and torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
