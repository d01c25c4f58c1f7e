"""A restore raises the machine's limits of memory for TCP while much data comes back, and nothing stays raised."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

import gpucr
from gpucr.linux import tcp_memory
from gpucr.network import room
from gpucr.network.recovery import LowerTcpMemory
from gpucr.network.room import room_for
from gpucr.undo.protection import Protection

BEFORE = (100, 200, 300)
PAGE = os.sysconf("SC_PAGE_SIZE")

WAITING = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
client.setblocking(False)
sent = 0
try:
    while sent < 1 << 20:
        sent += client.send(bytes(1 << 16))
except BlockingIOError:
    pass
print(sent, flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of the machine's, whose connections hold 40 pages."""
    made, in_use = tmp_path / "tcp_mem", tmp_path / "sockstat"
    made.write_text("100\t200\t300\n")
    in_use.write_text("sockets: used 5\nTCP: inuse 1 orphan 0 tw 0 alloc 1 mem 40\nUDP: inuse 0 mem 31\n")
    monkeypatch.setattr(tcp_memory, "LIMITS", made)
    monkeypatch.setattr(tcp_memory, "IN_USE", in_use)
    return made


@pytest.fixture
def protection() -> Iterator[Protection]:
    with Protection() as made:
        yield made


def now(limits: Path) -> tuple[int, ...]:
    return tuple(map(int, limits.read_text().split()))


@pytest.mark.parametrize(("waiting_pages", "more"), [(0, 0), (29, 0), (30, 0), (31, 2), (1000, 1940)])
def test_room_is_made_for_twice_as_much(limits: Path, protection: Protection, waiting_pages: int, more: int) -> None:
    with room_for(waiting_pages * PAGE, protection):
        assert now(limits) == tuple(number + more for number in BEFORE)
    assert now(limits) == BEFORE


def test_a_huge_image_takes_half_of_the_memory_at_most(limits: Path, protection: Protection) -> None:
    with room_for(1 << 60, protection):
        assert now(limits)[0] - 40 == os.sysconf("SC_PHYS_PAGES") // 2
    assert now(limits) == BEFORE


def test_an_error_in_the_block(limits: Path, protection: Protection) -> None:
    with pytest.raises(KeyboardInterrupt), room_for(1000 * PAGE, protection):
        raise KeyboardInterrupt
    assert now(limits) == BEFORE


def test_other_limits_set_meanwhile_are_kept(limits: Path, protection: Protection) -> None:
    with room_for(1000 * PAGE, protection):
        limits.write_text("7 8 9")
    assert now(limits) == (7, 8, 9)


def test_two_restores_do_not_raise_them_together(
    limits: Path, protection: Protection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_WAIT_S", 0.05)
    with room_for(1000 * PAGE, protection):
        raised = now(limits)
        with room_for(4000 * PAGE, protection):
            assert now(limits) == raised
        assert now(limits) == raised
    assert now(limits) == BEFORE


def test_a_restore_without_much_data_does_not_wait(limits: Path, protection: Protection) -> None:
    with limits.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with room_for(10 * PAGE, protection):
            assert now(limits) == BEFORE


def test_limits_that_may_not_be_changed(
    limits: Path, protection: Protection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = tmp_path / "missing" / "tcp_mem"
    monkeypatch.setattr(tcp_memory, "LIMITS", limits.parent)  # no file
    with room_for(1000 * PAGE, protection):
        pass
    monkeypatch.setattr(tcp_memory, "LIMITS", missing)
    with room_for(1000 * PAGE, protection):
        pass
    assert now(limits) == BEFORE


@pytest.mark.parametrize(
    ("found", "left"), [("1100 1200 1300", BEFORE), ("100 200 300", BEFORE), ("5 6 7", (5, 6, 7))], ids=str
)
def test_the_guard_sets_them_back(limits: Path, found: str, left: tuple[int, ...]) -> None:
    """If gpucr died before it raised them, or others have set them since, they stay."""
    limits.write_text(found)
    LowerTcpMemory(BEFORE, (1100, 1200, 1300)).recover(())
    assert now(limits) == left


def test_the_guard_knows_before_a_change(limits: Path, protection: Protection, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(Protection, "protect", lambda _, action: told.append((action, now(limits))))
    monkeypatch.setattr(Protection, "withdraw", lambda _, action: told.append((action, now(limits))))
    with room_for(1000 * PAGE, protection):
        pass
    assert told == [(LowerTcpMemory(BEFORE, (2040, 2140, 2240)), BEFORE), (LowerTcpMemory, BEFORE)]


@pytest.mark.criu
def test_a_restore_of_a_job_with_unread_data(limits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    ) as job:
        assert job.stdout is not None
        waiting_bytes = int(job.stdout.readline())
        gpucr.dump(job.pid, tmp_path / "snapshot", force=True)
    told: list[tcp_memory.Limits] = []
    set_limits = tcp_memory.set_limits

    def noted(file: TextIO, new: tcp_memory.Limits) -> None:
        told.append(new)
        set_limits(file, new)

    monkeypatch.setattr(tcp_memory, "set_limits", noted)
    restored = gpucr.restore(tmp_path / "snapshot", force=True)
    os.kill(restored.pid, signal.SIGKILL)
    [raised, after] = told
    assert after == BEFORE
    assert 2 * waiting_bytes // PAGE <= raised[0] - 40 < 2.2 * waiting_bytes // PAGE
