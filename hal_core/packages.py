"""Libraries that a kernel calls and that its wheel does not bring: there or not, and of which version, from package metadata alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from hal_core.refusal import Refusal

if TYPE_CHECKING:
    from hal_core.machine import Machine

__all__ = ["package_refusals", "torch_build_refusals"]

#: How builds of torch for one kind of device begin their local version; one from source has a label of its own.
_TORCH_LABELS = {"cpu": "cpu", "cuda": "cu", "rocm": "rocm", "xpu": "xpu"}
_PLATFORMS = {"rocm": "ROCm", "xpu": "Intel GPUs"}


def package_refusals(machine: Machine, distribution: str, versions: str, install: str) -> tuple[Refusal, ...]:
    """Why a kernel cannot call ``distribution`` on ``machine``; empty when it can. Imports nothing.

    Args:
        machine: its versions are looked at, so that a selection can be made for a machine that is not at hand.
        distribution: the library's name on the package index.
        versions: range that the kernel was made for (PEP 440).
        install: command that installs a fitting version.
    """
    found = machine.version(distribution)
    if found is None:
        return (Refusal("backend.package", f"{distribution} {versions}", "not installed", install),)
    try:
        fits = SpecifierSet(versions).contains(Version(found), prereleases=True)
    except InvalidVersion:
        fits = False
    return () if fits else (Refusal("backend.package", f"{distribution} {versions}", f"version {found}", install),)


def torch_build_refusals(machine: Machine, kind: str, fix: str) -> tuple[Refusal, ...]:
    """A device of ``kind`` (``rocm``, ``xpu``) beside a torch that was built for others; no torch at all is the manifest's to refuse."""
    found = machine.version("torch")
    if found is None or not any(device.kind == kind for device in machine.devices):
        return ()
    try:
        label = Version(found).local
    except InvalidVersion:
        label = None
    others = tuple(start for other, start in _TORCH_LABELS.items() if other != kind)
    if label is not None and not label.startswith(others):
        return ()
    return (Refusal("backend.torch", f"torch built for {_PLATFORMS[kind]} (+{_TORCH_LABELS[kind]})", f"torch {found}", fix),)
