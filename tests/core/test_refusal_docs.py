"""docs/refusals.md is what the code says now, and has a section with an example and a remedy for every code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from hal_core.errors import ContractError
from hal_core.refusal import CODES, Refusal

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def docs():
    source = importlib.util.spec_from_file_location("refusal_docs", ROOT / "scripts" / "refusal_docs.py")
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    return module


def test_the_page_is_current(docs):
    assert docs.PAGE.read_text(encoding="utf-8") == docs.page(), "run: python scripts/refusal_docs.py"


def test_every_code_has_an_example_of_its_own_a_remedy_and_a_family(docs):
    examples = docs.examples()
    assert set(examples) == set(docs.REMEDIES) == set(CODES)
    for code, refusal in examples.items():
        assert refusal.code == code
        assert refusal.asked
        assert refusal.found
        assert refusal.fix
    assert {code.partition(".")[0] for code in CODES} == set(docs.FAMILIES)


def test_every_code_has_its_section(docs):
    text = docs.PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^### `(.*)`$", text, re.MULTILINE) == sorted(CODES, key=lambda c: list(docs.FAMILIES).index(c.partition(".")[0]))
    assert text.count("**What to do.**") == len(CODES)


def test_examples_do_not_depend_on_this_machine(docs, monkeypatch):
    monkeypatch.setenv("HAL_CPU_ISA", "avx2")
    monkeypatch.setenv("HAL_POLICY", "require:reference")
    assert docs.page() == docs.PAGE.read_text(encoding="utf-8")


def test_a_code_that_is_not_documented_cannot_be_used():
    with pytest.raises(ContractError, match="not a documented code"):
        Refusal("backend.moon", "a", "b", "c")
