"""The version of hal-core, from its installed metadata."""

from __future__ import annotations

from importlib import metadata

__all__ = ["__version__"]

try:
    __version__ = metadata.version("hal-core")
except metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"
