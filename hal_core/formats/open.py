"""Which format is this? Decided by the path, the configuration and the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hal_core.errors import FormatError
from hal_core.formats.autoround import AutoRoundRules
from hal_core.formats.awq import AWQRules
from hal_core.formats.compressed_tensors import CompressedTensorsRules
from hal_core.formats.files import file_size, read_json
from hal_core.formats.folder import FolderCheckpoint
from hal_core.formats.fp8 import FP8Rules
from hal_core.formats.gpt_oss import GptOssRules
from hal_core.formats.gptq import GPTQRules
from hal_core.formats.modelopt import METHODS as MODELOPT
from hal_core.formats.modelopt import ModelOptRules
from hal_core.formats.quant_config import find_quant_config
from hal_core.formats.quark import QuarkRules
from hal_core.formats.tensor_store import open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from hal_core.formats.base import Checkpoint
    from hal_core.formats.packing import Rules
    from hal_core.formats.quant_config import QuantConfig

__all__ = ["open_checkpoint"]

#: Methods whose name is that of the format.
_RULES: dict[str, Callable[[QuantConfig], Rules]] = {
    "compressed-tensors": CompressedTensorsRules, "fp8": FP8Rules, "mxfp4": GptOssRules, "quark": QuarkRules,
    **dict.fromkeys(MODELOPT, ModelOptRules),
}  # fmt: skip


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint folder (config.json and safetensors, sharded or not) or a ``.gguf`` file. Reads headers only.

    Raises:
        FormatError: nothing readable there, or a header, config or tensor that contradicts another; names what and why.
        MissingDependencyError: the format needs a library that is not installed.
    """
    place = Path(path)
    try:
        if place.is_dir():
            return _open_folder(place)
        if place.exists():
            return _open_file(place)
    except OSError as error:
        raise FormatError(f"checkpoint {place}", f"cannot be read: {error.strerror or error}") from error
    raise FormatError(f"checkpoint {place}", "there is no such file or folder", "give the folder of a checkpoint, or a .gguf file")


def _open_file(path: Path) -> Checkpoint:
    file_size(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix == ".safetensors":
        raise FormatError(f"checkpoint {path}", "is one file of a checkpoint", f"give its folder, {path.parent}, where config.json lies")
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise FormatError(f"checkpoint {path}", "is a pickle file, which can run code when loaded", "convert it to safetensors")
    raise FormatError(f"checkpoint {path}", "is neither a folder nor a .gguf file", "give the folder of a checkpoint, or a .gguf file")


def _open_gguf(path: Path) -> Checkpoint:
    from hal_core.formats.gguf_checkpoint import GGUFCheckpoint  # the gguf package is optional

    return GGUFCheckpoint(path)


def _open_folder(folder: Path) -> Checkpoint:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and not any(folder.glob("*.safetensors")):
        if len(ggufs) == 1:
            return _open_gguf(ggufs[0])
        raise FormatError(f"checkpoint {folder}", f"holds {len(ggufs)} .gguf files", f"give one of them, e.g. {ggufs[0]}")
    store = open_store(folder)
    if not (folder / "config.json").exists():
        raise FormatError(f"checkpoint {folder}", "has no config.json", "fetch the model's config.json into the folder")
    config = read_json(folder / "config.json")
    quant = find_quant_config(folder, config)
    if quant is None:
        return FolderCheckpoint("safetensors", store, config, None, frozenset())
    name, rules = _rules(quant)
    return FolderCheckpoint(name, store, config, rules, frozenset(rules.suffixes))


def _rules(quant: QuantConfig) -> tuple[str, Rules]:
    """Name and rules of a quantization method."""
    method = quant.method
    if method in _RULES:
        return method, _RULES[method](quant)
    if method in ("auto-round", "intel/auto-round"):
        rules = AutoRoundRules(quant)
        return rules.packing_format.replace("auto_round", "auto-round", 1), rules
    if method == "gptq":
        gptq = GPTQRules(quant)
        return gptq.version, gptq
    if method == "awq":
        awq = AWQRules(quant)
        return f"awq:{awq.version}", awq
    served = ", ".join(("auto-round", "gptq", "awq", *_RULES))
    raise quant.error("quant_method", f"{method!r} is not served", f"served: {served}, and GGUF files")
