"""gpucr.linux.tcp_tables: which TCP sockets real processes hold."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from gpucr.linux.tcp_tables import has_connections


def test_connections() -> None:
    """In a separate process: the tests' own may still have other connections (to object stores)."""
    code = (
        "import os, socket\n"
        "from gpucr.linux.tcp_tables import has_connections, has_sockets\n"
        "print(has_connections([os.getpid()]), has_sockets([os.getpid()]))\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "print(has_connections([os.getpid()]), has_sockets([os.getpid()]))\n"
        "connection = socket.create_connection(listener.getsockname())\n"
        "print(has_connections([os.getpid()]), has_connections([os.getppid()]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    *found, connected, parent = done.stdout.split()
    assert found == ["False", "False", "False", "True"]
    assert connected == "True"
    assert parent == str(has_connections([os.getpid()]))


def test_sockets_without_a_connection() -> None:
    """The tables of the whole machine are not read for them."""
    code = (
        "import os, socket\n"
        "from gpucr.linux import tcp_tables\n"
        "kept = [*socket.socketpair(), socket.socket(type=socket.SOCK_DGRAM)]\n"
        "tcp_tables._inodes = None\n"
        "print(tcp_tables.has_sockets([os.getpid()]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


def test_connections_over_ipv6() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener, socket.create_connection(listener.getsockname()[:2]):
        assert has_connections([os.getpid()])
