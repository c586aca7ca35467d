"""Compiled programs on disk: SPIR-V by source and compiler, device binaries by device and driver too.

An entry is written under a fresh name and moved into place, so that two processes may compile the same at once; its content is checked
by digest when it is read, and an entry that is damaged counts as absent.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

from hal_core import settings
from hal_core.errors import OutputError
from hal_core.outputs import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["digest", "folder", "read", "write"]

_log = logging.getLogger("hal_backend_xpu")
_MAGIC = b"hal-xpu 1\n"


def folder() -> Path:
    """Where the entries lie; it need not exist."""
    return settings.cache_folder() / "xpu"


def digest(*parts: str | bytes) -> str:
    """A name for what was made from these parts."""
    sum_ = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sum_.update(len(data).to_bytes(8, "little") + data)
    return sum_.hexdigest()[:40]


def read(name: str) -> tuple[bytes, ...] | None:
    """An entry's images; None where it is absent or damaged."""
    path = folder() / name
    try:
        data = path.read_bytes()
    except OSError:
        return None
    head, content = data[: len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    if head == _MAGIC + hashlib.sha256(content).digest() and content:
        return tuple(_split(content))
    _log.warning("%s is damaged; it is made anew", path)
    return None


def _split(content: bytes) -> Iterator[bytes]:
    while content:
        size = int.from_bytes(content[:8], "little")
        yield content[8 : 8 + size]
        content = content[8 + size :]


def write(name: str, images: tuple[bytes, ...]) -> None:
    """Keep an entry. A folder that cannot be written costs time in the next process, and is no error."""
    content = b"".join(len(image).to_bytes(8, "little") + image for image in images)
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with whole_file(folder() / name) as partial:
            partial.write_bytes(_MAGIC + hashlib.sha256(content).digest() + content)
    except (OSError, OutputError) as error:
        _log.warning("compiled kernels cannot be kept in %s: %s", folder(), error)
