"""Connecting to local sockets."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpucr.linux import sockets


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, str]]:
    """A listener in whose queue is no room, and its name."""
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listening.bind("s")
        listening.listen(2)
        with contextlib.suppress(BlockingIOError):
            while True:
                one = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                one.setblocking(False)
                one.connect("s")
        yield listening, "s"


def connecting() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(30)
    return made


def test_it_waits_for_room(full: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch) -> None:
    listening, name = full
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        listening.accept()[0].close()

    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    with connecting() as ours:
        sockets.connect(ours, name, limit_s=30)
        assert ours.getpeername() == name
    assert len(waits) == 1


def test_it_waits_no_longer_than_it_may(full: tuple[socket.socket, str]) -> None:
    with connecting() as ours, pytest.raises(TimeoutError, match="too many others"):
        sockets.connect(ours, full[1], limit_s=0)


def test_other_failures_are_reported_at_once(tmp_path: Path) -> None:
    with connecting() as ours, pytest.raises(FileNotFoundError):
        sockets.connect(ours, str(tmp_path / "nobody"), limit_s=3600)
