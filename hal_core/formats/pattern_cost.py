"""Which regular expressions may run: Python's matcher tries every way to split a text among quantifiers, and their choices multiply."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

try:
    from re import _parser as parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as parser

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["pattern_cost"]

#: A name of n characters is split among q open quantifiers in about n**q / q! ways; writers use three or four.
_MAX_OPEN = 5
#: Each optional part doubles the ways.
_MAX_OPTIONAL = 12


def pattern_cost(pattern: str) -> str:
    """What makes a valid pattern too costly, or ''."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compiling has said it already
        nodes = list(_nodes(parser.parse(pattern)))
    repeats = [argument for word, argument in nodes if "REPEAT" in word]
    for _, most, body in repeats:
        inner = {word for word, _ in _nodes(body)}
        if most > 1 and any("REPEAT" in word for word in inner):
            return "a quantified group holds a quantifier"
        if most > 1 and "BRANCH" in inner:
            return "a quantified group holds alternatives"
    spans = [most - least for least, most, _ in repeats]
    if sum(span > 1 for span in spans) > _MAX_OPEN:
        return f"more than {_MAX_OPEN} quantifiers without a fixed count"
    if sum(span == 1 for span in spans) > _MAX_OPTIONAL:
        return f"more than {_MAX_OPTIONAL} optional parts"
    return ""


def _nodes(tree: Any) -> Iterator[tuple[str, Any]]:
    """Name and argument of every node of a parsed pattern, the outer ones first."""
    if isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _nodes(part)
    elif isinstance(tree, parser.SubPattern):
        for word, argument in tree.data:
            yield str(word), argument
            yield from _nodes(argument)
