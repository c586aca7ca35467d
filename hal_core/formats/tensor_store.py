"""The tensors of a checkpoint folder: one safetensors file, or shards with their index."""

from __future__ import annotations

import re
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

from hal_core.errors import FormatError
from hal_core.formats.files import read_json
from hal_core.formats.safetensors_file import read_header

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hal_core.formats.safetensors_file import TensorInfo

__all__ = ["INDEX", "TensorStore", "open_store"]

INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD = re.compile(r"(.*-)(\d+)-of-(\d+)\.safetensors")


class TensorStore:
    """Tensors by name, over one or several files. files: what was opened, so that nobody writes over it."""

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self.infos = infos
        self.files = tuple(dict.fromkeys(info.path for info in infos.values()))


def open_store(folder: Path) -> TensorStore:
    """Headers of every shard of a folder.

    Raises:
        FormatError: no safetensors file, a missing shard, or an index that does not agree with the shards.
    """
    single, index = folder / "model.safetensors", folder / INDEX
    if single.exists():
        return TensorStore(folder, _nonempty(read_header(single), single))
    if index.exists():
        return TensorStore(folder, _indexed(index))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _nothing_to_read(folder)
    shards = [_SHARD.fullmatch(file.name) for file in files]
    if len(files) == 1 and shards[0] is None:
        return TensorStore(folder, _nonempty(read_header(files[0]), files[0]))
    if all(shards):
        _complete(folder, [match for match in shards if match])
        return TensorStore(folder, _merged(files))
    raise FormatError(str(folder), f"{len(files)} safetensors files and no {INDEX}", "name the checkpoint's file model.safetensors")


def _nonempty(infos: dict[str, TensorInfo], file: Path) -> dict[str, TensorInfo]:
    if not infos:
        raise FormatError(str(file), "holds no tensor", "fetch the file again")
    return infos


def _nothing_to_read(folder: Path) -> FormatError:
    pickles = [file.name for file in sorted(folder.iterdir()) if file.suffix in _PICKLES]
    if pickles:
        return FormatError(
            str(folder), f"its weights are pickle files ({', '.join(pickles[:3])}), which can run code when loaded",
            "convert them to safetensors with the tool that wrote them",
        )  # fmt: skip
    return FormatError(str(folder), "holds no .safetensors and no .gguf file", "give the folder of a checkpoint, or a .gguf file")


def _complete(folder: Path, shards: list[re.Match[str]]) -> None:
    """Without an index, the shards' own numbering must be complete."""
    stems = {(match[1], match[3]) for match in shards}
    if len(stems) != 1:
        raise FormatError(str(folder), "holds shards of more than one checkpoint and no index", f"restore {INDEX}")
    stem, count = stems.pop()
    if int(count) > 100_000:
        raise FormatError(str(folder), f"shards claim to be one of {count}")
    have = {int(match[2]) for match in shards}
    missing = [number for number in range(1, int(count) + 1) if number not in have]
    if missing or len(have) != int(count):
        name = f"{stem}{missing[0]:0{len(count)}d}-of-{count}.safetensors" if missing else f"{stem}*"
        raise FormatError(f"shard {name}", f"missing from {folder}", "fetch the missing file")


def _merged(files: list[Path]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in infos:
                raise FormatError(f"tensor {name}", f"stored in both {infos[name].path.name} and {file.name}")
            infos[name] = info
    return _nonempty(infos, files[0])


def _shard_name(name: object, index: Path) -> str:
    """A shard is a plain file name beside its index; anything that could leave the folder is refused."""
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        raise FormatError(str(index), f"shard {name!r} is not a .safetensors file name")
    if PurePosixPath(name).name != name or PureWindowsPath(name).name != name or "\0" in name:
        raise FormatError(str(index), f"shard {name!r} points outside the checkpoint's folder", "shards lie beside their index")
    return name


def _indexed(index: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(str(index), "has no weight_map", "fetch the index again")
    names = list(dict.fromkeys(_shard_name(name, index) for name in weight_map.values()))
    for name in names:
        if not (index.parent / name).exists():
            raise FormatError(f"shard {name}", f"named by {index.name} and missing from {index.parent}", "fetch the missing file")
    infos = _merged([index.parent / name for name in names])
    for tensor, shard in weight_map.items():
        if tensor not in infos:
            raise FormatError(
                f"tensor {tensor}", f"named by {index.name} and not stored in {shard}", "index and shards do not belong together"
            )
        if infos[tensor].path.name != shard:
            raise FormatError(f"tensor {tensor}", f"{index.name} says {shard}, it is stored in {infos[tensor].path.name}")
    extra = next((name for name in infos if name not in weight_map), None)
    if extra is not None:
        raise FormatError(f"tensor {extra}", f"stored in {infos[extra].path.name} and not named by {index.name}", "index and shards differ")
    return infos
