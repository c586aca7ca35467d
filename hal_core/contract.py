"""What a plugin must register, checked when it registers: every attribute answered, of the right type, and none unknown.

A kernel that forgot to answer a question would otherwise give wrong numbers in the one model that asks it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import inspect
import math
import re
import types
import typing
from typing import TYPE_CHECKING, Any, Protocol

from hal_core.kernel import EmbeddingKernel, Kernel, KVKernel, LinearKernel, MoEKernel
from hal_core.kv.scheme import KV_SCHEMES
from hal_core.manifest import BackendManifest
from hal_core.refusal import Refusal
from hal_core.schemes import DTYPES
from hal_core.spec import ACTIVATIONS, FLOATS, ROUTING_FORMS, EmbeddingSpec, KVCacheSpec, LinearSpec, MoESpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hal_core.formats.unpack import Unpacker
    from hal_core.machine import Device, Machine

__all__ = ["Backend", "checked_kernels", "checked_unpackers", "kernel_problems"]

_KINDS: dict[type, type] = {LinearKernel: LinearSpec, MoEKernel: MoESpec, EmbeddingKernel: EmbeddingSpec, KVKernel: KVCacheSpec}
_NAME = re.compile(r"[A-Za-z0-9_]+\Z")
_DEVICES = ("any", "cpu", "cuda", "xpu", "rocm")


class Backend(Protocol):
    """The object that an entry point of group ``hal_core.backends`` names."""

    #: Equal to the hal_backend.json in the wheel's metadata.
    manifest: BackendManifest

    def devices(self, machine: Machine) -> tuple[Device, ...]:
        """The devices of ``machine`` that this backend serves; opens none of them."""

    def kernels(self) -> Iterable[Kernel[Any]]:
        """One instance of each kernel; cheap, called once."""

    # Optional: ``remarks(machine) -> Iterable[str]``, what a user should know of this machine; ``hal probe`` shows it.
    # Optional: ``unpackers() -> Iterable[hal_core.formats.unpack.Unpacker]``, ops that read checkpoints faster than torch does.


def checked_unpackers(backend: object) -> tuple[tuple[Unpacker, ...], tuple[str, ...]]:
    """What a plugin's object offers to readers of checkpoints, or every reason why it breaks the contract (then there are none)."""
    offer = getattr(backend, "unpackers", None)
    if offer is None:
        return (), ()
    if not callable(offer):
        return (), (f"unpackers is {_shown(offer)}, not a method",)
    offered = tuple(offer())
    problems = [f"unpacker {_label(each)}: {problem}" for each in offered for problem in _unpacker_problems(each)]
    names = [getattr(each, "name", None) for each in offered]
    problems += [f"unpacker {name}: the name is registered {names.count(name)} times" for name in {*names} if names.count(name) > 1]
    return ((), tuple(problems)) if problems else (offered, ())


def _unpacker_problems(unpacker: object) -> Iterator[str]:
    if isinstance(unpacker, type):
        yield "is a class: register an instance"
        return
    name = getattr(unpacker, "name", None)
    if not isinstance(name, str) or not _NAME.match(name):
        yield f"name {name!r} must be letters, digits and underscores"
    for method in ("codes", "turn"):
        if not callable(getattr(unpacker, method, None)):
            yield f"has no method {method}()"


def checked_kernels(backend: object, manifest: BackendManifest | None, owner: str) -> tuple[tuple[Kernel[Any], ...], tuple[Refusal, ...]]:
    """The kernels of a plugin's object, or every reason why it breaks the contract (then there are no kernels).

    Args:
        backend: what the entry point names.
        manifest: what was read from the wheel before import; None for the built-in backend.
        owner: the plugin's name for messages, e.g. ``cuda (hal-backend-cuda 0.1.0)``.
    """
    problems = list(_backend_problems(backend, manifest))
    kernels: tuple[Any, ...] = ()
    if not problems:
        kernels = tuple(backend.kernels())  # type: ignore[attr-defined]
        served = backend.manifest.ops  # type: ignore[attr-defined]
        for kernel in kernels:
            label = f"kernel {_label(kernel)}"
            problems += [f"{label}: {problem}" for problem in kernel_problems(kernel, served)]
        names = [getattr(kernel, "name", None) for kernel in kernels]
        repeated = dict.fromkeys(str(name) for name in names if name is not None and names.count(name) > 1)
        problems += [f"kernel {name}: the name is registered {names.count(name)} times" for name in repeated]
    if problems:
        fix = "the plugin's author must answer it; see docs/write-a-backend.md"
        return (), tuple(Refusal("backend.invalid", f"a valid backend from {owner}", problem, fix) for problem in problems)
    return kernels, ()


def kernel_problems(kernel: object, ops: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Every way in which one kernel breaks the contract; ``ops`` are those that its backend's manifest names."""
    kind = next((kind for kind in _KINDS if isinstance(kernel, kind)), None)
    if kind is None:
        hint = "a class: register an instance" if isinstance(kernel, type) else f"of type {type(kernel).__name__}"
        return (f"is {hint}, not a LinearKernel, MoEKernel, EmbeddingKernel or KVKernel",)
    declared = _declared(kind)
    problems = [*_answers(kernel, declared), *_unknown(kernel, declared)]
    if not problems:
        problems += _meaning(typing.cast("Kernel[Any]", kernel), _KINDS[kind])
        if ops is not None and kernel.op not in ops:  # type: ignore[attr-defined]
            problems.append(f"op {kernel.op!r} is not among the manifest's ops ({', '.join(ops)})")  # type: ignore[attr-defined]
    return tuple(problems)


def _label(kernel: object) -> str:
    name = getattr(kernel, "name", None)
    return name if isinstance(name, str) else type(kernel).__qualname__


def _backend_problems(backend: object, manifest: BackendManifest | None) -> Iterator[str]:
    if isinstance(backend, type):
        yield f"the entry point names the class {backend.__name__}: name an instance"
        return
    for method in ("devices", "kernels"):
        if not callable(getattr(backend, method, None)):
            yield f"the {type(backend).__name__} has no method {method}()"
    own = getattr(backend, "manifest", None)
    if not isinstance(own, BackendManifest):
        yield f"its manifest is a {type(own).__name__}, not a BackendManifest"
    elif manifest is not None and own != manifest:
        differ = [f.name for f in dataclasses.fields(own) if getattr(own, f.name) != getattr(manifest, f.name)]
        yield f"its manifest attribute differs from the wheel's hal_backend.json in {', '.join(differ)}"


@functools.cache
def _declared(kind: type) -> dict[str, Any]:
    """Attribute name to type, for one kind of kernel: what the contract's classes annotate as class variables."""
    hints = typing.get_type_hints(kind)
    return {name: typing.get_args(hint)[0] for name, hint in hints.items() if typing.get_origin(hint) is typing.ClassVar}


def _answers(kernel: object, declared: dict[str, Any]) -> Iterator[str]:
    for name, hint in declared.items():
        try:
            value = getattr(kernel, name)
        except AttributeError:
            yield f"{name} is not answered"
            continue
        yield from _mistyped(name, value, hint)


def _unknown(kernel: object, declared: dict[str, Any]) -> Iterator[str]:
    """A public attribute that is no method and that the contract does not know is most likely a misspelt answer."""
    for name in dir(kernel):
        if name.startswith("_") or name in declared:
            continue
        value = inspect.getattr_static(kernel, name)
        if not (callable(value) or isinstance(value, (classmethod, staticmethod, property, functools.cached_property))):
            yield f"unknown attribute {name!r}; the contract knows {', '.join(sorted(declared))} (helpers start with an underscore)"


def _mistyped(path: str, value: object, hint: Any) -> Iterator[str]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if not isinstance(value, tuple):
            yield f"{path} is {_shown(value)}, not a tuple"
        elif args[-1] is Ellipsis:
            for index, item in enumerate(value):
                yield from _mistyped(f"{path}[{index}]", item, args[0])
        elif len(value) != len(args):
            yield f"{path} has {len(value)} items, not {len(args)}"
        else:
            for index, (item, arm) in enumerate(zip(value, args, strict=True)):
                yield from _mistyped(f"{path}[{index}]", item, arm)
    elif origin in (typing.Union, types.UnionType):
        if not any(not list(_mistyped(path, value, arm)) for arm in args):
            yield f"{path} is {_shown(value)}, not {' or '.join(getattr(arm, '__name__', str(arm)) for arm in args)}"
    elif dataclasses.is_dataclass(hint) and isinstance(value, typing.cast(type, hint)):
        hints = typing.get_type_hints(hint)
        for field in dataclasses.fields(hint):
            yield from _mistyped(f"{path}.{field.name}", getattr(value, field.name), hints[field.name])
    elif not _is_scalar(value, hint):
        yield f"{path} is {_shown(value)}, not {getattr(hint, '__name__', str(hint))}"


def _is_scalar(value: object, hint: Any) -> bool:
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})" if value is not None else "None"


def _meaning(kernel: Kernel[Any], spec: type) -> Iterator[str]:
    """Answers of the right type that cannot be true."""
    if not _NAME.match(kernel.name):
        yield f"name {kernel.name!r} must be letters, digits and underscores"
    if kernel.op != spec.op:  # type: ignore[attr-defined]
        yield f"op is {kernel.op!r}, but its class serves {spec.op!r}"  # type: ignore[attr-defined]
    for field, words, known in _words(kernel):
        if not words:
            yield f"{field} is empty: it serves nothing"
        unknown = [word for word in words if word not in known]
        if unknown:
            yield f"{field} has unknown {', '.join(map(repr, unknown))}; known: {', '.join(known)}"
    if "any" in kernel.devices and kernel.architectures:
        yield "devices is 'any' but architectures are limited"
    if not (math.isfinite(kernel.error_bound) and kernel.error_bound > 0):
        yield f"error_bound {kernel.error_bound} is not a positive number"
    least, most = kernel.m_range
    if least < 0 or (most is not None and most < max(least, 1)):
        yield f"m_range {kernel.m_range} holds no batch size"
    dims = {f.name for f in dataclasses.fields(spec)}
    for limit in kernel.limits:
        if limit.dim not in dims:
            yield f"limit on {limit.dim!r}, which {spec.__name__} does not have"
        elif limit.multiple < 1 or (limit.most is not None and limit.most < limit.least):
            yield f"limit on {limit.dim} serves no size"


def _words(kernel: Kernel[Any]) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    yield "devices", kernel.devices, _DEVICES
    yield "dtypes", kernel.dtypes, FLOATS
    yield "out_dtypes", kernel.out_dtypes, FLOATS
    if isinstance(kernel, KVKernel):
        for side in ("keys", "values"):
            globs = getattr(kernel.schemes, side)
            known = tuple(map(str, KV_SCHEMES))
            matching = tuple(glob for glob in globs if any(fnmatch.fnmatchcase(text, glob) for text in known))
            yield f"schemes.{side}", globs, matching or known
        return
    yield "schemes.dtypes", kernel.schemes.dtypes, tuple(DTYPES)
    if isinstance(kernel, MoEKernel):
        yield "routing", kernel.routing, ROUTING_FORMS
        yield "epilogue.activations", kernel.epilogue.activations, ACTIVATIONS
