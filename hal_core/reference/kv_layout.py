"""The reference's page: the parts of keys, then of values, each a block of rows in the order of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.kv.scheme import KV_GROUP

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.kv.quantizer import Part, Parts, Quantizer

__all__ = ["PageLayout"]

#: Blocks begin at multiples of this many bytes, so that they can be seen as their elements.
_ALIGN = 4


@dataclass(frozen=True)
class _Block:
    """Where a part lies in a page: ``rows`` times ``[heads, width]`` from byte ``start``."""

    part: Part
    start: int
    rows: int
    heads: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.heads * self.part.bytes

    def view(self, pages: Tensor) -> Tensor:
        """``[num_pages, rows, heads, width]`` of the pages' bytes, sharing their memory."""
        flat: Tensor = pages[:, self.start : self.end].view(self.part.dtype)
        return flat.view(len(pages), self.rows, self.heads, self.part.width)


class PageLayout:
    """Offsets of every part of both sides. Writes and reads quantized vectors by page and offset."""

    def __init__(self, keys: Quantizer, values: Quantizer, page_size: int, heads: int) -> None:
        self.page_size, self.blocks, end = page_size, {}, 0
        for side, quantizer in (("keys", keys), ("values", values)):
            blocks = {}
            for part in quantizer.parts:
                rows = page_size // KV_GROUP if part.grouped else page_size
                blocks[part.name] = _Block(part, end, rows, heads)
                end = -(-blocks[part.name].end // _ALIGN) * _ALIGN
            self.blocks[side] = blocks
        self.page_bytes = end

    def write(self, pages: Tensor, side: str, parts: Parts, page: Tensor, offset: Tensor) -> None:
        """Parts ``[n, heads, width]`` of tokens to page and offset ``[n]``; grouped parts ``[n / 32, ..]`` to their token's group."""
        for name, block in self.blocks[side].items():
            if block.part.grouped:
                block.view(pages)[page[::KV_GROUP], offset[::KV_GROUP] // KV_GROUP] = parts[name]
            else:
                block.view(pages)[page, offset] = parts[name]

    def read(self, pages: Tensor, side: str, row: Tensor) -> Parts:
        """Parts of all tokens of the pages in ``row [n]``: ``[n * page_size, heads, width]``; grouped ones by group."""
        return {name: block.view(pages)[row.long()].flatten(0, 1) for name, block in self.blocks[side].items()}
