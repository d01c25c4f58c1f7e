"""Links have targets, and pages name only existing commands and options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpucr.model import CudaState
from tests.docs.command_tree import COMMANDS, unknown_options
from tests.docs.pages import CODE, DOCS, ROOT, SOURCES, fences, page, without_fences

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def test_every_state_is_named() -> None:
    for name in ("reference/json.md", "reference/python-records.md"):
        words = set(CODE.findall(page(name)))
        assert all(state.word in words or state.name in words for state in CudaState), name


PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_has_a_target(path: Path) -> None:
    broken = []
    for link in _LINK.findall(without_fences(path.read_text())):
        file, _, anchor = link.partition("#")
        if ":" in file:
            continue
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or ROOT not in target.parents or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_fences(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in _LINK.findall(page("README.md"))}
    assert {path for path in DOCS.rglob("*.md") if path.name != "README.md"} <= linked


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_and_options_of_a_page_exist(path: Path) -> None:
    """In the text and in the examples."""
    text = path.read_text()
    typed = re.findall(r"`gpucr ([a-z]+(?:-[a-z]+)*)([^`\n]*)`", without_fences(text))
    typed += re.findall(r"^(?:[#$] )?gpucr ([a-z]+(?:-[a-z]+)*)(.*)$", fences(text), re.MULTILINE)
    for name, rest in typed:
        assert f"gpucr {name}" in COMMANDS
        assert unknown_options(name, rest) == set(), f"gpucr {name}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300, "split it, or say it shorter"


def test_the_architecture_names_every_room_and_step() -> None:
    text = page("architecture.md") + page("explanation/steps.md")
    rooms = {path.stem for path in SOURCES.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {room for room in rooms - {"__init__", "__main__", "version"} if f"`{room}`" not in text} == set()
    steps: set[str] = set()
    for file in (SOURCES / "operations").glob("*.py"):
        steps |= set(re.findall(r'^    name = "(\w+)"$', file.read_text(), re.MULTILINE))
    assert steps
    assert {step for step in steps if f"`{step}`" not in text} == set()
