"""Figures are data: the page of figures is made of it, and other pages name no figure that it does not have."""

from __future__ import annotations

import re

import pytest

from tests.docs import figures
from tests.docs.pages import ROOT, page

_SECONDS = re.compile(r"(\d+\.\d+) s\b")


def test_the_page_is_generated_from_the_results() -> None:
    assert figures.PAGE.read_text() == figures.page(), "write it again: python -m tests.docs"


def test_a_changed_result_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"title": "Red", "hardware": "one GPU", "driver": "1", "tables": [{"head": ["a"], "rows": [["7.5"]]}]}
    monkeypatch.setattr(figures, "read", lambda name: changed)
    monkeypatch.setattr(figures, "SPEED", ("red",))
    monkeypatch.setattr(figures, "CORRECT", ())
    assert "### Red\n\nOne GPU, driver 1. [File](../benchmarks/results/red.json).\n\n| a |\n" in figures.page()


def test_every_result_is_on_the_page() -> None:
    files = {path.stem for path in figures.RESULTS.glob("*.json")}
    assert files == {*figures.SPEED, *figures.CORRECT}


@pytest.mark.parametrize("name", [*figures.SPEED, *figures.CORRECT])
def test_a_result_says_where_and_how_it_was_measured(name: str) -> None:
    found = figures.read(name)
    assert found["title"]
    assert found.get("hardware") or all("hardware" in table for table in found["tables"])
    assert found.get("driver") or name == "intervals"
    assert found.get("command") or found.get("groups") or found["remarks"] or found["tables"][0]["command"]
    for table in found.get("tables", ()):
        assert {len(row) for row in table["rows"]} <= {len(table["head"])}


@pytest.mark.parametrize("path", ["README.md", "docs/benchmarks.md", "docs/tested.md"])
def test_a_page_names_only_measured_seconds(path: str) -> None:
    measured = set(re.findall(r"\d+\.\d+", "".join(file.read_text() for file in figures.RESULTS.glob("*.json"))))
    named = set(_SECONDS.findall((ROOT / path).read_text()))
    rounded = {f"{float(each):.1f}" for each in measured}
    assert named - measured - rounded == set()


def test_the_page_has_the_sections_that_others_link_to() -> None:
    assert "## Correctness" in page("figures.md")
