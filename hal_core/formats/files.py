"""Bytes of files into fresh memory, and small JSON files: nothing stays mapped, nothing is allocated before its size is known."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hal_core.errors import FormatError

if TYPE_CHECKING:
    from typing import BinaryIO

    from torch import Tensor

__all__ = [
    "MAX_DIM", "MAX_JSON", "byte_view", "file_size", "map_tensor", "parse_json", "read_into", "read_json", "read_tensor", "shape_bytes",
]  # fmt: skip

#: No weight has a dimension near this; it keeps products of dimensions far from overflow.
MAX_DIM = 2**40
#: Largest JSON text accepted (a safetensors header of a model with 100,000 tensors takes 15 MB).
MAX_JSON = 100_000_000
#: Below this a copy costs less than a mapping.
_LEAST_MAPPED = 1 << 16
#: MADV_POPULATE_READ of Linux 5.14, not named by Python's mmap.
_POPULATE_READ = 22


def file_size(path: Path) -> int:
    """Bytes of a file, asked before it is opened: opening a pipe or a device may wait forever.

    Raises:
        FormatError: it is not a regular file.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise FormatError(str(path), "is not a regular file", "give an ordinary file, not a folder, pipe or device")
    return found.st_size


def byte_view(tensor: Tensor) -> Any:
    """The bytes of a contiguous CPU tensor as a writable buffer (torch has no such view without numpy)."""
    if not tensor.numel():
        return bytearray()
    return (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())


def read_into(file: BinaryIO, tensor: Tensor, offset: int, what: str) -> None:
    """Fill a contiguous CPU tensor from ``offset`` of an unbuffered file.

    Raises:
        FormatError: the file ends before the tensor is full; ``what`` names it.
    """
    view = memoryview(byte_view(tensor)).cast("B")
    file.seek(offset)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise FormatError(what, f"the file ends {len(view) - done} bytes early", "the file is truncated: fetch it again")
        done += count


def read_tensor(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
    """A fresh tensor from the bytes at ``offset``; the caller has checked that they lie inside the file."""
    tensor = torch.empty(shape, dtype=dtype)
    try:
        file_size(path)
        with path.open("rb", buffering=0) as file:
            read_into(file, tensor, offset, what)
    except OSError as error:
        raise FormatError(what, f"{path} cannot be read: {error.strerror or error}") from error
    return tensor


def map_tensor(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
    """A tensor over the file's pages, which go when it goes: for decoders that read once and keep nothing.

    Small and unaligned tensors are read instead.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < _LEAST_MAPPED or offset % dtype.itemsize:
        return read_tensor(path, offset, shape, dtype, what)
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        file_size(path)
        with path.open("rb") as file:
            # a private mapping, because torch wants memory that could be written
            pages = mmap.mmap(file.fileno(), offset - start + count * dtype.itemsize, access=mmap.ACCESS_COPY, offset=start)
    except ValueError as error:
        raise FormatError(what, f"the file ends early: {error}", "the file is truncated: fetch it again") from error
    except OSError as error:
        raise FormatError(what, f"{path} cannot be read: {error.strerror or error}") from error
    with contextlib.suppress(OSError, AttributeError, ValueError):
        pages.madvise(_POPULATE_READ)  # all pages in one call, where the kernel knows how
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=offset - start).view(shape)


def shape_bytes(shape: tuple[int, ...], bits: int, what: str) -> int:
    """Bytes of a tensor of ``bits`` wide elements.

    Raises:
        FormatError: a dimension is absurd, or the elements do not fill whole bytes.
    """
    if any(dim > MAX_DIM for dim in shape):
        raise FormatError(what, f"absurd shape {list(shape)}", "the header is damaged: fetch the file again")
    total = math.prod(shape) * bits
    if total % 8:
        raise FormatError(what, f"shape {list(shape)} of {bits}-bit elements does not fill whole bytes")
    return total // 8


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} appears twice")
        found[key] = value
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON number")


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object without repeated keys."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(what, f"not valid JSON ({error})", "fetch the file again") from error
    if not isinstance(value, dict):
        raise FormatError(what, f"holds a JSON {type(value).__name__}, expected an object")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        size = file_size(path)
        if size > MAX_JSON:
            raise FormatError(str(path), f"{size} bytes of JSON, at most {MAX_JSON} are read")
        data = path.read_bytes()
    except OSError as error:
        raise FormatError(str(path), f"cannot be read: {error.strerror or error}") from error
    return parse_json(data, str(path))
