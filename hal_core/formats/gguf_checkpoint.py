"""GGUF as a checkpoint: published names, packed codes, one expert or one matrix at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hal_core.errors import FormatError
from hal_core.formats.base import Checkpoint, Entry
from hal_core.formats.files import read_tensor
from hal_core.formats.gguf_blocks import FLOATS, block_scheme, unpack_blocks
from hal_core.formats.gguf_config import model_config
from hal_core.formats.gguf_header import read_gguf_header
from hal_core.formats.gguf_names import name_table, published_name, rotary_rows
from hal_core.formats.layers import check_layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.formats.gguf_header import GGUFTensor

__all__ = ["GGUFCheckpoint"]

_ROPE = "rope_freqs.weight"


@dataclass(frozen=True)
class _Piece:
    """One published parameter: a whole GGUF tensor, or one expert of it. rows: stored row of each published row, or None."""

    source: GGUFTensor
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    heads: int | None


class GGUFCheckpoint(Checkpoint):
    """One GGUF file. metadata: its fields, with long arrays (the vocabulary) left out."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        self.path = path
        self.files = (path,)
        self.metadata: Mapping[str, Any] = header.metadata
        self.config: Mapping[str, Any] = model_config(header, self._rope_factors(header.tensors.get(_ROPE)))
        self._pieces: dict[str, _Piece] = {}
        architecture = str(header.metadata["general.architecture"])
        table = name_table(architecture, self.config["model_type"])
        for tensor in header.tensors.values():
            if tensor.name != _ROPE:
                found = dict(self._split(tensor, published_name(tensor.name, table), architecture))
                twice = next((name for name in found if name in self._pieces), None)
                if twice is not None:
                    raise FormatError(f"tensor {tensor.name}", f"parameter {twice} is stored twice", "convert the model again")
                self._pieces.update(found)
        self.entries: Mapping[str, Entry] = {
            name: Entry(name, piece.shape, block_scheme(piece.source.kind), piece.nbytes) for name, piece in self._pieces.items()
        }
        check_layers(self.entries, self.config)

    def _rope_factors(self, tensor: GGUFTensor | None) -> list[float] | None:
        if tensor is None:
            return None
        if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
            raise FormatError(f"tensor {_ROPE}", f"{tensor.kind} {list(tensor.shape)}, expected a short F32 vector")
        found: list[float] = read_tensor(self.path, tensor.offset, tensor.shape, torch.float32, f"tensor {_ROPE}").tolist()
        return found

    def _split(self, tensor: GGUFTensor, name: str, architecture: str) -> Iterator[tuple[str, _Piece]]:
        """Experts are fused in the file, ``[E, N, K]``, and apart in the published checkpoint; in older files they are apart too."""
        if ".experts." in name and not name.split(".experts.")[1][0].isdigit():
            if len(tensor.shape) != 3:
                raise FormatError(f"tensor {tensor.name}", f"shape {list(tensor.shape)}, expected [experts, N, K]")
            each = tensor.nbytes // tensor.shape[0]
            head, tail = name.split(".experts.")
            for index in range(tensor.shape[0]):
                yield f"{head}.experts.{index}.{tail}", _Piece(tensor, tensor.shape[1:], tensor.offset + index * each, each, None)
            return
        if len(tensor.shape) > 2 or (len(tensor.shape) == 1 and tensor.kind not in FLOATS):
            raise FormatError(f"tensor {tensor.name}", f"{tensor.kind} of shape {list(tensor.shape)}, expected a matrix or a float vector")
        yield name, _Piece(tensor, tensor.shape, tensor.offset, tensor.nbytes, self._heads(tensor, name, architecture))

    def _heads(self, tensor: GGUFTensor, name: str, architecture: str) -> int | None:
        """Heads of a q or k projection whose rows are stored in rotary order: llama files only."""
        key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if architecture != "llama" or key is None:
            return None
        heads, rows = int(self.config[key]), tensor.shape[0]
        if rows % (2 * heads):
            raise FormatError(f"tensor {tensor.name}", f"{rows} rows do not divide into {heads} heads of an even size")
        return heads

    def _piece(self, name: str, quantized: bool) -> _Piece:
        piece = self._pieces.get(name)
        if piece is None:
            raise FormatError(f"tensor {name}", f"not in the checkpoint {self.path}", "ask for one of its entries")
        if self.entries[name].quantized != quantized:
            kind, other = ("quantized", "load") if quantized else ("plain", "read")
            raise FormatError(f"tensor {name}", f"is not {kind} in this checkpoint", f"use {other}()")
        return piece

    def _ordered(self, stored: Tensor, piece: _Piece) -> Tensor:
        """Rows in published order."""
        if piece.heads is None:
            return stored
        return stored[torch.tensor(rotary_rows(piece.heads, piece.shape[0]))]

    def read(self, name: str) -> QuantizedTensor:
        piece = self._piece(name, quantized=True)
        n, k = piece.shape
        data = read_tensor(self.path, piece.offset, (n, piece.nbytes // n), torch.uint8, f"tensor {piece.source.name}")
        return unpack_blocks(self._ordered(data, piece), piece.source.kind, (n, k), piece.source.name)

    def load(self, name: str) -> Tensor:
        piece = self._piece(name, quantized=False)
        data = read_tensor(self.path, piece.offset, piece.shape, FLOATS[piece.source.kind], f"tensor {piece.source.name}")
        return self._ordered(data, piece)
