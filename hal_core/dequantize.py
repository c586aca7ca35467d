"""A checkpoint as plain float32 safetensors, one tensor at a time."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hal_core.errors import FormatError
from hal_core.formats.files import byte_view
from hal_core.formats.open import open_checkpoint

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
        FormatError: the checkpoint cannot be read, or the file cannot be written there; nothing is left behind.
    """
    checkpoint, target = open_checkpoint(path), Path(out)
    _check_target(checkpoint, target)
    header, total = _header(checkpoint)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(header)
            _write_all(checkpoint, file, total, progress)
        partial.replace(target)
    except OSError as error:
        raise FormatError(f"output {target}", f"cannot be written: {error.strerror or error}", "choose another place") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()  # gone already when all went well
    return target


def _check_target(checkpoint: Checkpoint, target: Path) -> None:
    if target.is_dir():
        raise FormatError(f"output {target}", "is a folder", "give the name of a .safetensors file")
    if target.exists() and any(target.samefile(file) for file in checkpoint.files):
        raise FormatError(f"output {target}", "is a file of the checkpoint itself", "choose another name")
    if not target.parent.is_dir():
        raise FormatError(f"output {target}", f"there is no folder {target.parent}", "make it first")


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
