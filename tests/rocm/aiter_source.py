"""AITER's published source, read and never imported: importing it builds native code for a GPU."""

from __future__ import annotations

import ast
import inspect
import pathlib
import zipfile

import pytest

RELEASE = "0.1.7.post2.dev18"
FOLDER = pathlib.Path(__file__).parents[2] / "build" / "aiter"


def wheel() -> zipfile.ZipFile:
    """The pre-release's wheel; the test is skipped where it is not there."""
    found = sorted(FOLDER.glob(f"amd_aiter-{RELEASE}-*.whl"))
    if not found:
        pytest.skip(f"amd-aiter {RELEASE} is not in build/aiter: `make test-rocm` downloads it")
    return zipfile.ZipFile(found[0])


def text(member: str) -> str:
    """One file of the wheel."""
    return wheel().read(member).decode()


def function(path: str) -> ast.FunctionDef:
    """The definition at a dotted path, e.g. ``aiter.fused_moe.fused_moe``."""
    module, _, name = path.rpartition(".")
    tree = ast.parse(text(f"{module.replace('.', '/')}.py"))
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return found


def signature(path: str) -> inspect.Signature:
    """Parameters of a definition, with the text of their defaults."""
    arguments = function(path).args
    assert arguments.vararg is None
    assert arguments.kwarg is None
    named = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(named) - len(arguments.defaults)), *arguments.defaults]
    both = [*zip(named, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    return inspect.Signature([inspect.Parameter(a.arg, kind, default=empty if d is None else ast.unparse(d)) for a, d in both])


def executed(path: str, **names):
    """A function of AITER that needs torch alone, made from its own source."""
    space = dict(names)
    exec(compile(ast.Module([function(path)], []), path, "exec"), space)
    return space[path.rpartition(".")[2]]
