"""Links have targets, and pages name only existing commands and options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.command_tree import COMMANDS, unknown_options
from tests.docs.pages import DOCS, ROOT, SOURCES, fences, page, without_fences

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


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


def _links(path: Path) -> list[str]:
    return _LINK.findall(path.read_text())


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_fences(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    """The start page has all pages but the decisions, which have an index of their own."""
    indices = (DOCS / "README.md", DOCS / "adr" / "README.md")
    linked = {(index.parent / link.partition("#")[0]).resolve() for index in indices for link in _links(index)}
    assert set(DOCS.rglob("*.md")) - {indices[0]} <= linked


def test_every_number_of_a_decision_is_in_their_index() -> None:
    folder, text = DOCS / "adr", page("adr/README.md")
    pages = {int(path.name[:4]): path.name for path in folder.glob("[0-9]*.md")}
    for number, name in pages.items():
        title = (folder / name).read_text().splitlines()[0].removeprefix(f"# {number}. ")
        assert f"- {number}: [{title}]({name})" in text
    gone = set(range(1, max(pages) + 1)) - set(pages)
    assert {number for number in gone if not re.search(rf"(?:^\| |[, d] ?){number}[ ,.]", text, re.MULTILINE)} == set()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_and_options_of_a_page_exist(path: Path) -> None:
    """In the text and in the examples."""
    text = path.read_text()
    typed = re.findall(r"`gpucr ([a-z]+(?:-[a-z]+)*)([^`\n]*)`", without_fences(text))
    typed += re.findall(r"^(?:[#$] )?gpucr ([a-z]+(?:-[a-z]+)*)(.*)$", fences(text), re.MULTILINE)
    for name, rest in typed:
        assert f"gpucr {name}" in COMMANDS
        assert unknown_options(name, rest) == set(), f"gpucr {name}"


def test_the_architecture_names_every_room_and_step() -> None:
    text = page("architecture.md") + page("explanation/steps.md")
    rooms = {path.stem for path in SOURCES.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {room for room in rooms - {"__init__", "__main__", "version"} if f"`{room}`" not in text} == set()
    steps: set[str] = set()
    for file in (SOURCES / "operations").glob("*.py"):
        steps |= set(re.findall(r'^    name = "(\w+)"$', file.read_text(), re.MULTILINE))
    assert steps
    assert {step for step in steps if f"`{step}`" not in text} == set()


def test_no_two_pages_make_a_store_at_one_place() -> None:
    """Who follows one after the other would be told that there is a store. One that `--every` makes is for all jobs."""
    made: dict[str, list[str]] = {}
    for path in PAGES:
        for line in fences(path.read_text()).splitlines():
            by_hand = re.search(r"gpucr store init (\S+)", line)
            by_itself = re.search(r"--every .*--to (\S+)", line)
            for found, who in ((by_hand, path.name), (by_itself, "--every")):
                if found is not None and who not in made.setdefault(found[1], []):
                    made[found[1]].append(who)
    assert len(made) > 4
    assert {place: makers for place, makers in made.items() if len(makers) > 1} == {}
