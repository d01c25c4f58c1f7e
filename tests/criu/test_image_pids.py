"""gpucr.criu.pids: which processes CRIU makes again, and with them the ids that must be free."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageError, head
from gpucr.criu.pids import TREE_IMAGE, TREE_MAGIC, pids_in
from tests.criu.test_image_contents import image

Entry = tuple[int, int, int, Sequence[int]]


def wanted(*tree: Entry) -> tuple[int, ...]:
    """Entries are pid, process group, session and threads."""
    entries = [images_pb2.TreeEntry(pid=pid, ppid=0, pgid=pgid, sid=sid, threads=tids) for pid, pgid, sid, tids in tree]
    data = image(TREE_MAGIC, *entries)

    def open_image(name: str) -> io.BytesIO:
        assert name == TREE_IMAGE
        return io.BytesIO(data)

    return pids_in(open_image)


@pytest.mark.parametrize(
    ("tree", "pids"),
    [
        pytest.param([(7, 7, 7, [7, 8])], (7, 8), id="threads"),
        pytest.param([(7, 7, 7, [7]), (9, 7, 7, [])], (7, 9), id="a process without threads: a zombie"),
        pytest.param([(7, 7, 7, [7]), (9, 5, 7, [9])], (5, 7, 9), id="a group without its first process"),
        pytest.param([(7, 7, 7, [7]), (9, 9, 4, [9])], (4, 7, 9), id="a session without its first process"),
        pytest.param([(7, 6, 2, [7]), (9, 6, 2, [9])], (7, 9), id="a shell's session and group"),
        pytest.param([(7, 7, 2, [7]), (9, 5, 2, [9])], (5, 7, 9), id="a group in a shell's session"),
        pytest.param([(7, 0, 0, [7])], (7,), id="a session from outside the pid namespace"),
    ],
)
def test_pids_the_images_need(tree: list[Entry], pids: tuple[int, ...]) -> None:
    assert wanted(*tree) == pids


def test_a_tree_without_processes() -> None:
    with pytest.raises(ImageError, match="it has no process"):
        wanted()


@pytest.mark.parametrize("data", [b"", head(TREE_MAGIC) + b"\xff\xff\xff\xff", head(TREE_MAGIC + 1)])
def test_a_damaged_tree(data: bytes) -> None:
    with pytest.raises(ImageError):
        pids_in(lambda _: io.BytesIO(data))
