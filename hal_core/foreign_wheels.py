"""Wheels of others that register no backend here and that users expect to matter: judged by manifests of ours, never imported.

Each is ``foreign/NAME.json``, in the form of a hal_backend.json, for the last release. It becomes a row only where it is installed and
does not fit.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from hal_core.manifest import BackendManifest
from hal_core.refusal import Refusal

if TYPE_CHECKING:
    from hal_core.machine import Machine

__all__ = ["FOREIGN", "foreign_manifest", "foreign_refusals"]

_FOLDER = Path(__file__).parent / "foreign"
#: Normalized names of the distributions that are known: one look at each installed one must be cheap.
FOREIGN = ("intel-extension-for-pytorch",)
#: Each release of these runs with the torch release of its own number and no other.
_LOCKSTEP = ("intel-extension-for-pytorch",)


@functools.cache
def _manifests() -> dict[str, BackendManifest]:
    found = (BackendManifest.parse(path.read_text(encoding="utf-8")) for path in sorted(_FOLDER.glob("*.json")))
    return {manifest.distribution: manifest for manifest in found}


def foreign_manifest(distribution: str, version: str) -> BackendManifest | None:
    """What is known of an installed wheel, for its installed version; None for one that is not in :data:`FOREIGN`."""
    manifest = _manifests().get(distribution)
    if manifest is None or distribution not in _LOCKSTEP:
        return manifest
    try:
        release = Version(version).release
    except InvalidVersion:
        return manifest
    return replace(manifest, torch=f"=={release[0]}.{release[1] if len(release) > 1 else 0}.*")


def foreign_refusals(manifest: BackendManifest, version: str, machine: Machine) -> tuple[Refusal, ...]:
    """Why it cannot work here; its contract does not matter, since it has none."""
    out = []
    for reason in manifest.refusals(machine):
        if reason.code == "backend.contract":
            continue
        if reason.code == "backend.torch":
            asked = f"torch{manifest.torch} for {manifest.distribution} {version}"
            last = _manifests()[manifest.distribution]
            fix = f"pip uninstall {manifest.distribution}; its last release on PyPI needs torch{last.torch}: {last.install}"
            out.append(Refusal(reason.code, asked, reason.found, fix))
        else:
            out.append(reason)
    return tuple(out)
