"""The commands of the tutorial, of the main page's picture and of the page for those who come from elsewhere."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.dom import minidom

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.docs.pictures import screen
from tests.docs.pictures import session as cast
from tests.docs.sessions import Answer, Typed, differences, play, typed_in
from tests.ordinary_user import OrdinaryUser
from tests.storm import later

# What the pages show with sizes that a test need not move.
_SMALL = {"--mib 512": "--mib 16"}


def _is_as_shown(text: str, home: Path) -> None:
    (home.parent / "snapshots").mkdir()
    _are_as_shown(typed_in(text), home)


def _are_as_shown(session: list[Typed], home: Path, user: OrdinaryUser | None = None) -> None:
    assert session, "nothing is typed"
    instead = {"/var/snapshots": f"{home.parent}/snapshots", **_SMALL}
    answers = play([each.command for each in session], home, instead, user)
    wrong: list[str] = []
    for each, answer in zip(session, answers, strict=True):
        found = differences(each, answer)
        wrong += [each.command, *(f"  {line}" for line in found)] if found else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.criu  # and root, for the session's own namespaces
def test_the_tutorial(sim_only: None, tmp_path: Path) -> None:
    _is_as_shown((DOCS / "tutorial.md").read_text(), tmp_path / "home")


@pytest.mark.criu
def test_the_picture_of_the_main_page(sim_only: None, tmp_path: Path) -> None:
    assert str(cast.PICTURE.relative_to(ROOT)) in (ROOT / "README.md").read_text()
    _is_as_shown(cast.as_page(cast.PICTURE.read_text()), tmp_path / "home")


def _by_a_user(session: list[Typed]) -> Iterator[Typed]:
    """What the page says is different for an ordinary user: no namespaces, so no copies, and ports of their own."""
    for each in session:
        if "--clone" in each.command:
            yield Typed(each.command, ("code:  GPUCR-BAD-REQUEST",))
        elif "code:  GPUCR-JOB-RUNS" in each.shown:
            yield Typed(each.command, ("code:  GPUCR-PID-IN-USE",))
        elif each.command == "gpucr kill count count-2 managed":
            yield Typed("gpucr kill count managed", tuple(line for line in each.shown if "count-2" not in line))
        elif "count-2" not in each.command:
            port = "7001" if "managed" in each.command else "7000"
            shown = tuple(line.replace(" yes ", " no ") for line in each.shown)
            yield Typed(each.command.replace("7000", port), shown)


@pytest.fixture
def home(user: OrdinaryUser) -> Iterator[Path]:
    """A home folder for the user, and beside it one for snapshots."""
    place = Path(tempfile.mkdtemp(prefix="gpucr-session-"))
    (place / "snapshots").mkdir()
    for each in (place, place / "snapshots"):
        os.chown(each, user.uid, user.uid)
    yield place / "home"
    shutil.rmtree(place)


@pytest.mark.criu
@pytest.mark.parametrize("what", [later("the tutorial"), "the picture"])
def test_sessions_are_the_same_for_an_ordinary_user(user: OrdinaryUser, home: Path, what: str) -> None:
    page = (DOCS / "tutorial.md").read_text()
    assert "## As an ordinary user" in page
    text = page if what == "the tutorial" else cast.as_page(cast.PICTURE.read_text())
    _are_as_shown(list(_by_a_user(typed_in(text))), home, user)


def test_a_drawn_session_can_be_read_back() -> None:
    scenes = [("gpucr ps | head", ("PID  <&>", "", "  4"), 0.5), ("gpucr ps", (), 0.1)]
    picture = screen.draw("two commands", cast.frames(scenes))
    assert [(each.command, each.shown) for each in typed_in(cast.as_page(picture))[1:]] == [
        (command, printed) for command, printed, _ in scenes
    ]
    root = minidom.parseString(picture).documentElement  # noqa: S318 (our own text)
    assert root is not None
    assert root.tagName == "svg"


@pytest.mark.criu
def test_coming_from_elsewhere(sim_only: None, tmp_path: Path) -> None:
    _is_as_shown((DOCS / "how-to" / "come-from-elsewhere.md").read_text(), tmp_path / "home")


def test_the_sessions_of_a_page_are_parsed() -> None:
    page = "text\n```console\n$ gpucr ps\nno process\n# gpucr x\n```\n```sh\nnot typed\n```\n```console\n# y\nb\n```\n"
    assert typed_in(page) == [Typed("gpucr ps", ("no process",)), Typed("gpucr x", ()), Typed("y", ("b",))]


@pytest.mark.parametrize(
    ("shown", "stdout", "stderr"),
    [
        (("running",), ("locked",), ()),
        (("running",), (), ()),
        ((), ("running",), ()),
        (("error: a", "code:  GPUCR-MIG"), (), ("error: a", "code:  GPUCR-MPS")),
    ],
)
def test_a_difference_is_detected(shown: tuple[str, ...], stdout: tuple[str, ...], stderr: tuple[str, ...]) -> None:
    assert differences(Typed("gpucr", shown), Answer(stdout, stderr))


def test_values_that_vary_between_runs_are_no_difference() -> None:
    shown = ("prepare    0.001   2.0 GiB", "GPU 0  GPU-dc1f8680-3355 Simulated, 16.0 GiB", "error: no 17")
    assert not differences(
        Typed("gpucr", shown),
        Answer(("prepare  12.301  16.5 MiB", "GPU 0  GPU-00018680-ffff Simulated, 8.0 GiB"), ("doing", "error: no 4")),
    )
