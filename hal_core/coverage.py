"""A backend wheel's hal_coverage.json: the torch and Python releases it is for, and which of its kernels were tried where, and how."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from importlib import metadata

from hal_core.errors import ValueDecodeError
from hal_core.jsonable import dumps, loads

__all__ = ["COVERAGE_FILE", "Coverage", "How", "Level", "Tried", "read_coverage"]

COVERAGE_FILE = "hal_coverage.json"
_RELEASE = re.compile(r"\d{1,4}\.\d{1,4}\Z")
_NAME = re.compile(r"[A-Za-z0-9_*?]{1,100}\Z")
_REMARK = re.compile(r"[A-Za-z0-9 ,.:()_/+-]{0,120}\Z")
#: A matrix of more jobs than this is refused by the services that run them.
_MOST_ROWS = 256


class How(str, Enum):
    """How a kernel was tried."""

    RAN = "ran"
    FAILED = "failed"
    INTERPRETED = "interpreted"
    COMPILED = "compiled"
    BOUND = "bound"


@dataclass(frozen=True)
class Level:
    """A row of a processor's kernels: a name for a set of features, for backends whose devices are all of one architecture."""

    name: str
    isa: tuple[str, ...]


@dataclass(frozen=True)
class Tried:
    """What was tried on some architectures with one release each of torch and Python.

    how: ``ran`` on such a device; ``failed``, ran there and failed a check; ``interpreted``, its numbers computed without a device;
        ``compiled`` for it, and the instructions looked at; ``bound``, the call compared with the signature of the library that it calls.
    kernels: names or globs, without the backend's.
    by: what tried it, in a few words.
    """

    how: How
    kernels: tuple[str, ...]
    architectures: tuple[str, ...]
    torch: str
    python: str
    by: str = ""

    def __post_init__(self) -> None:
        _check_releases("tried", (self.torch, self.python))
        if not all(map(_NAME.match, (*self.kernels, *self.architectures))):
            raise ValueDecodeError("coverage.tried", "kernels or architectures that are not plain names")
        if not _REMARK.match(self.by):
            raise ValueDecodeError("coverage.tried.by", f"{self.by[:80]!r} is not one plain sentence of at most 120 characters")

    def covers(self, kernel: str, architecture: str, torch: str, python: str) -> bool:
        """Whether it says something of this kernel there."""
        here = architecture in self.architectures and (torch, python) == (self.torch, self.python)
        return here and any(fnmatchcase(kernel, glob) for glob in self.kernels)


@dataclass(frozen=True)
class Coverage:
    """torch and python: releases that the wheel is meant for, as ``2.11``. levels: instead of the manifest's architectures."""

    torch: tuple[str, ...]
    python: tuple[str, ...]
    tried: tuple[Tried, ...] = ()
    levels: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        _check_releases("torch", self.torch)
        _check_releases("python", self.python)
        if len(self.torch) * len(self.python) > _MOST_ROWS:
            raise ValueDecodeError("coverage", f"more than {_MOST_ROWS} pairs of torch and Python")

    @classmethod
    def parse(cls, text: str) -> Coverage:
        """Decode the text of a hal_coverage.json.

        Raises:
            ValueDecodeError: not JSON, an unknown or missing field, a wrong type, or a release in another form.
        """
        return loads(cls, text)

    def dumps(self) -> str:
        """The text of a hal_coverage.json."""
        return dumps(self, indent=2)

    def how(self, kernel: str, architecture: str, torch: str, python: str) -> tuple[How, ...]:
        """All the ways in which a kernel was tried there; empty for none."""
        found = {tried.how for tried in self.tried if tried.covers(kernel, architecture, torch, python)}
        return tuple(how for how in How if how in found)

    def adding(self, tried: Tried) -> Coverage:
        """With one more trial in place of an earlier one of its kind, architectures and releases; one without kernels only removes it."""
        mark = (tried.how, tried.architectures, tried.torch, tried.python)
        kept = tuple(t for t in self.tried if (t.how, t.architectures, t.torch, t.python) != mark)
        torch, python = _sorted({*self.torch, tried.torch}), _sorted({*self.python, tried.python})
        return replace(self, tried=(*kept, tried) if tried.kernels else kept, torch=torch, python=python)


def _check_releases(where: str, releases: tuple[str, ...]) -> None:
    wrong = [release[:40] for release in releases if not _RELEASE.match(release)]
    if wrong:
        raise ValueDecodeError(f"coverage.{where}", f"{wrong[0]!r} is no release", 'use the form "2.11"')


def _sorted(releases: set[str]) -> tuple[str, ...]:
    return tuple(sorted(releases, key=lambda release: tuple(map(int, release.split(".")))))


def read_coverage(distribution: str) -> Coverage | None:
    """What an installed wheel says of itself; None where it says nothing.

    Raises:
        ValueDecodeError: its file cannot be read.
    """
    try:
        text = metadata.distribution(distribution).read_text(COVERAGE_FILE)
    except metadata.PackageNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueDecodeError(f"{COVERAGE_FILE} of {distribution}", str(error), "reinstall it") from error
    return None if text is None else Coverage.parse(text)
