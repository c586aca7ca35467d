"""A checkpoint named on the command line: a local path, or a model on the hub, fetched through huggingface_hub's own cache."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hal_core.errors import FormatError, MissingDependencyError

__all__ = ["HubName", "resolve_checkpoint"]

#: Weights in a form that cannot run code, and what config and tokenizer need.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")
#: Subfolders hold other exports of the same model; "consolidated" is a second copy of the weights in the author's own naming.
_UNWANTED = ("*/*", "consolidated*")
_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<file>[^:\\]+))?", re.ASCII)
#: A text that ends like a file was meant as one, even where it would pass for a hub id.
_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json")


@dataclass(frozen=True)
class HubName:
    """``org/name``, ``org/name@revision``, ``org/name:file.gguf`` or both."""

    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """The parts of a hub id; None when the text cannot be one."""
        match = _ID.fullmatch(text)
        if match is None or (match["file"] is None and text.lower().endswith(_FILES)):
            return None
        return cls(match["repo"], match["revision"], match["file"])

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")


def resolve_checkpoint(text: str | os.PathLike[str]) -> Path:
    """The local folder or file of a checkpoint; a hub id is fetched first, unless it is in the cache already.

    Only safetensors, GGUF, JSON and tokenizer files are fetched, never pickles. A path that exists is always taken as a path.

    Raises:
        FormatError: no such path, a hub that cannot be reached, a repository, revision or file that is not there.
        MissingDependencyError: a hub id without huggingface_hub.
    """
    if not isinstance(text, (str, os.PathLike)):
        raise FormatError(f"checkpoint of type {type(text).__name__}", "not a path", "give a folder, a .gguf file or a hub id")
    path = Path(text)
    if _exists(path):
        return path
    name = HubName.parse(text) if isinstance(text, str) else None
    if name is None:
        raise FormatError(f"checkpoint {text}", "no such file or folder", "give a checkpoint folder, a .gguf file, or a hub id as org/name")
    if name.file is not None:
        return _fetch_file(name, name.file)
    folder = _snapshot(name, _WANTED, _UNWANTED)
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf")):
        return folder
    return _fetch_file(name, _only_gguf(name))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a null byte: cannot be a path
        return False


def _fetch_file(name: HubName, file: str) -> Path:
    if not file.endswith(".gguf"):
        raise FormatError(f"checkpoint {name}", f"{file!r} is not a .gguf file", f"give {name.repo} alone for a folder of safetensors")
    path = _snapshot(name, (glob.escape(file),), ()) / file
    if not path.is_file():
        there = _listed(name)
        found = f"the repository has {', '.join(there)}" if there else "the repository has no such file, or it is not in the cache"
        raise FormatError(f"checkpoint {name}", found, "correct the name of the file")
    return path


def _only_gguf(name: HubName) -> str:
    """The one GGUF file of a repository: a repository of many holds many sizes of one model, of which the user wants one."""
    there = _listed(name)
    if len(there) == 1:
        return there[0]
    if there:
        found = f"the repository holds {len(there)} .gguf files: {', '.join(there[:6])}{', ...' if len(there) > 6 else ''}"
        raise FormatError(f"checkpoint {name}", found, f"name one, e.g. {HubName(name.repo, name.revision, there[0])}")
    found = "no .safetensors and no .gguf file in the repository, or none in the cache"
    raise FormatError(f"checkpoint {name}", found, "pickle files are not read: look for a conversion of the model to safetensors")


def _listed(name: HubName) -> tuple[str, ...]:
    """GGUF files of the repository; none when the hub cannot be asked."""
    try:
        files = _client().HfApi().list_repo_files(name.repo, revision=name.revision)
    except Exception:  # noqa: BLE001 - only a hint is lost, and what the client raises differs between its versions
        return ()
    return tuple(file for file in sorted(files) if file.endswith(".gguf"))


def _client() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        fix = "pip install huggingface_hub, or give a local path"
        raise MissingDependencyError("a checkpoint from the hub", "huggingface_hub is not installed", fix) from error
    return huggingface_hub


def _snapshot(name: HubName, wanted: tuple[str, ...], unwanted: tuple[str, ...]) -> Path:
    client = _client()
    try:
        folder = client.snapshot_download(name.repo, revision=name.revision, allow_patterns=list(wanted), ignore_patterns=list(unwanted))
    except Exception as error:  # what the client raises differs between its versions and its HTTP libraries
        found, fix = _reason(error, name)
        raise FormatError(f"checkpoint {name}", found, fix) from error
    return Path(folder)


#: What the client raises, most telling first, with what it means here. Told by class name: older clients lack some of the classes.
_REASONS = (
    ("IncompleteSnapshotError", "only partly in the hub's cache, and the hub could not be reached", "connect to the network, {elsewhere}"),
    ("OfflineModeIsEnabled", "{path}; not in the hub's cache, and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE, {elsewhere}"),
    ("RevisionNotFoundError", "the repository has no revision {revision!r}", "correct the revision"),
    ("GatedRepoError", "the repository is gated", "accept its terms on the hub, then log in with 'hf auth login'"),
    ("RepositoryNotFoundError", "{path}, and no such repository on the hub, or a private one", "correct the name, or 'hf auth login'"),
    ("LocalEntryNotFoundError", "{path}; not in the hub's cache, and the hub could not be reached", "connect to the network, {elsewhere}"),
    ("HFValidationError", "{path}, and not a valid hub id", "give a path, or a hub id as org/name"),
)


def _reason(error: Exception, name: HubName) -> tuple[str, str]:
    """What stands in the way, and what to do."""
    kinds = {kind.__name__ for cause in (error, error.__cause__) if cause is not None for kind in type(cause).__mro__}
    said = " ".join(str(error.__cause__ or error).split())[:200] or type(error).__name__
    elsewhere = "or give the folder of a copy fetched elsewhere"
    words = {"path": "no such local path", "revision": name.revision or "main", "elsewhere": elsewhere}
    for kind, found, fix in _REASONS:
        if kind in kinds:
            return found.format(**words) + (f" ({said})" if kind.startswith("LocalEntry") else ""), fix.format(**words)
    return f"the hub's client failed: {type(error).__name__}: {said}", f"try again, {elsewhere}"
