"""Pages with counts of who uses them: the allocator of a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.errors import CapacityError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RowPool"]


class RowPool:
    """Rows of one uint8 tensor, each used by some owners; a row that nobody uses is given out again, lowest first.

    most: rows that may be used; allocated at once, so addresses stay. None: the tensor grows by doubling from ``first``, and moves.
    """

    def __init__(self, row_bytes: int, most: int | None, device: torch.device, what: str, first: int = 16) -> None:
        self.most, self.what, self._first = most, what, first
        self.data = torch.zeros(most or 0, row_bytes, dtype=torch.uint8, device=device)
        self.users = [0] * len(self.data)
        self._free = list(range(len(self.data) - 1, -1, -1))

    @property
    def used(self) -> int:
        return len(self.users) - len(self._free)

    def room(self) -> int | None:
        """Rows that can still be taken; None where there is no limit."""
        return None if self.most is None else len(self._free)

    def take(self, count: int) -> list[int]:
        """Rows with one user each.

        Raises:
            CapacityError: fewer are free; none was taken.
        """
        if count > len(self._free):
            self._grow(count - len(self._free))
        rows = [self._free.pop() for _ in range(count)]
        for row in rows:
            self.users[row] = 1
        return rows

    def _grow(self, missing: int) -> None:
        if self.most is not None:
            found = f"{missing + len(self._free)} {self.what} needed, {len(self._free)} of {self.most} free"
            raise CapacityError("KV cache", found, "free or trim sequences, or give it more capacity")
        before = len(self.users)
        after = max(self._first, 2 * before, before + missing)
        grown = torch.zeros(after, self.data.shape[1], dtype=torch.uint8, device=self.data.device)
        grown[:before] = self.data
        self.data = grown
        self.users += [0] * (after - before)
        self._free = [*range(after - 1, before - 1, -1), *self._free]

    def share(self, rows: list[int]) -> None:
        """One more user for each row."""
        for row in rows:
            self.users[row] += 1

    def drop(self, rows: list[int]) -> None:
        """One user less for each row."""
        for row in rows:
            self.users[row] -= 1
            if self.users[row] == 0:
                self._free.append(row)

    def copy_row(self, source: int, target: int) -> None:
        self.data[target] = self.data[source]

    def clone(self, device: torch.device | None = None) -> RowPool:
        """The same rows with the same users, in memory of their own."""
        other = RowPool(self.data.shape[1], 0, self.data.device, self.what, self._first)
        other.most, other.users, other._free = self.most, list(self.users), list(self._free)
        data: Tensor = self.data.clone() if device is None or device == self.data.device else self.data.to(device)
        other.data = data
        return other
