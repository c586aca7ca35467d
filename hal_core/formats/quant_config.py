"""The quantization part of a checkpoint's configuration: where it lies, and typed access to its fields."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hal_core.errors import FormatError
from hal_core.formats.files import read_json
from hal_core.formats.pattern_cost import pattern_cost

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["QuantConfig", "compile_pattern", "find_quant_config", "has_components"]

_SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "quantization_config.json": None}
_MODELOPT = "hf_quant_config.json"
#: Fields that change numbers: two places that state them must agree.
_DECISIVE = (
    "quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "zero_point", "version", "packing_format", "quant_algo",
)  # fmt: skip
_MISSING = object()
#: Characters of a pattern; module names have some 60.
_MAX_PATTERN = 512


class QuantConfig:
    """A method's fields, read with their types checked. where: the file, for messages."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields = fields
        self.where = where

    @property
    def method(self) -> str:
        return str(self.text("quant_method"))

    def sub(self, fields: Any, where: str) -> QuantConfig:
        """A nested object."""
        if not isinstance(fields, dict):
            raise FormatError(f"{self.where}: {where}", f"expected an object, found {_shown(fields)}")
        return QuantConfig(fields, f"{self.where}: {where}")

    def error(self, field: str, found: str, fix: str = "") -> FormatError:
        return FormatError(f"{self.where}: field {field}", found, fix)

    def _get(self, field: str, default: Any, kind: type, word: str) -> Any:
        value = self.fields.get(field, _MISSING)
        if value is _MISSING or value is None:
            if default is _MISSING:
                raise self.error(field, "missing", "the config is incomplete: fetch it again")
            return default
        if type(value) is not kind:
            raise self.error(field, f"expected {word}, found {_shown(value)}")
        return value

    def text(self, field: str, default: Any = _MISSING) -> Any:
        """A string; the default when absent or null."""
        return self._get(field, default, str, "a string")

    def integer(self, field: str, default: Any = _MISSING) -> Any:
        return self._get(field, default, int, "an integer")

    def flag(self, field: str, default: Any = _MISSING) -> Any:
        return self._get(field, default, bool, "true or false")

    def mapping(self, field: str) -> dict[str, Any]:
        """An object; empty when absent or null."""
        found: dict[str, Any] = self._get(field, {}, dict, "an object")
        return found

    def texts(self, field: str) -> list[str]:
        """A list of strings; empty when absent or null."""
        value = self._get(field, [], list, "a list of strings")
        if not all(isinstance(item, str) for item in value):
            raise self.error(field, f"expected a list of strings, found {_shown(value)}")
        return list(value)

    def group(self, default: Any = _MISSING) -> int:
        """``group_size``: positive, or -1 for one group."""
        size = self.integer("group_size", default)
        if size != -1 and not 0 < size < 2**31:
            raise self.error("group_size", f"{size}", "it is -1 or the number of inputs that share a scale")
        return int(size)

    def bits(self, allowed: tuple[int, ...], default: Any = _MISSING, field: str = "bits") -> int:
        """Bits of a code, among those served."""
        bits = self.integer(field, default)
        if bits not in allowed:
            raise self.error(field, f"{bits} bits are not served here", f"served: {', '.join(map(str, allowed))}")
        return int(bits)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def find_quant_config(folder: Path, config: Mapping[str, Any]) -> QuantConfig | None:
    """The quantization configuration of a folder, or None for a checkpoint that says nothing of one.

    Raises:
        FormatError: it is not an object, or two places contradict each other.
    """
    found: QuantConfig | None = None
    for field in ("quantization_config", "compression_config"):
        value = config.get(field)
        if value is not None and found is None:
            found = QuantConfig(config, str(folder / "config.json")).sub(value, field)
            if field == "compression_config":  # this older place had one meaning only
                found = QuantConfig({"quant_method": "compressed-tensors", **found.fields}, found.where)
    for name, method in _SIDE_FILES.items():
        path = folder / name
        if path.exists():
            side = dict(read_json(path))
            if method is not None:
                side.setdefault("quant_method", method)
            found = _agreed(found, QuantConfig(_legacy(side), str(path)))
    path = folder / _MODELOPT
    if path.exists():
        inner = QuantConfig(read_json(path), str(path)).mapping("quantization")
        found = _agreed(found, QuantConfig({"quant_method": "modelopt", **inner}, str(path)))
    return found


def _legacy(fields: dict[str, Any]) -> dict[str, Any]:
    """Old AWQ files use other names for two fields."""
    for old, new in (("w_bit", "bits"), ("q_group_size", "group_size")):
        if old in fields:
            fields.setdefault(new, fields[old])
    return fields


def _agreed(first: QuantConfig | None, second: QuantConfig) -> QuantConfig:
    if first is None:
        return second
    for field in _DECISIVE:
        one, two = first.fields.get(field), second.fields.get(field)
        if field == "quant_method" and str(one).startswith("modelopt"):
            continue  # the side file's name says it, the config's field may say more
        if one is not None and two is not None and one != two:
            raise FormatError(
                f"field {field}", f"{first.where} says {_shown(one)}, {second.where} says {_shown(two)}",
                "keep the one that is right and remove the other",
            )  # fmt: skip
    return first


def compile_pattern(pattern: str, where: str) -> re.Pattern[str]:
    """A regular expression of a configuration, of a kind that no module's name can keep busy for long.

    Raises:
        FormatError: not a regular expression, or too long, or with quantifiers whose choices multiply.
    """
    asked = f"{where}: pattern {_shown(pattern)}"
    if len(pattern) > _MAX_PATTERN:
        raise FormatError(asked, f"{len(pattern)} characters, at most {_MAX_PATTERN} are read", "split it into several patterns")
    try:
        compiled = re.compile(pattern)
        cost = pattern_cost(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise FormatError(asked, f"not a regular expression ({error})") from error
    if cost:
        raise FormatError(asked, f"{cost}, so that matching could take forever", "write it with fewer quantifiers")
    return compiled


def has_components(module: str, wanted: str) -> bool:
    """Do the dotted components of ``wanted`` appear in ``module``, in a row? ``gate`` is in ``mlp.gate``, not in ``mlp.gate_proj``."""
    inner = wanted.strip(".")
    return bool(inner) and f".{inner}." in f".{module}."
