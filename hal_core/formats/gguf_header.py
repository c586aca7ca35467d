"""A GGUF file's header, walked with bounds: no count or length is believed before the bytes for it are there.

The gguf package supplies the type tables. Its own reader maps the file and trusts its counts, so that a damaged header
can stall it and mapped pages count as memory; this walk reads the same fields from an ordinary file.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hal_core.errors import FormatError, MissingDependencyError
from hal_core.formats.files import MAX_DIM, file_size
from hal_core.formats.gguf_blocks import SERVED

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import ModuleType
    from typing import BinaryIO

__all__ = ["GGUFHeader", "GGUFTensor", "LongArray", "gguf_package", "read_gguf_header"]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
#: Longer arrays (the vocabulary and its merges) are stepped over: only the tokenizer wants them.
_KEEP = 4096


@dataclass(frozen=True)
class LongArray:
    """Stands for a metadata array that was not kept."""

    count: int


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor. shape: outermost first, ``[N, K]`` or ``[E, N, K]``. kind: the type's name. offset: from the file's start."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata by key, and tensors by name in file order."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def gguf_package() -> ModuleType:
    """The optional gguf package."""
    try:
        import gguf
    except ImportError as error:
        raise MissingDependencyError("reading a GGUF file", "the gguf package is not installed", "pip install gguf") from error
    return gguf


class _Walker:
    """Reads little-endian fields; every read is checked against the end of the file."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self.file, self.size, self.path = file, size, path
        self.position = 0

    def error(self, found: str) -> FormatError:
        return FormatError(f"header of {self.path}", f"{found} at byte {self.position}", "the file is truncated or damaged: fetch it again")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.position:
            raise self.error(f"{what} of {count} bytes goes beyond the file's {self.size}")

    def data(self, count: int, what: str) -> bytes:
        self.need(count, what)
        data = self.file.read(count)
        if len(data) != count:
            raise self.error(f"{what} cannot be read")
        self.position += count
        return data

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.data(struct.calcsize(code), "a field"))[0]

    def text(self) -> str:
        data = self.data(self.scalar("<Q"), "a string")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error("a string that is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.error(f"unknown value type {kind}")
        inner, count = self.scalar("<I"), self.scalar("<Q")
        if inner in _SCALARS:
            return self._numbers(_SCALARS[inner], count)
        if inner != _STRING:
            raise self.error(f"an array of type {inner}")
        self.need(count * 8, "an array of strings")
        if count <= _KEEP:
            return [self.text() for _ in range(count)]
        for _ in range(count):
            self.data(self.scalar("<Q"), "a string")
        return LongArray(count)

    def _numbers(self, code: str, count: int) -> Any:
        size = struct.calcsize(code)
        self.need(count * size, "an array")
        if count > _KEEP:
            self.position += count * size
            self.file.seek(self.position)
            return LongArray(count)
        return list(struct.unpack(f"<{count}{code[1:]}", self.data(count * size, "an array")))


def read_gguf_header(path: Path) -> GGUFHeader:
    """Metadata and tensors of a GGUF file, versions 2 and 3.

    Raises:
        FormatError: not GGUF, damaged, or a tensor of a type that is not served (tensor and type are named).
        MissingDependencyError: the gguf package is not installed.
    """
    tables = gguf_package()
    try:
        size = file_size(path)
        with path.open("rb") as file:
            return _walk(_Walker(file, size, path), tables)
    except OSError as error:
        raise FormatError(str(path), f"cannot be read: {error.strerror or error}") from error


def _walk(walker: _Walker, tables: ModuleType) -> GGUFHeader:
    if walker.size < 24 or walker.data(4, "the magic") != b"GGUF":
        raise FormatError(str(walker.path), "does not begin with GGUF", "it is another kind of file, or damaged")
    version = walker.scalar("<I")
    if version not in (2, 3):
        raise FormatError(str(walker.path), f"GGUF version {version}", "versions 2 and 3, little-endian, are read: convert the file again")
    tensor_count, field_count = walker.scalar("<Q"), walker.scalar("<Q")
    walker.need(tensor_count * 32 + field_count * 13, f"a header of {tensor_count} tensors and {field_count} fields")
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        key = walker.text()
        if key in metadata:
            raise walker.error(f"field {key!r} a second time")
        metadata[key] = walker.value(walker.scalar("<I"))
    listed = [_tensor(walker, tables) for _ in range(tensor_count)]
    return GGUFHeader(metadata, _placed(listed, metadata, walker))


def _tensor(walker: _Walker, tables: ModuleType) -> GGUFTensor:
    name = walker.text()
    count = walker.scalar("<I")
    if not 1 <= count <= 4:
        raise walker.error(f"tensor {name} of {count} dimensions")
    shape = tuple(walker.scalar("<Q") for _ in range(count))[::-1]  # the file's order is innermost first
    number, offset = walker.scalar("<I"), walker.scalar("<Q")
    what = f"tensor {name} in {walker.path.name}"
    try:
        kind = tables.GGMLQuantizationType(number)
        block, nbytes = tables.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise FormatError(what, f"unknown type number {number}", "a newer gguf package may know it: pip install -U gguf") from error
    if kind.name not in SERVED:
        raise FormatError(what, f"type {kind.name} is not served", f"served: {', '.join(SERVED)}; requantize the model to one of them")
    if any(not 0 < dim <= MAX_DIM for dim in shape) or shape[-1] % block:
        raise FormatError(what, f"shape {list(shape)} does not fit type {kind.name} with blocks of {block}")
    return GGUFTensor(name, kind.name, shape, offset, math.prod(shape) // block * nbytes)


def _placed(listed: list[GGUFTensor], metadata: Mapping[str, Any], walker: _Walker) -> dict[str, GGUFTensor]:
    """Absolute offsets, checked: aligned, inside the file, apart from each other."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment > 2**20:
        raise FormatError(str(walker.path), f"general.alignment is {alignment!r}")
    start = -(-walker.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for tensor in listed:
        what = f"tensor {tensor.name} in {walker.path.name}"
        if tensor.name in tensors:
            raise FormatError(what, "listed twice")
        if tensor.offset % alignment or start + tensor.offset + tensor.nbytes > walker.size:
            raise FormatError(
                what, f"its {tensor.nbytes} bytes at {start + tensor.offset} do not lie aligned inside the file's {walker.size}",
                "the file is truncated or damaged: fetch it again",
            )  # fmt: skip
        tensors[tensor.name] = GGUFTensor(tensor.name, tensor.kind, tensor.shape, start + tensor.offset, tensor.nbytes)
    end, before = start, "the header"
    for tensor in sorted(tensors.values(), key=lambda item: item.offset):
        if tensor.offset < end:
            raise FormatError(f"tensor {tensor.name} in {walker.path.name}", f"overlaps {before}")
        end, before = tensor.offset + tensor.nbytes, tensor.name
    return tensors
