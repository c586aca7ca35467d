"""Checkpoint formats: each reads file tensors into canonical weights."""

from hal_core.formats.base import Checkpoint, Entry
from hal_core.formats.open import open_checkpoint

__all__ = ["Checkpoint", "Entry", "open_checkpoint"]
