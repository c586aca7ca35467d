"""Published wheels of other projects, read and never imported: importing most of them needs a GPU, or builds code for one."""

from __future__ import annotations

import ast
import functools
import inspect
import pathlib
import re
import zipfile
from dataclasses import dataclass

import pytest

BUILD = pathlib.Path(__file__).parents[1] / "build"


@dataclass(frozen=True)
class Published:
    """folder: below build/. pattern: of the wheel's file name. missing: why a test is skipped where it is not there."""

    folder: str
    pattern: str
    missing: str

    def wheel(self) -> zipfile.ZipFile:
        found = sorted((BUILD / self.folder).glob(self.pattern))
        if not found:
            pytest.skip(self.missing)
        return _opened(found[0])

    def text(self, member: str) -> str:
        """One file of the wheel."""
        return self.wheel().read(member).decode()

    def module(self, name: str) -> str:
        """The member that a module is."""
        path = name.replace(".", "/")
        return f"{path}.py" if f"{path}.py" in self.wheel().namelist() else f"{path}/__init__.py"

    def function(self, path: str) -> ast.FunctionDef:
        """The definition at a dotted path, e.g. ``aiter.fused_moe.fused_moe``, or of a method; of a class its ``__init__``."""
        module, names = path, []
        while self.module(module) not in self.wheel().namelist():
            module, _, name = module.rpartition(".")
            names.insert(0, name)
        node = ast.parse(self.text(self.module(module)))
        for name in names:
            (node,) = (n for n in node.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name)
        if isinstance(node, ast.ClassDef):
            (node,) = (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
        return node

    def signature(self, path: str) -> inspect.Signature:
        """Parameters of a definition, with the text of their defaults."""
        arguments = self.function(path).args
        assert arguments.vararg is None
        assert arguments.kwarg is None
        named = [*arguments.posonlyargs, *arguments.args]
        defaults = [*[None] * (len(named) - len(arguments.defaults)), *arguments.defaults]
        both = [*zip(named, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
        kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        return inspect.Signature([inspect.Parameter(a.arg, kind, default=empty if d is None else ast.unparse(d)) for a, d in both])

    def executed(self, path: str, **names):
        """A function that needs ``names`` alone, made from its own source."""
        space = dict(names)
        exec(compile(ast.Module([self.function(path)], []), path, "exec"), space)
        return space[path.rpartition(".")[2]]

    def schemas(self, member: str) -> dict[str, str]:
        """Schemas of torch ops by name, as they stand in a native library."""
        return _schemas(self.wheel().filename, member)


@functools.cache
def _opened(path: pathlib.Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


@functools.cache
def _schemas(wheel: str, member: str) -> dict[str, str]:
    found = re.findall(rb"\x00(([a-z]\w+)\([^()\x00]*Tensor[^\x00]*\) *-> *[^\x00]+)\x00", _opened(pathlib.Path(wheel)).read(member))
    return {name.decode(): re.sub(r"\s+", " ", text.decode()) for text, name in found}
