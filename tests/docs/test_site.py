"""The documentation site builds without a network, and nothing on it comes from elsewhere."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

import gpucr
from tests.docs.command_tree import COMMANDS
from tests.docs.pages import DOCS, ROOT

pytest.importorskip("furo", reason="the extra docs is not installed")

_LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. As root it is built where there is no network at all."""
    folder = tmp_path_factory.mktemp("site")
    alone = ["unshare", "--net"] if os.geteuid() == 0 else []
    options = ["-b", "html", "-c", "docs/site", "-d", str(folder / "cache"), "-W", "--keep-going", "--quiet"]
    done = subprocess.run(
        [*alone, sys.executable, "-m", "sphinx", *options, ".", str(folder / "html")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "html"


class _Loaded(HTMLParser):
    """What a browser would fetch to show a page: not what a reader may click on."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs).get(_LOADS.get(tag, ""))
        if found:
            self.urls.append(found)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        loaded = _Loaded()
        loaded.feed(page.read_text())
        assert loaded.urls
        assert [url for url in loaded.urls if re.match(r"(?:[a-z]+:)?//", url)] == [], page.name
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()) == [], sheet.name


def test_every_page_is_there_and_can_be_found(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(ROOT)).with_suffix(".html").exists()
    assert (site / "src" / "gpucr" / "error_codes.html").exists()
    index = (site / "docs" / "site" / "index.html").read_text()
    for name in (
        "tutorial",
        "how-to/torchrun",
        "how-to/keep-snapshots-in-s3",
        "reference/store-format",
        "threat-model",
        "reference/commands",
        "explanation/how-a-checkpoint-works",
        "benchmarks",
    ):
        assert f"../{name}.html" in index


def test_the_page_of_options_has_all_of_them(site: Path) -> None:
    text = unescape((site / "build" / "reference" / "options.html").read_text())
    for name, command in COMMANDS.items():
        shown = text.partition(f'id="{name.replace(" ", "-")}"')[2].partition("<section")[0]
        assert shown, name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert all(option in shown for option in parameter.opts), f"{name} {parameter.opts}"
                assert _letters(parameter.help or "") in _letters(re.sub(r"<[^>]*>", "", shown)), parameter.opts


def test_the_page_of_functions_has_their_docstrings(site: Path) -> None:
    shown = _letters(re.sub(r"<[^>]*>", "", unescape((site / "build" / "reference" / "functions.html").read_text())))
    functions = [getattr(gpucr, name) for name in gpucr.__all__]
    functions = [function for function in functions if inspect.isfunction(function)]
    assert len(functions) > 40
    for function in functions:
        assert _letters(function.__doc__ or "") in shown, function.__name__


def _letters(text: str) -> str:
    """What is left where the site has other quotes, dashes and lines."""
    return re.sub(r"[^a-z]", "", text.lower())


def test_an_error_code_has_an_anchor(site: Path) -> None:
    assert 'id="gpucr-lock-timeout"' in (site / "src" / "gpucr" / "error_codes.html").read_text()


@pytest.mark.parametrize("drawing", sorted((DOCS / "pictures").glob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_is_whole_and_says_what_it_shows(drawing: Path) -> None:
    root = ElementTree.parse(drawing).getroot()  # noqa: S314 - a file of the repository
    namespace = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{namespace}svg"
    assert root.findtext(f"{namespace}title") == root.get("aria-label")
    assert not re.search(r"(?:href|src)=|<script|@import", drawing.read_text())
