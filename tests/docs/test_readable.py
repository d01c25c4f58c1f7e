"""Pages stay readable: words, lines, tables and sentences have limits. Decisions are for authors, and have none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, without_fences

PAGES = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    if DOCS / "adr" not in path.parents
)
_WORDS_OF_ALL = 42_000
_WORDS = {
    "README.md": 900,
    "docs/figures.md": 2500,
    "docs/reference/json.md": 2500,
}  # the last two are to look things up
_WORDS_OF_A_PAGE = 2200
_LINES_OF_A_PAGE = 300
_COLUMNS = 100
_UNBREAKABLE = 40  # what is left of a line without its code and links: it could be broken there
_TABLE_COLUMNS = 5
_CELL_CHARACTERS = 150
_PARTS_WITH_SEMICOLON = 0.05
_PARTS_WITH_PARENTHESIS = 0.15


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _words(path: Path) -> int:
    return len(re.findall(r"\b\w[\w'-]*", path.read_text()))


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def sentences(text: str) -> list[str]:
    """The sentences of a page, and the items of its lists, without code, tables and the targets of links."""
    blocks = [""]
    for line in without_fences(text).splitlines():
        if not line.strip() or line.startswith(("|", "#", "<", "!")):
            blocks.append("")
        elif re.match(r"\s*(?:[-*]|\d+\.) ", line):
            blocks.append(re.sub(r"^\s*\S+ ", "", line))
        else:
            blocks[-1] += f" {line}"
    plain = [re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", block)) for block in blocks]
    found = [sentence for block in plain for sentence in re.split(r"(?<=[.!?])\s+", block)]
    return [sentence.strip() for sentence in found if len(sentence.split()) > 3]


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_a_page_is_short(path: Path) -> None:
    assert _words(path) <= _WORDS.get(_name(path), _WORDS_OF_A_PAGE), "split it, or say it shorter"
    if _name(path) not in _WORDS:
        assert len(path.read_text().splitlines()) <= _LINES_OF_A_PAGE


def test_all_pages_together_are_short() -> None:
    assert sum(map(_words, PAGES)) <= _WORDS_OF_ALL, "what only its authors need goes"


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_lines_are_wrapped(path: Path) -> None:
    """Except tables, examples, pictures, and code that cannot be broken."""
    lines = [line.rstrip() for line in without_fences(path.read_text()).splitlines()]
    long = [line for line in lines if len(line) > _COLUMNS and not line.startswith(("|", "!", "<"))]
    assert [line for line in long if len(re.sub(r"`[^`]*`|\([^)]*\)", "", line)) > _UNBREAKABLE] == []


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_tables_are_narrow(path: Path) -> None:
    rows = [_cells(line) for line in without_fences(path.read_text()).splitlines() if line.startswith("|")]
    assert [row for row in rows if len(row) > _TABLE_COLUMNS] == []
    assert [cell for row in rows for cell in row if len(cell) > _CELL_CHARACTERS] == [], "make a list of it"


@pytest.mark.parametrize(("mark", "most"), [(";", _PARTS_WITH_SEMICOLON), ("(", _PARTS_WITH_PARENTHESIS)])
def test_sentences_have_one_idea(mark: str, most: float) -> None:
    found = [sentence for path in PAGES for sentence in sentences(path.read_text())]
    assert len(found) > 1000
    assert len([sentence for sentence in found if mark in sentence]) <= most * len(found)


def test_sentences_are_found() -> None:
    page = "# A title; no\n\nIt is one, of `a; b`. This is the\nnext (a long) one.\n- an item of a list\n\n| a; b c |\n"
    assert sentences(page) == ["It is one, of code.", "This is the next (a long) one.", "an item of a list"]


def test_cells_are_found() -> None:
    assert _cells("| a | `b\\|c` |") == ["a", "`b\\|c`"]
