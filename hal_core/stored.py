"""Facts of machines that are not at hand: the set that ships with this package, and files that ``hal facts`` wrote elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from hal_core.errors import ValueDecodeError
from hal_core.machine import FactMark, Machine, Mark
from hal_core.reading import read_small_text, short

__all__ = ["load_facts", "stored_names", "with_software"]

_FOLDER = Path(__file__).parent / "facts"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}\Z")
_MOST_BYTES = 1 << 20
_MOST_ITEMS = 1024
_MOST_CHARACTERS = 500


def stored_names() -> tuple[str, ...]:
    """Names that :func:`load_facts` knows without a file, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_facts(text: str) -> Machine:
    """The machine of a stored name (``h200``) or of a file (``box.json``). A name never leads out of the package's own folder.

    Raises:
        ValueDecodeError: no such name or file; or a file that does not hold the facts of one machine; says where.
    """
    if _NAME.match(text) and text in stored_names():
        return _decoded(_FOLDER / f"{text}.json", f"stored facts {text}")
    if not _exists(text):
        known = ", ".join(stored_names())
        raise ValueDecodeError(
            f"facts {short(text, 80)!r}", "no such file, nor a stored name", f"give a file of 'hal facts', or one of {known}"
        )
    return _decoded(Path(text), f"facts {short(text, 80)}")


def _exists(text: str) -> bool:
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        return False


def with_software(machine: Machine, local: Machine) -> Machine:
    """Facts that name no torch are facts of hardware alone: the software of ``local`` is then assumed, and marked as reported."""
    if machine.version("torch") is not None:
        return machine
    own = {version.name for version in machine.versions}
    software = tuple(version for version in local.versions if version.name not in own and not version.name.endswith("_driver"))
    first = len(machine.versions)
    marks = [FactMark(f"versions.{first + i}", Mark.REPORTED, "this process; the facts name no torch") for i in range(len(software))]
    return replace(machine, versions=(*machine.versions, *software), marks=(*machine.marks, *marks))


def _decoded(path: Path, what: str) -> Machine:
    text = read_small_text(path, _MOST_BYTES, what)
    try:
        machine = Machine.from_json(text)
        _bounded(machine)
    except ValueDecodeError as error:
        raise ValueDecodeError(what, short(error), "write them with 'hal facts > FILE'") from error
    return machine


def _bounded(machine: Machine) -> None:
    """What is printed and compared later must be short and printable; a file of a stranger may hold anything."""
    cpu = machine.processor
    fields = (machine.devices, machine.isa, machine.denied, machine.versions, machine.marks, cpu.numa, cpu.caches, cpu.states)
    if max(map(len, fields)) > _MOST_ITEMS:
        raise ValueDecodeError("$", f"a list of more than {_MOST_ITEMS} items")
    words = [machine.platform, *machine.isa, *cpu.states, *(cache.kind for cache in cpu.caches)]
    for device in machine.devices:
        words += [device.vendor, device.architecture, device.name]
    words += [text for denied in machine.denied for text in (denied.name, denied.reason, denied.fix)]
    words += [text for version in machine.versions for text in (version.name, version.version)]
    words += [text for mark in machine.marks for text in (mark.fact, mark.source)]
    bad = next((word for word in words if len(word) > _MOST_CHARACTERS or not word.isprintable()), None)
    if bad is not None:
        raise ValueDecodeError("$", f"text that is too long or not printable: {bad[:40]!a}")
