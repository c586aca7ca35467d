"""The wheels under test: those that `make build` left in dist/."""

from __future__ import annotations

import os
import pathlib
import zipfile
from dataclasses import dataclass
from email import message_from_string
from email.message import Message

import pytest


@dataclass(frozen=True)
class Wheel:
    """A built wheel, read without installing it."""

    path: pathlib.Path

    @property
    def tag(self) -> str:
        """Python, ABI and platform tag of the file name."""
        return self.path.stem.split("-", 2)[2]

    def names(self) -> list[str]:
        with zipfile.ZipFile(self.path) as archive:
            return archive.namelist()

    def read(self, name: str) -> bytes:
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(name)

    def info(self, name: str) -> bytes:
        """A file of the .dist-info folder."""
        (member,) = [n for n in self.names() if n.split("/")[0].endswith(".dist-info") and n.split("/", 1)[1] == name]
        return self.read(member)

    def metadata(self) -> Message:
        return message_from_string(self.info("METADATA").decode())


def find_wheel(repository: pathlib.Path, prefix: str) -> Wheel:
    found = sorted((repository / "dist").glob(f"{prefix}-*.whl"))
    if len(found) != 1:
        reason = f"dist/ holds {len(found)} wheels {prefix}-*.whl, not one; `make build` makes it"
        # Under make the wheels are there by construction: missing ones are a fault, not a reason to skip.
        if os.environ.get("HAL_TEST_INSTALLED"):
            pytest.fail(reason)
        pytest.skip(reason)
    return Wheel(found[0])


@pytest.fixture(scope="session")
def core_wheel(repository: pathlib.Path) -> Wheel:
    return find_wheel(repository, "hal_core")


@pytest.fixture(scope="session")
def cpu_wheel(repository: pathlib.Path) -> Wheel:
    return find_wheel(repository, "hal_backend_cpu")


@pytest.fixture(scope="session")
def backend_wheels(repository: pathlib.Path) -> dict[str, Wheel]:
    """The wheel of every backend in this repository, by the backend's name."""
    names = sorted(path.parent.name.removeprefix("backend_") for path in repository.glob("backend_*/pyproject.toml"))
    return {name: find_wheel(repository, f"hal_backend_{name}") for name in names}


@pytest.fixture(scope="session")
def tracked(repository: pathlib.Path) -> list[pathlib.Path]:
    """Files under version control that exist (a checkout may be between two commits)."""
    import shutil
    import subprocess

    if not (repository / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    # The owner of the checkout may be another user than the one who tests it.
    command = ["git", "-c", f"safe.directory={repository}", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout
    return [repository / name for name in listed.split("\0") if name and (repository / name).is_file()]
