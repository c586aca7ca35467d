"""A checkpoint of which some float matrices are read as fp8, e.g. the experts of a draft layer that was left in bf16."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hal_core.canonical import QuantizedTensor
from hal_core.errors import FormatError, HalError, SettingError
from hal_core.formats.base import Checkpoint
from hal_core.schemes import WeightScheme
from hal_core.transforms import ToFP8

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.formats.base import Entry
    from hal_core.kv.op import KVParams

__all__ = ["recast_checkpoint"]

_EMBEDDING = re.compile(r"(.+\.)?(embed_\w+|wte|wpe|word_embeddings)\.weight")


def recast_checkpoint(checkpoint: Checkpoint, recast: Mapping[str, str] | None) -> Checkpoint:
    """The checkpoint with the matrices that patterns name read in other schemes; itself where there are no patterns.

    Nothing of ``checkpoint`` or ``recast`` is changed.

    Args:
        checkpoint: an opened checkpoint.
        recast: globs over names of modules, each with ``fp8:channel`` or a block such as ``fp8:b128x128``. A name stands for all
            that is inside; the first pattern that matches holds. Embeddings, vectors and what is quantized already stay.

    Raises:
        SettingError: not such a mapping. FormatError: a pattern that matches no float matrix, or a block of experts held in one tensor.
    """
    if not recast:
        return checkpoint
    return _Recast(checkpoint, {pattern: _transform(pattern, word) for pattern, word in _checked(recast).items()})


def _checked(recast: object) -> Mapping[str, str]:
    if isinstance(recast, Mapping) and all(isinstance(text, str) for item in recast.items() for text in item):
        return recast
    raise SettingError("recast", f"{recast!r}"[:80], 'give patterns with schemes, as {"*.mlp.experts": "fp8:channel"}')


def _transform(pattern: str, word: str) -> ToFP8:
    dtype, colon, rest = word.partition(":")
    try:
        return ToFP8(WeightScheme.parse(f"fp8_e4m3:{rest}" if dtype == "fp8" and colon else word))
    except HalError as error:
        raise SettingError(f"recast {pattern}={word}", error.found or str(error), "use fp8:channel or fp8:b128x128") from error


class _Recast(Checkpoint):
    """Entries of its own; tensors of the checkpoint that it was made of."""

    def __init__(self, inner: Checkpoint, patterns: Mapping[str, ToFP8]) -> None:
        self._inner = inner
        self.format, self.path, self.files, self.notes = inner.format, inner.path, inner.files, inner.notes
        self.config = dict(inner.config)
        self._transforms: dict[str, ToFP8] = {}
        self.entries = {name: self._entry(entry, patterns) for name, entry in inner.entries.items()}
        for pattern, transform in patterns.items():
            if not any(found is transform for found in self._transforms.values()):
                near = next((name for name in inner.entries if _matches(name, pattern)), None)
                found = "matches no module" if near is None else f"matches no float matrix, only such as {near}"
                raise FormatError(f"recast {pattern}", found, "see the modules with 'hal inspect'; an earlier pattern may hold")

    def _entry(self, entry: Entry, patterns: Mapping[str, ToFP8]) -> Entry:
        transform = next((each for pattern, each in patterns.items() if _matches(entry.name, pattern)), None)
        if transform is None or entry.quantized or len(entry.shape) < 2 or _EMBEDDING.fullmatch(entry.name):
            return entry
        if len(entry.shape) > 2 or not entry.name.endswith(".weight"):
            found = f"one tensor {list(entry.shape)}"
            raise FormatError(f"recast of {entry.name}", found, "matrices named *.weight are recast, one for each expert")
        self._transforms[entry.name] = transform
        return replace(entry, scheme=transform.to, transforms=(transform.record,))

    def read(self, name: str) -> QuantizedTensor:
        transform = self._transforms.get(name)
        if transform is None:
            return self._inner.read(name)
        stored = self._inner.entries[name]
        try:
            return transform.apply(QuantizedTensor(stored.scheme, stored.shape, self._inner.load(name)))
        except HalError as error:
            raise FormatError(f"recast of {name}", error.found, error.fix) from error

    def load(self, name: str) -> Tensor:
        if name in self._transforms:
            raise FormatError(f"tensor {name}", f"is read as {self.entries[name].scheme}", "use read()")
        return self._inner.load(name)

    def kv_params(self) -> dict[int, KVParams]:
        return self._inner.kv_params()


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a parameter's module, or one that it is in."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))
