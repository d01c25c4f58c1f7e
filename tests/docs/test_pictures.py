"""Pictures exist, are readable on every page, and show what was measured."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.docs.command_tree import unknown_options
from tests.docs.pages import DOCS, ROOT, page
from tests.docs.pictures import plots, screen, svg
from tests.docs.pictures.__main__ import DRAWN, FOLDER, RECORDED
from tests.docs.pictures.recording import Frame, Run

_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)|\.\. figure:: (\S+)\n +:alt: (.*)")
_SVG = "{http://www.w3.org/2000/svg}"
_WIDEST = 860
"""A little more than a page of the site or of the forge is wide; beyond that, text gets too small to read."""
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *DOCS.rglob("*.rst")])
PICTURES = sorted(FOLDER.iterdir())


def _shown(path: Path) -> list[tuple[Path, str]]:
    """The pictures of a page, and the words for those who do not see them."""
    found = []
    for alt, link, image, alt_of_image in _IMAGE.findall(path.read_text()):
        target = ROOT / image.lstrip("/") if image else path.parent / link
        found.append((target.resolve(), alt or alt_of_image))
    return found


def test_every_picture_on_a_page_exists_and_has_a_text_alternative() -> None:
    shown = [(path, *each) for path in PAGES for each in _shown(path)]
    assert len(shown) > 8
    wrong = [(str(path), target.name) for path, target, alt in shown if not target.is_file() or len(alt.split()) < 4]
    assert wrong == []


def test_every_picture_is_on_a_page() -> None:
    assert {target for path in PAGES for target, _ in _shown(path)} == set(PICTURES)


def test_every_picture_can_be_regenerated() -> None:
    assert {f"{name}.svg" for name in [*DRAWN, *RECORDED]} == {path.name for path in PICTURES}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_complete_described_and_fits(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()  # noqa: S314 - a file of the repository
    assert root.tag == f"{_SVG}svg"
    assert root.findtext(f"{_SVG}title") == root.get("aria-label")
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert int(root.get("width") or 0) <= _WIDEST
    assert root.findall(f".//{_SVG}text")
    assert not re.search(r"(?:href|src)=|<script|@import|url\(", picture.read_text())


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_matches_its_script(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text() == DRAWN[name](), "python -m tests.docs.pictures --drawn"


@pytest.mark.parametrize("name", RECORDED)
def test_commands_in_a_recording_exist(name: str) -> None:
    root = ElementTree.parse(FOLDER / f"{name}.svg").getroot()  # noqa: S314 - a file of the repository
    typed = [" ".join((span.text or "").split()) for span in root.iter(f"{_SVG}tspan") if span.get("class") == "typed"]
    commands = [line.split(" ", 2) for line in typed if line.startswith("gpucr ")]
    assert commands
    for _, command, *rest in commands:
        assert unknown_options(command, " ".join(rest)) == set(), command


def _luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [svg.LIGHT, svg.DARK], ids=["light", "dark"])
def test_text_can_be_read_on_every_background(scheme: dict[str, tuple[str, str]]) -> None:
    assert scheme.keys() == svg.LIGHT.keys()
    for ground in svg.GROUNDS:
        assert _contrast(scheme["ink"][0], scheme[ground][0]) >= 4.5, ground
    assert _contrast(scheme["soft"][0], scheme["page"][0]) >= 4.5


def test_text_without_room_is_refused() -> None:
    drawing = svg.Drawing("a title", 100)
    with pytest.raises(ValueError, match="has no room"):
        drawing.box(10, 10, 50, 20, "more than fifty pixels")
    with pytest.raises(ValueError, match="has no room"):
        drawing.text(svg.WIDTH - 20, 10, "over the edge")


BARS = [name for name, draw in plots.PLOTS.items() if draw is plots.bars]


@pytest.mark.parametrize("name", BARS)
def test_bars_are_as_long_as_the_measured_values(name: str) -> None:
    figures = plots.figures(plots.read(name))
    root = ElementTree.parse(FOLDER / f"{name}.svg").getroot()  # noqa: S314 - a file of the repository
    labels = [text.text or "" for text in root.findall(f"{_SVG}text")]
    assert [Decimal(label) for label in labels if re.fullmatch(r"\d+\.\d+", label)] == figures
    lengths = [float(bar.get("width") or 0) for bar in root.findall(f"{_SVG}rect")][-len(figures) :]
    for length, figure in zip(lengths, figures, strict=True):
        assert length / max(lengths) == pytest.approx(float(figure / max(figures)), abs=0.001)


def test_points_are_as_high_as_the_measured_values() -> None:
    panels = plots.read("incremental")["curves"]["panels"]
    order = [panel[measured][way] for panel in panels for measured in ("whole", "still") for way in ("none", "first")]
    values = [float(value) for line in order for value in line]
    root = ElementTree.parse(FOLDER / "incremental.svg").getroot()  # noqa: S314 - a file of the repository
    heights = [340.0 - float(dot.get("cy") or 0) for dot in root.findall(f"{_SVG}circle")]
    assert len(heights) == len(values)
    assert [height / max(heights) for height in heights] == pytest.approx(
        [value / max(values) for value in values], abs=0.001
    )


@pytest.mark.parametrize("name", BARS)
def test_plotted_values_are_on_the_page_of_figures(name: str) -> None:
    found = plots.read(name)
    assert all(found[key] for key in ("hardware", "driver", "date", "statistic"))
    text = page("figures.md")
    assert found["driver"] in text
    assert found["date"] in text
    cells = {cell for row in re.findall(r"^\|.*\|$", text, re.MULTILINE) for cell in re.findall(r"[\d.]+", row)}
    assert {str(figure) for figure in plots.figures(found)} <= cells


def test_a_recording_without_waits_shows_each_row_for_its_real_duration() -> None:
    hello, world = (Run("hello"),), (Run("wor", "green"), Run("ld"))
    picture = screen.draw("a title", [Frame(3, (hello,)), Frame(3.5, (hello, world)), Frame(60, ((), world))])
    assert "hello" in picture
    whole_s = 0.5 + screen.LONGEST_WAIT_S + screen.END_S
    gone, came = (f"{100 * at_s / whole_s:.2f}%" for at_s in (0.5 + screen.LONGEST_WAIT_S, 0.5))
    assert f"0% {{ opacity: 1 }} {gone} {{ opacity: 0 }} 100% {{ opacity: 0 }}" in picture
    assert f"0% {{ opacity: 0 }} {came} {{ opacity: 1 }} 100% {{ opacity: 1 }}" in picture
    assert picture.count("<text") == 2
