"""Lists of modules in configurations: names, parts of names, wildcards and `re:` patterns, also under a fused layer's name."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

from hal_core.formats.quant_config import compile_pattern, has_components

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ModuleList", "fused_names", "part_names"]

#: A list written for an engine that fuses layers names the fused one; the file holds its parts.
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_REGEX = "re:"


def fused_names(module: str, text: str = "") -> tuple[str, ...]:
    """The module's name, and the name of the fused layer that it is a part of, if ``text`` speaks of that layer."""
    parent, _, last = module.rpartition(".")
    fused = _FUSED.get(last)
    # a pattern for `up_proj` also fits `gate_up_proj`, of which `gate_proj` is a part, and does not mean it
    if fused is None or fused not in text:
        return (module,)
    return module, f"{parent}.{fused}" if parent else fused


def part_names(module: str) -> tuple[str, ...]:
    """The parts of a fused module by the names that they have alone; none of any other module."""
    parent, _, last = module.rpartition(".")
    return tuple(f"{parent}.{part}" if parent else part for part, fused in _FUSED.items() if fused == last)


def _pattern(text: str, where: str) -> tuple[str, re.Pattern[str], bool]:
    """Text, pattern, and whether a wildcard at its end may also hit longer names than it means."""
    if text.startswith(_REGEX):
        return text, compile_pattern(text[len(_REGEX) :], where), True
    # a wildcard for a module also means what is below it
    whole = re.compile(fnmatch.translate(text) + "|" + fnmatch.translate(text + ".*"))
    return text, whole, text.endswith("*") and not text.endswith(".*")


class ModuleList:
    """One list of a configuration, asked module by module."""

    def __init__(self, texts: Sequence[str], where: str) -> None:
        self._names = [text for text in texts if not text.startswith(_REGEX) and "*" not in text]
        # a wildcard for a module also means what is below it; one that ends inside a name may hit longer names too
        self._patterns = [_pattern(text, where) for text in texts if text.startswith(_REGEX) or "*" in text]

    def holds(self, module: str) -> bool | None:
        """Is the module in the list? None where only the beginning of a name matches, as ``mlp.gate*`` does ``mlp.gate_proj``."""
        if any(has_components(name, listed) for listed in self._names for name in fused_names(module, listed)):
            return True
        begun = False
        for text, pattern, loose in self._patterns:
            for name in fused_names(module, text):
                found = pattern.match(name)
                whole = pattern.fullmatch(name) is not None if text.startswith(_REGEX) else not loose
                if found and whole:
                    return True
                begun = begun or found is not None
        return None if begun else False
