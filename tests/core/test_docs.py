"""Every code block of README.md and docs/ is run, or carries a reason why not.

How a page is read:

- ``python`` blocks of one page share a namespace and run in one fresh process. The working folder holds ``CKPT`` and
  ``path/to/checkpoint`` (a small mixture of experts with a tokenizer), ``DENSE`` (a small GPTQ model), ``MODEL.gguf``,
  ``model.gguf`` and ``book.txt``; ``GOLDEN`` in the environment names a folder with every carried golden checkpoint.
- ``sh`` blocks and indented blocks are commands, one a line; ``console`` blocks have commands after ``$`` and the output they print.
- Output is compared word by word; ``...`` stands for anything.
- ``<!-- output -->`` before a ``text`` block makes it the output of the python block above; ``<!-- file: PATH -->`` before a block
  writes it to that file; ``<!-- not run: REASON -->`` excludes it.
- ``json`` and ``toml`` blocks must parse.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import readable
from golden import goldens

from hal_core.refusal import CODES

for _name in ("transformers", "gguf", "hatchling", "hal_backend_cpu"):
    pytest.importorskip(_name, reason=f"the pages use {_name}, which is not installed")

ROOT = Path(__file__).resolve().parent.parent.parent
RUNNER = Path(__file__).with_name("docs_runner.py")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKER = re.compile(r"<!-- (not run|file|output)(?:: (.+?))? -->")
RUNNABLE = ("python", "sh", "console")
KNOWN = (*RUNNABLE, "text", "json", "toml")
CKPT, DENSE = "ar_sym_int4_g32_moe", "gptq_v2_asym_int4_g32"


@dataclass
class Block:
    """One code block. kind: its language; "" when the fence names none. line: that before its first line."""

    page: str
    kind: str
    line: int
    text: str
    markers: dict[str, str] = field(default_factory=dict)

    def commands(self) -> list[tuple[str, str | None]]:
        """Command lines, each with the output that the page shows for it."""
        if self.kind == "sh":
            return [(line, None) for line in self.text.splitlines() if line.strip() and not line.strip().startswith("#")]
        found: list[tuple[str, str | None]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], None))
            elif found:
                command, shown = found[-1]
                found[-1] = (command, f"{shown or ''}{line}\n")
        return found


def blocks_of(page: Path) -> list[Block]:
    """Fenced blocks, and blocks indented by four blanks, which are commands."""
    lines, name = page.read_text(encoding="utf-8").splitlines(), str(page.relative_to(ROOT))
    found: list[Block] = []
    markers: dict[str, str] = {}
    index = 0
    while index < len(lines):
        line = lines[index]
        if fence := re.fullmatch(r"(`{3,})(\w*)", line):
            end = lines.index(fence[1], index + 1)
            found.append(Block(name, fence[2], index + 1, "\n".join(lines[index + 1 : end]) + "\n", markers))
            index, markers = end, {}
        elif line.startswith("    ") and (index == 0 or not lines[index - 1].strip()):
            end = next((i for i in range(index, len(lines)) if lines[i].strip() and not lines[i].startswith("    ")), len(lines))
            found.append(Block(name, "sh", index, "\n".join(text[4:] for text in lines[index:end]) + "\n", markers))
            index, markers = end - 1, {}
        elif marker := MARKER.fullmatch(line):
            markers = {**markers, marker[1]: marker[2] or ""}
        elif line.strip():
            assert not markers, f"{name}:{index + 1}: a marker that stands before no block"
        index += 1
    return found


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """The files that pages may name, made once."""
    shelf = tmp_path_factory.mktemp("shelf")
    readable.golden(CKPT, shelf / "CKPT")
    readable.golden(DENSE, shelf / "DENSE")
    readable.gguf(shelf / "MODEL.gguf")
    (shelf / "golden").mkdir()
    for archive in goldens.HERE.glob("*.tar.xz"):
        name = archive.name.removesuffix(".tar.xz")
        (shelf / "golden" / name).symlink_to(goldens.folder(name))
    text = (ROOT / "tests" / "data" / "persuasion.txt").read_text(encoding="utf-8")
    (shelf / "book.txt").write_text(text[:2000])
    return shelf


def lay_out(folder: Path, shelf: Path) -> None:
    (folder / "path" / "to").mkdir(parents=True)
    links = {"CKPT": "CKPT", "DENSE": "DENSE", "path/to/checkpoint": "CKPT", "MODEL.gguf": "MODEL.gguf", "model.gguf": "MODEL.gguf"}
    for link, target in {**links, "book.txt": "book.txt"}.items():
        (folder / link).symlink_to(shelf / target)


def job(blocks: list[Block]) -> list[dict]:
    """What the runner needs; commands of other tools are checked here instead."""
    made: list[dict] = []
    for block in blocks:
        if "not run" in block.markers:
            continue
        if "output" in block.markers:
            made[-1]["expected"] = block.text
            continue
        commands = [pair for pair in block.commands() if not other_tool(pair[0])] if block.kind in ("sh", "console") else []
        entry = {"page": block.page, "kind": block.kind, "line": block.line, "text": block.text, "expected": None}
        if block.kind in RUNNABLE or "file" in block.markers:
            made.append({**entry, "file": block.markers.get("file"), "commands": commands})
    return made


def other_tool(line: str) -> bool:
    """A command of the checkout: not run here, but what it names must exist."""
    words = line.partition("#")[0].split()
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S+", word)]
    if words[0] == "make":
        targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert words[1] in targets, f"{line}: no such target"
        return True
    if words[:2] == ["cmake", "--preset"]:
        presets = json.loads((ROOT / "CMakePresets.json").read_text(encoding="utf-8"))["configurePresets"]
        assert words[2] in [preset["name"] for preset in presets], f"{line}: no such preset"
        return True
    if words[0] == "bash":
        assert (ROOT / words[1]).is_file(), f"{line}: no such file"
        return True
    return False


def same(printed: str, expected: str) -> bool:
    """Word by word; the word ``...`` stands for any number of words."""
    words, parts = printed.split(), [part.split() for part in re.split(r"(?<!\S)\.\.\.(?!\S)", expected)]
    first, *middle = parts
    if words[: len(first)] != first:
        return False
    if not middle:
        return len(words) == len(first)
    at, last = len(first), middle.pop()
    for part in middle:
        found = next((i for i in range(at, len(words) - len(part) + 1) if words[i : i + len(part)] == part), None)
        if found is None:
            return False
        at = found + len(part)
    return len(words) - len(last) >= at and words[len(words) - len(last) :] == last


def environment(shelf: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HAL_")}
    return {**kept, "GOLDEN": str(shelf / "golden"), "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8", "COLUMNS": "160"}


def run_page(page: Path, shelf: Path, folder: Path) -> list[dict]:
    """What its blocks printed, in a process of its own."""
    work = folder / "work"
    lay_out(work, shelf)
    blocks = job(blocks_of(page))
    if not blocks:
        return []
    (folder / "job.json").write_text(json.dumps(blocks), encoding="utf-8")
    command = [sys.executable, str(RUNNER), str(folder / "job.json"), str(folder / "results.json")]
    done = subprocess.run(command, cwd=work, env=environment(shelf), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def runs(request, shelf, tmp_path_factory):
    """The pages that are tested in this session, in the making: two at a time, since each takes one core."""
    chosen = [item.callspec.params["page"] for item in request.session.items if "runs" in getattr(item, "fixturenames", ())]
    pool = ThreadPoolExecutor(max_workers=2)
    yield {page: pool.submit(run_page, page, shelf, tmp_path_factory.mktemp("page")) for page in chosen}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_runs_and_prints_what_the_page_says(page, runs):
    for result in runs[page].result():
        where = f"{page_id(page)}:{result['line']}"
        assert "fault" not in result, f"{where}: {result['fault']}"
        if result["expected"] is not None:
            shown = f"{where}\n--- the page says\n{result['expected']}--- it prints\n{result['printed']}"
            assert same(result["printed"], result["expected"]), shown


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_is_of_a_known_kind(page):
    for block in blocks_of(page):
        where = f"{block.page}:{block.line}"
        assert block.markers.get("not run", "reason"), f"{where}: say why it is not run"
        if "not run" in block.markers or "file" in block.markers:
            continue
        assert block.kind in KNOWN, f"{where}: {block.kind or 'no language'}; use one of {', '.join(KNOWN)}, or say why it is not run"
        if block.kind == "json":
            json.loads(block.text)
        if block.kind == "toml":
            pytest.importorskip("tomllib").loads(block.text)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!\w+:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_reached_from_the_index():
    docs = ROOT / "docs"
    linked = {(docs / link).resolve() for link in re.findall(r"\]\((?!\w+:)([^)#]+)", (docs / "index.md").read_text(encoding="utf-8"))}
    indexes = (docs / "index.md", docs / "README.md")
    assert [page_id(page) for page in PAGES[1:] if page not in linked and page not in indexes] == []


def test_every_refusal_code_has_its_section():
    page = (ROOT / "docs" / "refusals.md").read_text(encoding="utf-8")
    assert [code for code in CODES if f"`{code}`" not in page] == []


def test_every_command_has_its_section_and_an_example():
    from hal_core.cli.main import app

    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    shown = {section.splitlines()[0].strip("`"): section for section in sections}
    for command in app.registered_commands:
        section = shown.get(f"hal {command.name}")
        assert section is not None, f"docs/cli.md has no section for hal {command.name}"
        assert re.search(rf"^\$ hal {command.name}\b", section, re.MULTILINE), f"hal {command.name} has no example"


def test_markers_and_blocks_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n    hal probe   # comment\n    make x\n\n- a list\n  goes on\n\n<!-- not run: needs a GPU -->\n```sh\nhal run X\n```\n"
        "```console\n$ hal facts\n{\n...\n$ hal probe\n```\n```python\nx = 1\n```\n<!-- output -->\n```text\n1\n```\n"
    )
    blocks = blocks_of(page)
    assert [(block.kind, block.markers) for block in blocks] == [
        ("sh", {}), ("sh", {"not run": "needs a GPU"}), ("console", {}), ("python", {}), ("text", {"output": ""}),
    ]  # fmt: skip
    assert blocks[0].commands() == [("hal probe   # comment", None), ("make x", None)]
    assert blocks[2].commands() == [("hal facts", "{\n...\n"), ("hal probe", None)]
    page.write_text("<!-- not run: why -->\nno block\n")
    with pytest.raises(AssertionError, match="stands before no block"):
        blocks_of(page)


@pytest.mark.parametrize(
    ("expected", "matches"),
    [
        ("a b c", True), ("a  b\nc\n", True), ("a b", False), ("a b c d", False), ("b c", False), ("... c", True), ("a ...", True),
        ("a ... c", True), ("a b ... c", True), ("a ... b ... c", True), ("...", True), ("... a", False), ("a ... a", False),
        ("a... c", False), ("a b c ... c", False),
    ],
)  # fmt: skip
def test_output_is_compared_word_by_word(expected, matches):
    assert same("a b c\n", expected) is matches
