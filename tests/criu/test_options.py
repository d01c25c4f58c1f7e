"""The checks before a dump, on real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpucr import records
from gpucr.criu.install import CriuInstall
from gpucr.criu.options import (
    DumpOptions,
    choose_dump_options,
    deleted_file_sizes,
    has_connections,
)

SAMPLE = DumpOptions(leave_running=False, shell_job=True, ghost_limit_bytes=1 << 20, network_lock="nftables")


def test_quiet_process() -> None:
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    try:
        chosen = choose_dump_options([child.pid], leave_running=True)
        assert chosen == DumpOptions(True, False, 1 << 20, "skip")
    finally:
        child.kill()
        child.wait()


def test_session_leader_outside() -> None:
    child = subprocess.Popen(["sleep", "3600"])
    try:
        assert choose_dump_options([child.pid], leave_running=False).shell_job
        assert not choose_dump_options([child.pid, os.getsid(0)], leave_running=False).shell_job
    finally:
        child.kill()
        child.wait()


def test_an_ended_process() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert choose_dump_options([child.pid], leave_running=False) == DumpOptions(False, False, 1 << 20, "skip")


def test_deleted_files(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as open_file, (tmp_path / "b").open("wb") as linked:
        open_file.truncate(5 << 20)
        linked.truncate(7 << 20)
        (tmp_path / "a").unlink()
        (tmp_path / "b").rename(tmp_path / "c")
        memory = os.memfd_create("memory")
        os.truncate(memory, 9 << 20)
        try:
            sizes = list(deleted_file_sizes(os.getpid()))
        finally:
            os.close(memory)
        assert 5 << 20 in sizes
        assert not {7 << 20, 9 << 20} & set(sizes)
        assert choose_dump_options([os.getpid()], leave_running=False).ghost_limit_bytes >= 10 << 20


@pytest.mark.criu
def test_a_deleted_file_that_is_only_mapped(tmp_path: Path) -> None:
    import mmap

    path = tmp_path / "mapped"
    path.write_bytes(bytes(6 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        file.close()
        path.unlink()
        assert 6 << 20 in list(deleted_file_sizes(os.getpid()))


def test_connections() -> None:
    """In a separate process: the tests' own may still have other connections (to object stores)."""
    code = (
        "import os, socket\n"
        "from gpucr.criu.options import has_connections\n"
        "print(has_connections([os.getpid()]))\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "print(has_connections([os.getpid()]))\n"
        "connection = socket.create_connection(listener.getsockname())\n"
        "print(has_connections([os.getpid()]), has_connections([os.getppid()]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    without, listening, connected, parent = done.stdout.split()
    assert (without, listening, connected) == ("False", "False", "True")
    assert parent == str(has_connections([os.getpid()]))


def test_sockets_without_a_connection() -> None:
    """The tables of the whole machine are not read for them."""
    code = (
        "import os, socket\n"
        "from gpucr.criu import options\n"
        "kept = [*socket.socketpair(), socket.socket(type=socket.SOCK_DGRAM)]\n"
        "options._connected_inodes = None\n"
        "print(options.has_connections([os.getpid()]))\n"
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


def test_the_network_lock_is_not_skipped_with_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answers = iter([True, False])

    def has_feature(*arguments: Any) -> bool:
        asked.append(arguments)
        return next(answers)

    monkeypatch.setattr("gpucr.criu.install.has_feature", has_feature)
    monkeypatch.setattr("shutil.which", lambda name: f"/sbin/{name}")
    install = CriuInstall(("criu",), (4, 2, 1), "path", Path("criu"))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        chosen = [choose_dump_options([os.getpid()], leave_running=False, install=install) for _ in range(2)]
    assert [options.network_lock for options in chosen] == ["nftables", "iptables"]
    assert asked == [(install, "network_lock_nftables")] * 2


def test_an_ordinary_users_criu_locks_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/sbin/{name}")
    install = CriuInstall(("criu",), (4, 2, 1), "granted", Path("criu"), is_unprivileged=True)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        chosen = choose_dump_options([os.getpid()], leave_running=False, install=install)
    assert chosen.network_lock == "skip"


def test_record_survives_json() -> None:
    assert records.decode(records.encode(SAMPLE), DumpOptions) == SAMPLE


@pytest.mark.parametrize(
    "change",
    [
        {"shell_job": 1},
        {"shell_job": None},
        {"ghost_limit_bytes": True},
        {"ghost_limit_bytes": -1},
        {"ghost_limit_bytes": 1 << 32},
        {"network_lock": "none"},
        {"network_lock": 3},
        {"more": True},
    ],
)
def test_damaged_record(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(records.RecordError, match=name):
        records.convert({**msgspec.to_builtins(SAMPLE), **change}, DumpOptions)


def test_incomplete_record() -> None:
    record = msgspec.to_builtins(SAMPLE)
    del record["link_remap"]
    with pytest.raises(records.RecordError, match="there is no `link_remap`"):
        records.convert(record, DumpOptions)
