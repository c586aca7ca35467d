"""Finds the golden checkpoints, carried or in HAL_GOLDEN_DIR, and unpacks each when a test first asks for it."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
_SUFFIX = ".tar.xz"


def source() -> Path:
    """The folder of archives, or of unpacked checkpoints."""
    chosen = os.environ.get("HAL_GOLDEN_DIR")
    return Path(chosen) if chosen else HERE


def names() -> list[str]:
    """Every golden checkpoint there is, sorted."""
    archives = {path.name[: -len(_SUFFIX)] for path in source().glob(f"*{_SUFFIX}")}
    unpacked = {path.parent.name for path in source().glob("*/golden.safetensors")}
    return sorted(archives | unpacked)


@functools.cache
def unpack_root() -> Path:
    """A folder of this process, removed when it ends."""
    root = Path(tempfile.mkdtemp(prefix="hal-golden-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def folder(name: str) -> Path:
    """The unpacked checkpoint ``name``; read it, never write into it."""
    direct = source() / name
    if (direct / "golden.safetensors").is_file():
        return direct
    archive = source() / f"{name}{_SUFFIX}"
    if not archive.is_file():
        archive = HERE / f"{name}{_SUFFIX}"
    with tarfile.open(archive) as tar:
        tar.extractall(unpack_root(), filter="data")
    return unpack_root() / name


def copy(name: str, target: Path) -> Path:
    """A writable copy, for tests that damage it."""
    shutil.copytree(folder(name), target)
    for path in target.rglob("*"):
        path.chmod(0o644 if path.is_file() else 0o755)
    return target


def config(name: str) -> dict:
    """Its config.json."""
    return json.loads((folder(name) / "config.json").read_text())
