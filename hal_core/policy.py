"""Which kernels the user wants: three words, with one meaning for linear, MoE, embedding and KV.

``auto``: the best that is accepted. ``prefer:NAME``: that one if accepted, else the best, with a warning that gives
the reasons. ``require:NAME``: that one or an error, never another. NAME is a backend, ``backend.kernel`` or a glob of
either; several are separated by commas; ``op=NAME`` limits one to a kind of op.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hal_core import settings
from hal_core.errors import PolicyError, SettingError
from hal_core.manifest import INSTALL_HINTS
from hal_core.spec import OPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Binding", "Policy", "PolicyRule", "current_policy", "use_policy"]

_NAME = re.compile(r"[A-Za-z0-9_*?\[\]!-]+(\.[A-Za-z0-9_*?\[\]!-]+)?\Z")
_MOST_CHARACTERS = 4096
_WORDS = ("auto", "prefer", "require")


@dataclass(frozen=True)
class PolicyRule:
    """One NAME, and the kind of op it is for (None: see :meth:`Policy.bind`)."""

    name: str
    op: str | None = None

    def __post_init__(self) -> None:
        if self.op is not None and self.op not in OPS:
            raise PolicyError(f"policy scope {self.op[:80]!r}", "not a kind of op", f"use one of {', '.join(OPS)}")
        if not _NAME.match(self.name):
            fix = "use a backend, backend.kernel or a glob, e.g. cpu or cuda.humming_*"
            raise PolicyError(f"policy name {self.name[:80]!r}", "not understood", fix)

    @property
    def whole_backend(self) -> bool:
        """``cuda`` or ``cuda.*``: everything that a backend has."""
        return "." not in self.name or self.name.endswith(".*")

    def matches(self, kernel: str) -> bool:
        """Whether the full name ``backend.kernel`` is meant."""
        return fnmatchcase(kernel, self.name if "." in self.name else f"{self.name}.*")

    def matches_backend(self, backend: str) -> bool:
        """Whether the backend's part of the name is meant."""
        return fnmatchcase(backend, self.name.partition(".")[0])

    def __str__(self) -> str:
        return self.name if self.op is None else f"{self.op}={self.name}"


@dataclass(frozen=True)
class Binding:
    """What a policy means for one kind of op: a word, and the rules that name kernels for it (none under ``auto``)."""

    word: str = "auto"
    rules: tuple[PolicyRule, ...] = ()

    def allows(self, kernel: str) -> bool:
        """Whether a kernel (full name) is among those named; all are under ``auto``."""
        return self.word == "auto" or any(rule.matches(kernel) for rule in self.rules)

    def allows_backend(self, backend: str) -> bool:
        """As :meth:`allows`, for a backend whose kernels are not known because it could not be loaded."""
        return self.word == "auto" or any(rule.matches_backend(backend) for rule in self.rules)

    def __str__(self) -> str:
        return self.word if self.word == "auto" else f"{self.word}:{','.join(rule.name for rule in self.rules)}"


@dataclass(frozen=True)
class Policy:
    """A parsed policy; ``str`` gives the text form back."""

    word: str = "auto"
    rules: tuple[PolicyRule, ...] = ()

    def __post_init__(self) -> None:
        if self.word not in _WORDS:
            raise PolicyError(f"policy {self.word[:80]!r}", "unknown word", f"use {', '.join(_WORDS)}")
        if (self.word == "auto") != (not self.rules):
            fix = "use auto alone, prefer:NAME or require:NAME"
            raise PolicyError(f"policy {self.word!r}", "a name is missing" if not self.rules else "auto takes no name", fix)

    def __hash__(self) -> int:
        # Part of the key of every cached selection: computed once, the fields never change.
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = hash((self.word, self.rules))
            object.__setattr__(self, "_hash", found)
        return found

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read the text form.

        Raises:
            PolicyError: unknown word, scope or malformed name; the message shows it.
        """
        if len(text) > _MOST_CHARACTERS:
            raise PolicyError(f"policy {text[:40]!r}...", f"{len(text)} characters", f"use at most {_MOST_CHARACTERS}")
        word, colon, rest = text.strip().partition(":")
        if not colon:
            return cls(word)
        rules = []
        for part in rest.split(","):
            scope, equals, name = part.strip().rpartition("=")
            rules.append(PolicyRule(name.strip(), scope.strip() if equals else None))
        return cls(word, tuple(rules))

    def __str__(self) -> str:
        return self.word if not self.rules else f"{self.word}:{','.join(map(str, self.rules))}"

    def bind(self, op: str, ops_of: Mapping[str, str], broken: frozenset[str] = frozenset()) -> Binding:
        """What this policy means for ops of kind ``op``.

        A whole backend binds every kind of op. The name of a kernel without scope binds only the kinds of the kernels
        it matches, so that naming an MoE kernel does not forbid every linear. Of a backend that could not be loaded
        the kinds are not known: its kernels' names bind every kind, so that ``require`` fails instead of going elsewhere.

        Args:
            op: kind of op, one of ``OPS``.
            ops_of: kind of op by full name, for every registered kernel.
            broken: backends that are installed and could not be loaded.

        Raises:
            PolicyError: under ``require``, a name that matches nothing; gives near names or how to install it.
        """
        bound = []
        for rule in self.rules:
            kinds = {kind for name, kind in ops_of.items() if rule.matches(name)}
            unloaded = any(map(rule.matches_backend, broken))
            if not kinds and not unloaded and self.word == "require":
                raise self._unmatched(rule, ops_of)
            if rule.op == op or (rule.op is None and (rule.whole_backend or op in kinds or (unloaded and not kinds))):
                bound.append(rule)
        return Binding(self.word, tuple(bound)) if bound else Binding()

    def unmatched(self, ops_of: Mapping[str, str], broken: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """A sentence for each name that matches nothing here."""
        lost = [
            rule
            for rule in self.rules
            if not any(map(rule.matches, ops_of)) and not any(map(rule.matches_backend, broken))
        ]  # fmt: skip
        return tuple(str(self._unmatched(rule, ops_of)) for rule in lost)

    def _unmatched(self, rule: PolicyRule, ops_of: Mapping[str, str]) -> PolicyError:
        backends = sorted({name.partition(".")[0] for name in ops_of})
        backend = rule.name.partition(".")[0]
        if backend in INSTALL_HINTS and backend not in backends:
            return PolicyError(f"policy {self}", f"backend {backend!r} is not installed", INSTALL_HINTS[backend])
        pool = [*ops_of, *backends]
        near = difflib.get_close_matches(rule.name, pool, n=3, cutoff=0.5)
        if near:
            fix = f"did you mean {' or '.join(near)}?"
        else:
            fix = f"use one of the backends {', '.join(backends)}" if backends else "use auto: nothing is registered"
        return PolicyError(f"policy {self}", f"{rule.name!r} matches no registered kernel or backend", fix)


_AUTO = Policy()
_CONTEXT: ContextVar[Policy | None] = ContextVar("hal_policy", default=None)


@contextlib.contextmanager
def use_policy(policy: Policy | str) -> Iterator[Policy]:
    """``with`` block in which selections without a policy argument follow ``policy``; per thread and per task."""
    parsed = policy if isinstance(policy, Policy) else Policy.parse(policy)
    token = _CONTEXT.set(parsed)
    try:
        yield parsed
    finally:
        _CONTEXT.reset(token)


def current_policy(argument: Policy | str | None = None) -> Policy:
    """The policy in force: the argument, else the innermost ``with`` block, else ``HAL_POLICY``, else ``auto``.

    Raises:
        PolicyError: the argument does not parse. SettingError: ``HAL_POLICY`` does not.
    """
    if argument is not None:
        if not isinstance(argument, (str, Policy)):
            raise PolicyError(f"policy of type {type(argument).__name__}", "not a policy", 'give a text such as "require:cpu"')
        return argument if isinstance(argument, Policy) else Policy.parse(argument)
    context = _CONTEXT.get()
    if context is not None:
        return context
    text = settings.policy_text()
    if text is None:
        return _AUTO
    try:
        return Policy.parse(text)
    except PolicyError as error:
        raise SettingError(f"HAL_POLICY={text!r}", f"{error.asked}: {error.found}", error.fix) from error
