"""Runs the code blocks of one page, in order and in one process; started by test_docs.py as a script.

Reads a JSON list of blocks from the file named first, writes what each printed, or its fault, to the file named second. Python blocks
share a namespace. Of shell lines, ``hal`` runs in this process (a fresh interpreter would import torch again for each) and
``pip install ./folder`` installs into a folder of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import traceback
from pathlib import Path

SITE = Path("site-packages-of-the-page")


class PageError(Exception):
    """A block that did not do what the page says."""


def run_python(block: dict, namespace: dict) -> str:
    printed = io.StringIO()
    # the page's own line numbers, so that a traceback leads to them
    code = compile("\n" * block["line"] + block["text"], block["page"], "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


def run_line(line: str, may_fail: bool) -> str:
    words = [os.path.expandvars(word) for word in shlex.split(line, comments=True)]
    settings = {}
    while words and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        settings[name] = value
    target = None
    if ">" in words:
        at = words.index(">")
        target, words = Path(words[at + 1]), words[:at] + words[at + 2 :]
    if words[0] == "hal":
        printed = run_hal(words[1:], settings, may_fail)
    elif words[:2] == ["pip", "install"] and all(Path(word).is_dir() for word in words[2:]):
        printed = pip_install(words[2:])
    else:
        raise PageError(f"cannot run {line!r}: mark the block with <!-- not run: REASON -->")
    if target is not None:
        target.write_text(printed, encoding="utf-8")
        return ""
    return printed


def run_hal(arguments: list[str], settings: dict[str, str], may_fail: bool) -> str:
    from hal_core.cli.main import app_main

    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            app_main(arguments)
    except SystemExit as stop:
        if stop.code and not may_fail:
            raise PageError(f"hal {shlex.join(arguments)} ended with {stop.code}: {err.getvalue()}") from None
        return err.getvalue() if stop.code else out.getvalue()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    raise PageError("hal did not exit")


def pip_install(folders: list[str]) -> str:
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--target", str(SITE)]
    command = [sys.executable, "-m", "pip", "install", *options, *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PageError(f"pip install {shlex.join(folders)}: {done.stderr}")
    sys.path.insert(0, str(SITE.resolve()))
    import hal_core

    hal_core.refresh()
    return ""


def run_block(block: dict, namespace: dict) -> list[dict]:
    """One result for each part whose output the page may show."""
    if block["file"]:
        path = Path(block["file"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block["text"], encoding="utf-8")
        return []
    if block["kind"] == "python":
        return [{"line": block["line"], "printed": run_python(block, namespace), "expected": block["expected"]}]
    results = []
    for line, expected in block["commands"]:
        printed = run_line(line, may_fail=(expected or "").startswith("error:"))
        results.append({"line": block["line"], "printed": printed, "expected": expected})
    return results


def main() -> None:
    import torch

    torch.set_num_threads(1)
    results, namespace = [], {"__name__": "__page__"}
    for block in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        try:
            results += run_block(block, namespace)
        except PageError as fault:
            results.append({"line": block["line"], "fault": str(fault)})
            break
        except Exception:  # noqa: BLE001 - whatever a page raises is its fault
            results.append({"line": block["line"], "fault": traceback.format_exc()})
            break
    Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
