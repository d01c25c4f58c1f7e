"""Whose CRIU works for the caller: decided in one place."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gpucr.helper import access
from gpucr.linux import capabilities


@pytest.mark.parametrize(
    ("may", "uid", "listens", "named", "whose"),
    [
        (True, 0, True, None, "own"),
        (True, 4711, True, None, "own"),
        (False, 4711, True, None, "helper"),
        (False, 4711, False, None, None),
        (False, 4711, True, access.OFF, None),
        (False, 0, True, None, None),  # root of a container: the helper serves no root
    ],
)
def test_whose_criu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    may: bool,
    uid: int,
    listens: bool,
    named: str | None,
    whose: str | None,
) -> None:
    path = tmp_path / "socket"
    monkeypatch.setenv(access.ENVIRONMENT_VARIABLE, named or str(path))
    monkeypatch.setattr(capabilities, "can_checkpoint_processes", lambda: may)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        if listens:
            listening.bind(str(path))
        assert access.whose_criu() == whose
