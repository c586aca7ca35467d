"""A backend wheel's hal_backend.json: what it needs, readable before anything of the wheel is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from hal_core.errors import ValueDecodeError
from hal_core.jsonable import dumps, loads
from hal_core.kernel import CONTRACT
from hal_core.machine import Machine
from hal_core.reading import short
from hal_core.refusal import Refusal
from hal_core.spec import OPS

__all__ = ["FILE_NAME", "INSTALL_HINTS", "BackendManifest", "read_manifest"]

FILE_NAME = "hal_backend.json"
#: A distribution's name as package indexes allow it, and the arguments that an install command may have: what a stranger's manifest
#: says is printed as a command to run.
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?\Z")
#: Requirement specifiers alone: no option could name another index, no URL another source.
_INSTALL = re.compile(r"(pip|python -m pip) install( +[\"']?[A-Za-z0-9][A-Za-z0-9._+=<>~!*,\[\]-]*[\"']?)+\Z")
_REMARK = re.compile(r"[A-Za-z0-9 ,.:()_/+-]{0,120}\Z")
_WORD = re.compile(r"[A-Za-z0-9_.*-]{1,64}\Z")
_MOST_ITEMS = 256
_MOST_CHARACTERS = 300
#: Which kind of device an architecture's name belongs to, by its beginning; the others are Intel's GPUs.
_KINDS = (("sm_", "cuda"), ("gfx", "rocm"), ("x86_64", "cpu"), ("aarch64", "cpu"), ("arm64", "cpu"))
#: How to get the backends of this project, by name, for hints about those that are not installed.
INSTALL_HINTS = {name: f"pip install hal-backend-{name}" for name in ("cpu", "cuda", "rocm", "xpu")}


@dataclass(frozen=True)
class BackendManifest:
    """What a wheel says of itself.

    contract: version of the backend contract it was built for. torch: range of torch versions (PEP 440), empty for all.
    platforms: ``linux_x86_64`` forms, or ``any``. isa and architectures: the least that any of its kernels needs;
    empty for no need. ops: kinds of op it has kernels for. install: command that installs a fitting version.
    tested: what its user should know of where it ran, in a few words; empty where its tests run it.
    """

    name: str
    distribution: str
    contract: int
    torch: str
    ops: tuple[str, ...]
    install: str
    platforms: tuple[str, ...] = ("any",)
    isa: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    tested: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or not self.name.isascii() or len(self.name) > 64:
            raise ValueDecodeError("manifest.name", f"{self.name[:80]!r} is not a plain name", "use letters, digits and underscores")
        self._check_texts()
        try:
            SpecifierSet(self.torch)
        except InvalidSpecifier as error:
            raise ValueDecodeError(f"manifest.torch {self.torch!r}", "not a version range", 'use the form ">=2.11"') from error
        unknown = [op for op in self.ops if op not in OPS]
        if unknown:
            raise ValueDecodeError("manifest.ops", f"{', '.join(unknown)} unknown", f"use {', '.join(OPS)}")

    def _check_texts(self) -> None:
        """What is shown to the user, and compared: short, plain, and a command only of pip."""
        if not _DISTRIBUTION.match(self.distribution):
            raise ValueDecodeError("manifest.distribution", f"{self.distribution[:80]!r} is not a distribution's name")
        if not _INSTALL.match(self.install) or len(self.install) > _MOST_CHARACTERS:
            found = f"{self.install[:80]!r} is not a pip install command"
            raise ValueDecodeError("manifest.install", found, "use the form pip install hal-backend-cpu")
        if abs(self.contract) > 1 << 31 or len(self.torch) > _MOST_CHARACTERS:
            raise ValueDecodeError("manifest", "contract or torch is out of all proportion")
        if not _REMARK.match(self.tested):
            raise ValueDecodeError("manifest.tested", f"{self.tested[:80]!r} is not one plain sentence of at most 120 characters")
        for name, words in (("platforms", self.platforms), ("isa", self.isa), ("architectures", self.architectures)):
            if len(words) > _MOST_ITEMS or not all(map(_WORD.match, words)):
                raise ValueDecodeError(f"manifest.{name}", "too many items, or an item that is not one plain word")

    @classmethod
    def parse(cls, text: str) -> BackendManifest:
        """Decode the text of a hal_backend.json.

        Raises:
            ValueDecodeError: not JSON, an unknown or missing field, a wrong type.
        """
        return loads(cls, text)

    @classmethod
    def of_distribution(cls, distribution: str) -> BackendManifest:
        """The manifest in an installed wheel's metadata; what a backend's own ``manifest`` attribute should return.

        Raises:
            ValueDecodeError: not installed, no manifest in it, or an invalid one.
        """
        try:
            text = metadata.distribution(distribution).read_text(FILE_NAME)
        except metadata.PackageNotFoundError as error:
            raise ValueDecodeError(f"manifest of {distribution}", "not installed", f"pip install {distribution}") from error
        if text is None:
            raise ValueDecodeError(f"manifest of {distribution}", f"no {FILE_NAME} in its metadata", "put it into the wheel's .dist-info")
        return cls.parse(text)

    def dumps(self) -> str:
        """The text of a hal_backend.json."""
        return dumps(self, indent=2)

    def refusals(self, machine: Machine) -> tuple[Refusal, ...]:
        """Every reason why the wheel must not be imported into a process on ``machine``."""
        return (
            *self._contract(), *self._torch(machine), *self._platform(machine), *self._isa(machine), *self._architectures(machine),
        )  # fmt: skip

    def _contract(self) -> tuple[Refusal, ...]:
        if self.contract == CONTRACT:
            return ()
        # The older side is the one to replace.
        fix = f"{self.install} --upgrade" if self.contract < CONTRACT else "pip install --upgrade hal-core"
        return (Refusal("backend.contract", f"contract {CONTRACT}", f"{self.distribution} is built for contract {self.contract}", fix),)

    def _torch(self, machine: Machine) -> tuple[Refusal, ...]:
        if not self.torch:
            return ()
        found = machine.version("torch")
        fix = f'pip install "torch{self.torch}", or a version of {self.distribution} built for torch {found}'
        if found is None:
            return (Refusal("backend.torch", f"torch{self.torch}", "torch is not installed", f'pip install "torch{self.torch}"'),)
        try:
            inside = SpecifierSet(self.torch).contains(Version(found), prereleases=True)
        except InvalidVersion:
            inside = False
        return () if inside else (Refusal("backend.torch", f"torch{self.torch}", f"torch {found}", fix),)

    def _platform(self, machine: Machine) -> tuple[Refusal, ...]:
        if "any" in self.platforms or machine.platform in self.platforms:
            return ()
        asked = " or ".join(self.platforms) or "no platform at all"
        fix = f"pip install --force-reinstall --no-deps {self.distribution}, or pip uninstall it if there is no build for this platform"
        return (Refusal("backend.platform", asked, machine.platform, fix),)

    def _isa(self, machine: Machine) -> tuple[Refusal, ...]:
        """Instruction sets that all of the wheel needs: without one, importing it may already be fatal."""
        missing = [feature for feature in self.isa if feature not in machine.isa]
        if not missing or not any(device.kind == "cpu" for device in machine.devices):
            return ()
        asked = f"{', '.join(self.isa)} for {self.distribution}"
        found = "; ".join(f"{feature} {machine.why_not(feature)}" for feature in missing)
        remedies = dict.fromkeys(d.fix for d in machine.denied if d.name in missing)
        fix = "; ".join(remedies) or f"pip uninstall {self.distribution}: this processor cannot run it"
        return (Refusal("backend.isa", asked, found, fix),)

    def _architectures(self, machine: Machine) -> tuple[Refusal, ...]:
        """Devices that are here and that the wheel was not built for.

        Where there is no device of the kind at all, importing is safe, and selections for other machines need the kernels.
        """
        kinds = {_kind(architecture) for architecture in self.architectures}
        seen = [device.architecture for device in machine.devices if device.kind in kinds]
        if not seen or "unknown" in seen or any(architecture in self.architectures for architecture in seen):
            return ()
        found = ", ".join(dict.fromkeys(seen))
        fix = f"{self.install} --upgrade, for a build with {found}; or pip uninstall {self.distribution}"
        return (Refusal("backend.arch", f"{' or '.join(self.architectures)} for {self.distribution}", found, fix),)


def _kind(architecture: str) -> str:
    return next((kind for start, kind in _KINDS if architecture.startswith(start)), "xpu")


def read_manifest(entry_point: metadata.EntryPoint) -> BackendManifest | Refusal:
    """The manifest in the entry point's own distribution, or why there is none; imports nothing of the wheel."""
    dist = entry_point.dist
    owner = dist.metadata["Name"] if dist is not None else entry_point.value
    fix = f"pip install --upgrade {owner}, or tell its authors"
    try:
        text = dist.read_text(FILE_NAME) if dist is not None else None
    except (OSError, UnicodeDecodeError) as error:
        return Refusal("backend.manifest", f"a readable {FILE_NAME} in {owner}", str(error), fix)
    if text is None:
        return Refusal("backend.manifest", f"{FILE_NAME} in the metadata of {owner}", "no such file", fix)
    try:
        manifest = BackendManifest.parse(text)
    except ValueDecodeError as error:
        return Refusal("backend.manifest", f"a valid {FILE_NAME} in {owner}", short(error), fix)
    if manifest.name != entry_point.name:
        asked = f"a manifest named {entry_point.name!r}, as its entry point"
        return Refusal("backend.manifest", asked, f"{manifest.name!r} in {owner}", fix)
    return manifest
