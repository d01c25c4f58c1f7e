"""Options of other processes' sockets."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from gpucr.linux.pidfds import copied_socket
from gpucr.linux.socket_options import Defaults, set_options


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_new_socket_has_none_of_its_own(family: socket.AddressFamily, kind: socket.SocketKind) -> None:
    with socket.socket(family, kind) as new:
        assert Defaults().changed(new) == {}


def test_an_option_that_was_read_can_be_set() -> None:
    with socket.socket() as one, socket.socket() as other:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 7000)
        options = Defaults().changed(one)
        assert options == {"TCP_USER_TIMEOUT": struct.pack("=i", 7000)}
        assert set_options(other, options) == {}
        assert other.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


def test_refused_options_have_their_reason() -> None:
    with socket.socket() as one:
        refused = set_options(
            one, {"TCP_CONGESTION": b"no such one", "UDP_GRO": b"\1\0\0\0", "TCP_LINGER2": b"\5\0\0\0"}
        )
        assert sorted(refused) == ["TCP_CONGESTION", "UDP_GRO"]
        assert "does not know" in str(refused["UDP_GRO"].strerror)
        assert one.getsockopt(socket.IPPROTO_TCP, 8) == 5


def test_other_descriptors_are_left_alone() -> None:
    local, other = socket.socketpair()
    with local, other, copied_socket(os.getpid(), local.fileno()) as copy:
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        assert Defaults().changed(copy) == {}
        assert list(set_options(copy, {"TCP_LINGER2": bytes(4)})) == ["TCP_LINGER2"]


def test_a_descriptor_that_is_no_socket(tmp_path: Path) -> None:
    with (tmp_path / "f").open("w") as file:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="on non-socket"):
            copied_socket(os.getpid(), file.fileno())
        assert len(os.listdir("/proc/self/fd")) == before
