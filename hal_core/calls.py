"""Calls into another library as data: function, keywords, and which of them an installed version may lack.

A call is bound against the real function's signature before it is ever made, so that a renamed or dropped parameter is an error at
preparation, on any machine, and never a silent default.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hal_core.errors import ContractError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Bound", "Call", "bind", "find", "resolve", "schema_signature"]

_FIX = "install a version that this backend was made for"


@dataclass(frozen=True)
class Call:
    """One function of a library.

    function: dotted path, e.g. ``flashinfer.fused_moe.cutlass_fused_moe`` or a method of a class.
    keywords: every argument's name. optional: those that a version may lack, and whose absence changes nothing but speed.
    through: where ``function`` takes ``**kwargs``, the path of the one that names them, used where it is there.
    """

    function: str
    keywords: tuple[str, ...]
    optional: tuple[str, ...] = ()
    through: str | None = None


@dataclass(frozen=True)
class Bound:
    """A call that fits the installed library: the function, and the keywords that it takes."""

    target: Callable[..., Any]
    keywords: frozenset[str]

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """``values`` without those that this version lacks."""
        return {name: value for name, value in values.items() if name in self.keywords}

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """The call, without what this version lacks."""
        return self.target(**self.arguments(values))


def find(path: str) -> Any:
    """The object at a dotted path.

    Raises:
        MissingDependencyError: its module cannot be imported. ContractError: the module has no such name.
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and name.startswith(error.name) and cut > 1:
                continue
            raise MissingDependencyError(path, f"{error}", f"install {parts[0]} and what it imports") from error
        for attribute in parts[cut:]:
            if not hasattr(found, attribute):
                raise ContractError(path, f"{name} has no {'.'.join(parts[cut:])}", _FIX)
            found = getattr(found, attribute)
        return found
    raise ContractError(path, "not a dotted path")


def bind(call: Call, target: Callable[..., Any] | None = None) -> Bound:
    """Check ``call`` against the signature of its function.

    Raises:
        ContractError: a keyword that is not optional is unknown, or a parameter without a default is not given.
    """
    function = find(call.function) if target is None else target
    return Bound(function, resolve(call, _signature(_named(call, function))))


def schema_signature(schema: Any) -> inspect.Signature:
    """The signature that a torch op's schema writes (``torch.FunctionSchema``)."""
    parameters = []
    for argument in schema.arguments:
        kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append(inspect.Parameter(argument.name, kind, default=default))
    return inspect.Signature(parameters)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    schema = getattr(getattr(function, "default", None), "_schema", None)
    return inspect.signature(function) if schema is None else schema_signature(schema)


def resolve(call: Call, signature: inspect.Signature, fix: str = _FIX) -> frozenset[str]:
    """The keywords of ``call`` that ``signature`` takes; ``fix`` is said where it does not fit.

    Raises:
        ContractError: a keyword that is not optional is unknown, or a parameter without a default is not given.
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = {name: p for name, p in signature.parameters.items() if p.kind in named and name != "self"}
    unknown = [name for name in call.keywords if name not in takes and name not in call.optional]
    needed = [name for name, p in takes.items() if p.default is p.empty and name not in call.keywords]
    if unknown or needed:
        found = [f"does not take {', '.join(unknown)}"] * bool(unknown) + [f"needs {', '.join(needed)}"] * bool(needed)
        raise ContractError(call.function, " and ".join(found), fix)
    return frozenset(takes) & frozenset(call.keywords)


def _named(call: Call, function: Callable[..., Any]) -> Callable[..., Any]:
    if call.through is None:
        return function
    try:
        return find(call.through)  # type: ignore[no-any-return]
    except ContractError:
        return function
