"""The commands of the tutorial, of the main page and of the page for those who come from elsewhere do what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.docs.sessions import Answer, Typed, differences, play, typed_in

# What the pages show with sizes that a test need not move.
_SMALL = {"--mib 2048": "--mib 16"}


def _is_as_shown(page: Path, home: Path) -> None:
    session = typed_in(page.read_text())
    instead = {"/var/snapshots": f"{home.parent}/snapshots", **_SMALL}
    (home.parent / "snapshots").mkdir()
    answers = play([each.command for each in session], home, instead)
    wrong: list[str] = []
    for each, answer in zip(session, answers, strict=True):
        found = differences(each, answer)
        wrong += [each.command, *(f"  {line}" for line in found)] if found else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.criu  # and root, for the session's own namespaces
def test_the_tutorial(sim_only: None, tmp_path: Path) -> None:
    _is_as_shown(DOCS / "tutorial.md", tmp_path / "home")


@pytest.mark.criu
def test_the_main_page(sim_only: None, tmp_path: Path) -> None:
    _is_as_shown(ROOT / "README.md", tmp_path / "home")


@pytest.mark.criu
def test_coming_from_elsewhere(sim_only: None, tmp_path: Path) -> None:
    _is_as_shown(DOCS / "how-to" / "come-from-elsewhere.md", tmp_path / "home")


def test_what_a_page_shows_is_read() -> None:
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
def test_a_difference_is_seen(shown: tuple[str, ...], stdout: tuple[str, ...], stderr: tuple[str, ...]) -> None:
    assert differences(Typed("gpucr", shown), Answer(stdout, stderr))


def test_what_differs_from_run_to_run_is_none() -> None:
    shown = ("prepare    0.001   2.0 GiB", "GPU 0  GPU-dc1f8680-3355 Simulated, 16.0 GiB", "error: no 17")
    assert not differences(
        Typed("gpucr", shown),
        Answer(("prepare  12.301  16.5 MiB", "GPU 0  GPU-00018680-ffff Simulated, 8.0 GiB"), ("doing", "error: no 4")),
    )
