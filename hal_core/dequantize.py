"""A checkpoint as plain float32 safetensors, one tensor at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hal_core.formats.files import byte_view
from hal_core.formats.open import open_checkpoint
from hal_core.outputs import check_output, whole_file

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from torch import Tensor

    from hal_core.formats.base import Checkpoint, Entry

    Progress = Callable[[int, int, str], None]

__all__ = ["dequantize_checkpoint", "dequantized_rows"]

#: Elements widened to float32 at once; bounds memory whatever the tensor.
_CHUNK = 1 << 22


def dequantize_checkpoint(path: str | os.PathLike[str], out: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """Write every parameter of a checkpoint as float32, under its published name, to one safetensors file.

    The file appears under its name only when it is complete. Memory is bounded by the largest packed tensor.

    Args:
        path: folder or ``.gguf`` file.
        out: the file to write; an existing one is replaced, unless it belongs to the checkpoint.
        progress: called as ``progress(bytes_done, bytes_total, name)`` after each parameter.

    Raises:
        FormatError: the checkpoint cannot be read. OutputError: the file cannot be written there. Nothing is left behind.
    """
    checkpoint, target = open_checkpoint(path), Path(out)
    check_output(target, checkpoint.path, checkpoint.files)
    header, total = _header(checkpoint)
    with whole_file(target) as partial, partial.open("xb") as file:
        file.write(header)
        _write_all(checkpoint, file, total, progress)
    return target


def _header(checkpoint: Checkpoint) -> tuple[bytes, int]:
    """The safetensors header of the result, and the bytes that follow it."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in checkpoint.entries.values():
        size = math.prod(entry.shape) * 4
        fields[entry.name] = {"dtype": "F32", "shape": list(entry.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin aligned
    return len(text).to_bytes(8, "little") + text, offset


def _write_all(checkpoint: Checkpoint, file: BinaryIO, total: int, progress: Progress | None) -> None:
    done = 0
    for entry in checkpoint.entries.values():
        for rows in dequantized_rows(checkpoint, entry):
            done += file.write(byte_view(rows))
        if progress is not None:
            progress(done, total, entry.name)


def dequantized_rows(checkpoint: Checkpoint, entry: Entry) -> Iterator[Tensor]:
    """A parameter's float32 values, contiguous, a bounded number of rows at a time."""
    if entry.quantized:
        weight = checkpoint.read(entry.name)
        if entry.fused:
            for expert in range(weight.shape[0]):
                yield weight.expert(expert).dequantize().T.contiguous()
            return
        block = weight.scheme.granularity.block
        whole = 1 if block is None else block[0]  # rows of one block share their scales
        step = max(1, _CHUNK // weight.shape[-1] // whole) * whole
        for start in range(0, weight.shape[0], step):
            yield weight.rows(start, min(start + step, weight.shape[0])).dequantize().contiguous()
        return
    plain = checkpoint.load(entry.name)
    flat = plain.flatten()
    for start in range(0, flat.numel(), _CHUNK):
        yield flat[start : start + _CHUNK].to(torch.float32)
