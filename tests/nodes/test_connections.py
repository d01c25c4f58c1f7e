"""Connections between the parts of a job carry on after a dump and restore, wherever the parts come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.nodes.conftest import require_networks
from tests.nodes.full_load import LoadedNodes

pytestmark = pytest.mark.criu


@pytest.fixture
def started(sim_only: None, tmp_path: Path) -> Iterator[ExitStack]:
    """What a test makes is closed at its end."""
    require_networks()
    with ExitStack() as opened:
        yield opened


def loaded(opened: ExitStack, folder: Path, count: int, each: int, *, spare: int = 0) -> LoadedNodes:
    """A job on nodes, with so many connections for each pair of them."""
    made = LoadedNodes(folder, count, spare=spare)
    opened.callback(made.close)
    made.start_job(each)
    return made


@pytest.mark.parametrize("at", [[0, 1], [1, 0], [2, 3]], ids=["in place", "swapped", "new addresses"])
def test_200_connections_under_full_load(started: ExitStack, tmp_path: Path, at: list[int]) -> None:
    nodes = loaded(started, tmp_path, 2, 200, spare=2)
    nodes.dump()
    nodes.nothing_is_blocked()
    nodes.restore(*nodes.map_words(at), at=at)
    nodes.goes_on()
    nodes.finish()
