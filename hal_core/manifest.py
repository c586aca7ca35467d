"""A backend wheel's hal_backend.json: what it needs, readable before anything of the wheel is imported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from hal_core.errors import ValueDecodeError
from hal_core.jsonable import dumps, loads
from hal_core.kernel import CONTRACT
from hal_core.machine import Machine
from hal_core.refusal import Refusal
from hal_core.spec import OPS

__all__ = ["FILE_NAME", "INSTALL_HINTS", "BackendManifest", "read_manifest"]

FILE_NAME = "hal_backend.json"
#: How to get the backends of this project, by name, for hints about those that are not installed.
INSTALL_HINTS = {name: f"pip install hal-backend-{name}" for name in ("cpu", "cuda", "rocm", "xpu")}


@dataclass(frozen=True)
class BackendManifest:
    """What a wheel says of itself.

    contract: version of the backend contract it was built for. torch: range of torch versions (PEP 440), empty for all.
    platforms: ``linux_x86_64`` forms, or ``any``. isa and architectures: the least that any of its kernels needs;
    empty for no need. ops: kinds of op it has kernels for. install: command that installs a fitting version.
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

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or not self.name.isascii():
            raise ValueDecodeError("manifest.name", f"{self.name!r} is not a plain name", "use letters, digits and underscores")
        try:
            SpecifierSet(self.torch)
        except InvalidSpecifier as error:
            raise ValueDecodeError(f"manifest.torch {self.torch!r}", "not a version range", 'use the form ">=2.11"') from error
        unknown = [op for op in self.ops if op not in OPS]
        if unknown:
            raise ValueDecodeError("manifest.ops", f"{', '.join(unknown)} unknown", f"use {', '.join(OPS)}")

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
        return (*self._contract(), *self._torch(machine), *self._platform(machine))

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
        fix = f"uninstall {self.distribution}, or install its build for this platform"
        return (Refusal("backend.platform", asked, machine.platform, fix),)


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
        return Refusal("backend.manifest", f"a valid {FILE_NAME} in {owner}", str(error), fix)
    if manifest.name != entry_point.name:
        asked = f"a manifest named {entry_point.name!r}, as its entry point"
        return Refusal("backend.manifest", asked, f"{manifest.name!r} in {owner}", fix)
    return manifest
