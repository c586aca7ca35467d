"""The checkpoint that an engine was given, in the words of our readers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hal_core.hub import HubName

__all__ = ["checkpoint_name"]


def checkpoint_name(model: str, revision: str | None) -> str:
    """The ``model`` and ``revision`` of vLLM as one name: a hub id with its revision; a path as it is, since a folder has no revisions."""
    name = None if revision is None or Path(model).exists() else HubName.parse(model)
    return model if name is None else str(replace(name, revision=revision))
