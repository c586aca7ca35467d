"""Files that commands write: never a device, never a file of the checkpoint, never half of one."""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hal_core.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["check_output", "whole_file"]


def check_output(target: Path, checkpoint: Path | None = None, files: Iterable[Path] = ()) -> Path:
    """Refuse a target that could not or must not be written, before any work is done; returns where a link leads.

    Args:
        target: what the user named.
        checkpoint: the folder or file being read: no existing file of it may be replaced.
        files: further files being read, e.g. shards that lie elsewhere.

    Raises:
        OutputError: a folder, a device, a place without a folder, or a file that belongs to the checkpoint.
    """
    try:
        real = Path(os.path.realpath(target))
        if real.is_dir():
            raise OutputError(f"output {target}", "is a folder", "name a file")
        if real.exists() and not real.is_file():
            raise OutputError(f"output {target}", "is a device or a pipe", "name a file")
        if not real.parent.is_dir():
            raise OutputError(f"output {target}", f"there is no folder {real.parent}: its folder does not exist", "make it first")
        if real.exists() and _belongs(real, checkpoint, files):
            raise OutputError(f"output {target}", "is a file of the checkpoint itself", "choose another name")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise OutputError(f"output {target}", getattr(error, "strerror", None) or str(error), "choose another place") from error
    return real


def _belongs(real: Path, checkpoint: Path | None, files: Iterable[Path]) -> bool:
    read = [*files]
    if checkpoint is not None and checkpoint.is_dir():
        read += [path for path in checkpoint.iterdir() if path.is_file()]
    elif checkpoint is not None:
        read.append(checkpoint)
    return any(path.exists() and real.samefile(path) for path in read)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yields a fresh name beside ``target`` to write; it takes the target's place when the block ends well, else it is removed.

    Raises:
        OutputError: the system does not let it be written.
    """
    real = Path(os.path.realpath(target))
    partial = real.with_name(f".{real.name[:100]}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(real)
    except OSError as error:
        raise OutputError(f"output {target}", f"cannot be written: {error.strerror or error}", "choose another place") from error
    finally:
        try:
            partial.unlink(missing_ok=True)  # gone already when all went well
        except OSError as error:
            raise OutputError(f"output {target}", f"{partial} cannot be removed: {error.strerror}", "remove it") from error
