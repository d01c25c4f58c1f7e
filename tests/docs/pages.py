"""Reading the documentation: pages, sections, tables."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import gpucr
from gpucr import errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = Path(gpucr.__file__).parent

ROW = re.compile(r"^\|(.+)\|$", re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    """The text of a page of docs/."""
    return (DOCS / name).read_text()


def section(text: str, heading: str) -> str:
    """The text under a heading, up to the next one of the same or a higher level."""
    begin = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert begin is not None, f"there is no heading {heading!r}"
    rest = text[begin.end() :]
    end = re.search(rf"^#{{1,{len(begin[1])}}} ", without_fences(rest), re.MULTILINE)
    return rest[: end.start()] if end else rest


def of_command(text: str, name: str) -> str:
    """The description of a command: a section, or else the table rows that begin with it."""
    if re.search(rf"^#+ {re.escape(name)}$", text, re.MULTILINE):
        return section(text, name)
    found = re.findall(rf"^\| `{re.escape(name)}[ `].*$", text, re.MULTILINE)
    assert found, f"there is no heading or row {name!r}"
    return "\n".join(found)


def without_fences(text: str) -> str:
    """Blank out what is in code fences, where `#` is a comment or a prompt; places stay the same."""
    return _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def fences(text: str) -> str:
    """The content of code fences: commands to type, and their output."""
    return "\n".join(_FENCE.findall(text))


def rows(text: str) -> list[list[str]]:
    """The cells of every table row."""
    return [[cell.strip() for cell in row.split("|")] for row in ROW.findall(text)]


def first_cells(text: str) -> list[str]:
    """The code words in the first cell of every table row."""
    return [code for row in rows(text) for code in CODE.findall(row[0])]


def error_classes() -> list[type[errors.GpucrError]]:
    """Every class of the tree."""
    found = [value for value in vars(errors).values() if inspect.isclass(value)]
    return [value for value in found if issubclass(value, errors.GpucrError)]
