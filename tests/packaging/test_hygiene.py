"""What may be in version control: text, small files, pictures of the docs, and the golden archives."""

from __future__ import annotations

import re

GOLDEN_LIMIT = 5 * 2**20
FILE_LIMIT = 2**20
PICTURE_LIMIT = 2**18
MACHINE_PATH = r"(?<![\w.$}])/(?:root|home|work|Users)/\w+"


def is_golden(path, repository) -> bool:
    return path.is_relative_to(repository / "tests" / "golden") and path.name.endswith(".tar.xz")


def is_picture(path, repository) -> bool:
    return path.is_relative_to(repository / "docs" / "img") and path.suffix == ".png"


def test_no_file_is_large(tracked, repository):
    large = [str(p.relative_to(repository)) for p in tracked if p.stat().st_size > FILE_LIMIT and not is_golden(p, repository)]
    assert large == []


def test_golden_archives_stay_few_and_small(tracked, repository):
    archives = [p for p in tracked if is_golden(p, repository)]
    assert len(archives) <= 12
    assert sum(p.stat().st_size for p in archives) <= GOLDEN_LIMIT


def test_no_file_is_binary_except_golden_archives_and_pictures_of_the_docs(tracked, repository):
    binary = [p for p in tracked if b"\0" in p.read_bytes()[:65536]]
    assert [str(p.relative_to(repository)) for p in binary if not (is_golden(p, repository) or is_picture(p, repository))] == []


def test_pictures_are_small_and_shown_in_a_page(tracked, repository):
    pages = "".join(p.read_text(encoding="utf-8") for p in tracked if p.suffix == ".md")
    pictures = [p for p in tracked if is_picture(p, repository)]
    assert [p.name for p in pictures if p.stat().st_size > PICTURE_LIMIT or f"img/{p.name}" not in pages] == []


def test_no_file_names_a_folder_of_one_machine(tracked, repository):
    found = []
    for path in tracked:
        if not (is_golden(path, repository) or is_picture(path, repository)):
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{path.relative_to(repository)}: {m.group()}" for m in re.finditer(MACHINE_PATH, text)]
    assert found == []


def test_text_files_end_with_a_newline_and_have_no_trailing_blanks(tracked, repository):
    bad = []
    for path in tracked:
        if path.suffix in {".py", ".md", ".toml", ".yml", ".cpp", ".h", ".txt", ".json"} or path.name == "Makefile":
            data = path.read_bytes()
            if data and (not data.endswith(b"\n") or re.search(rb"[ \t]+\r?\n", data) or b"\r" in data):
                bad.append(str(path.relative_to(repository)))
    assert bad == []
