"""Files that a user names: read within bounds, with one clear error."""

from __future__ import annotations

from pathlib import Path

from hal_core.errors import ValueDecodeError

__all__ = ["read_small_text", "short"]


def read_small_text(path: Path, most_bytes: int, what: str) -> str:
    """The text of a regular file of at most ``most_bytes``.

    Raises:
        ValueDecodeError: absent, a folder or device, unreadable, too large, or not UTF-8; ``what`` begins the message.
    """
    try:
        if not path.is_file():  # a pipe or device might never end
            raise ValueDecodeError(what, "a folder or a device" if path.exists() else "no such file", "give a file")
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ValueDecodeError(what, getattr(error, "strerror", None) or str(error), "give a readable file") from error
    if len(data) > most_bytes:
        raise ValueDecodeError(what, f"larger than {most_bytes} bytes", "give a file that the hal command wrote")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueDecodeError(what, f"not UTF-8 text ({error.reason} at byte {error.start})", "give a JSON file") from error


def short(error: object, most: int = 300) -> str:
    """One printable line of an error about a stranger's data, which may hold anything of any length."""
    line = " ".join(str(error).split())
    line = "".join(c if c.isprintable() else "?" for c in line[: most + 1])
    return line if len(line) <= most else line[: most - 3] + "..."
