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
from urllib.parse import unquote

import click
import pytest

import gpucr
from tests.docs.command_tree import COMMANDS
from tests.docs.pages import DOCS, ROOT
from tests.storm import long

pytest.importorskip("furo", reason="the extra docs is not installed")
pytestmark = long  # making the site takes a tenth of all else

_LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. As root it is built if there is no network at all."""
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


class _Links(HTMLParser):
    """Where the links of a page lead, and the places that others can lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.leads: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {name for name in (found.get("id"), found.get("name") if tag == "a" else None) if name}
        if tag == "a" and (href := found.get("href")):
            self.leads.append(href)


def test_every_link_has_its_page_and_anchor(site: Path) -> None:
    pages = {page.resolve(): _Links() for page in site.rglob("*.html")}
    for page, links in pages.items():
        links.feed(page.read_text())
    broken, followed = [], 0
    for page, links in pages.items():
        for href in links.leads:
            if re.match(r"[a-z]+:", href):
                continue
            file, _, anchor = unquote(href).partition("#")
            target = (page.parent / file).resolve() if file else page
            followed += 1
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{page.relative_to(site)}: {href}")
    assert followed > 5000
    assert broken == []


def test_the_search_needs_no_server(site: Path) -> None:
    """A browser that opened the page from a disk may load scripts, but fetch nothing."""
    scripts = re.findall(r'<script src="([^"?]+)', (site / "search.html").read_text())
    assert {"searchindex.js", "_static/searchtools.js"} <= set(scripts)
    index = (site / "searchindex.js").read_text()
    assert index.startswith("Search.setIndex(")
    assert all(word in index for word in ("docs/how-to/training-job", "docs/benchmarks", "src/gpucr/error_codes"))


def test_every_page_exists_and_can_be_found(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(ROOT)).with_suffix(".html").exists()
    assert (site / "src" / "gpucr" / "error_codes.html").exists()
    index = (site / "docs" / "site" / "index.html").read_text()
    for name in (
        "tutorial",
        "how-to/training-job",
        "how-to/keep-snapshots-in-s3",
        "reference/store-format",
        "threat-model",
        "reference/commands",
        "explanation/how-a-checkpoint-works",
        "benchmarks",
    ):
        assert f"../{name}.html" in index


def test_the_options_page_lists_all_options(site: Path) -> None:
    text = unescape((site / "build" / "reference" / "options.html").read_text())
    for name, command in COMMANDS.items():
        shown = text.partition(f'id="{name.replace(" ", "-")}"')[2].partition("<section")[0]
        assert shown, name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert all(option in shown for option in parameter.opts), f"{name} {parameter.opts}"
                assert _letters(parameter.help or "") in _letters(re.sub(r"<[^>]*>", "", shown)), parameter.opts


def test_the_functions_page_has_signatures_and_docstrings(site: Path) -> None:
    shown = _letters(re.sub(r"<[^>]*>", "", unescape((site / "build" / "reference" / "functions.html").read_text())))
    functions = [getattr(gpucr, name) for name in gpucr.__all__]
    functions = [function for function in functions if inspect.isfunction(function)]
    assert len(functions) > 40
    for function in functions:
        assert _letters(f"{function.__name__}{inspect.signature(function)}") in shown, function.__name__
    for record in (gpucr.FrozenJob, gpucr.Process, gpucr.Snapshot, gpucr.SnapshotInStore):
        functions += [member for name, member in inspect.getmembers(record, inspect.isfunction) if name[0] != "_"]
    for function in functions:
        assert _letters(function.__doc__ or "") in shown, function.__name__


def _letters(text: str) -> str:
    """What is left where the site has other quotes, dashes and lines."""
    return re.sub(r"[^a-z]", "", text.lower())


def test_an_error_code_has_an_anchor(site: Path) -> None:
    assert 'id="gpucr-lock-timeout"' in (site / "src" / "gpucr" / "error_codes.html").read_text()
