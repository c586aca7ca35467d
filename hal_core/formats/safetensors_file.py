"""The safetensors container, read strictly: every claim of the header is checked against the file before any allocation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hal_core.errors import FormatError
from hal_core.formats.files import MAX_JSON, file_size, map_tensor, parse_json, read_tensor, shape_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["DTYPES", "TensorInfo", "read_header"]

#: The container's dtype words.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. dtype: the container's word. offset: from the start of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    path: Path

    def read(self) -> Tensor:
        """The tensor in fresh memory."""
        return read_tensor(self.path, self.offset, self.shape, DTYPES[self.dtype], f"tensor {self.name}")

    def map(self) -> Tensor:
        """The tensor over the file's own pages where that is possible, for a moment's reading; else in fresh memory."""
        return map_tensor(self.path, self.offset, self.shape, DTYPES[self.dtype], f"tensor {self.name}")


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a safetensors file, in the header's order.

    Raises:
        FormatError: not a safetensors file, truncated, or a header that contradicts itself or the file's size.
    """
    try:
        size = file_size(path)
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > size - 8:
                raise FormatError(
                    str(path), f"header of {length} bytes in a file of {size}",
                    "not a safetensors file, or a truncated one: fetch it again",
                )  # fmt: skip
            if length > MAX_JSON:
                raise FormatError(str(path), f"header of {length} bytes, at most {MAX_JSON} are read")
            text = file.read(length)
    except OSError as error:
        raise FormatError(str(path), f"cannot be read: {error.strerror or error}") from error
    header = parse_json(text, f"header of {path}")
    header.pop("__metadata__", None)
    infos = [_info(name, value, length + 8, path) for name, value in header.items()]
    _check_cover(infos, length + 8, size, path)
    return {info.name: info for info in infos}


def _ints(value: Any) -> tuple[int, ...] | None:
    good = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    return tuple(value) if good else None


def _info(name: str, value: Any, base: int, path: Path) -> TensorInfo:
    what = f"tensor {name} in {path.name}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(what, "its header entry does not hold exactly dtype, shape and data_offsets")
    dtype, shape, span = value["dtype"], _ints(value["shape"]), _ints(value["data_offsets"])
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(what, f"unknown dtype {dtype!r}", f"known: {', '.join(DTYPES)}")
    if shape is None or len(shape) > 16:
        raise FormatError(what, f"shape {str(value['shape'])[:80]} is not a short list of non-negative integers")
    if span is None or len(span) != 2 or span[0] > span[1]:
        raise FormatError(what, f"data_offsets {str(value['data_offsets'])[:80]} are not [begin, end]")
    needed = shape_bytes(shape, DTYPES[dtype].itemsize * 8, what)
    if needed != span[1] - span[0]:
        raise FormatError(what, f"shape {list(shape)} of {dtype} needs {needed} bytes, the header gives it {span[1] - span[0]}")
    return TensorInfo(name, dtype, shape, needed, base + span[0], path)


def _check_cover(infos: list[TensorInfo], base: int, size: int, path: Path) -> None:
    """The tensors must fill the file exactly: no hole, no overlap, no tail."""
    position, before = base, "the header"
    for info in sorted(infos, key=lambda item: (item.offset, item.nbytes)):
        if info.offset != position:
            kind = "overlaps" if info.offset < position else "leaves a hole after"
            raise FormatError(f"tensor {info.name} in {path.name}", f"starts at byte {info.offset} and {kind} {before}")
        position, before = info.offset + info.nbytes, info.name
    if position != size:
        raise FormatError(str(path), f"the tensors end at byte {position}, the file at {size}", "truncated or damaged: fetch it again")
