"""Descriptors given to another process: they arrive, and nothing else stays open there."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
from collections.abc import Iterator
from mmap import MAP_SHARED, PROT_READ, PROT_WRITE

import pytest

from gpucr.linux import descriptors
from gpucr.linux.descriptors import close_descriptor, send_descriptor
from gpucr.linux.injection import MMAP, RECVMSG, SOCKETPAIR, run_syscall, scratch_address
from gpucr.linux.processes import open_files
from gpucr.linux.ptrace import TracedThread
from tests.children import Child, python

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="system calls are run in x86-64 threads only")

_IDLE = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.001)"


@pytest.fixture
def child() -> Iterator[Child]:
    with python(_IDLE) as process:
        yield process


@contextlib.contextmanager
def _traced(tid: int) -> Iterator[TracedThread]:
    thread = TracedThread.seize(tid)
    try:
        yield thread
    finally:
        thread.detach(thread.last_stop.signal)


@pytest.fixture
def thread(child: Child) -> Iterator[TracedThread]:
    with _traced(child.pid) as found:
        yield found


@pytest.fixture
def memory_file() -> Iterator[int]:
    fd = os.memfd_create("sent")
    os.write(fd, bytes(8192))
    yield fd
    os.close(fd)


def _opened(pid: int) -> dict[int, str]:
    return {file.fd: file.target for file in open_files(pid)}


def test_a_file_is_the_same_on_both_sides(thread: TracedThread, memory_file: int) -> None:
    before = _opened(thread.tid)
    ours = _opened(os.getpid())
    number = send_descriptor(thread, memory_file)
    assert _opened(thread.tid) == before | {number: "/memfd:sent (deleted)"}
    assert _opened(os.getpid()) == ours

    address = run_syscall(thread, MMAP, 0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, number, 4096)
    os.pwrite(memory_file, b"from here", 4096)
    assert thread.read_memory(address, 9) == b"from here"
    thread.write_memory(address, b"and there")
    assert os.pread(memory_file, 9, 4096) == b"and there"

    close_descriptor(thread, number)
    assert _opened(thread.tid) == before
    assert thread.read_memory(address, 9) == b"and there"


def test_it_is_closed_on_exec(thread: TracedThread, memory_file: int) -> None:
    number = send_descriptor(thread, memory_file)
    with open(f"/proc/{thread.tid}/fdinfo/{number}") as info:
        flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags:"))
    assert flags & os.O_CLOEXEC


def test_many_descriptors_in_succession(child: Child, memory_file: int) -> None:
    before = _opened(child.pid)
    for _ in range(50):
        with _traced(child.pid) as thread:
            close_descriptor(thread, send_descriptor(thread, memory_file))
    assert _opened(child.pid) == before


@pytest.mark.parametrize("free", [0, 1, 2])
def test_a_process_at_its_open_file_limit(child: Child, memory_file: int, free: int) -> None:
    """With two free numbers there is room for the sockets, and after one was closed for the file as well."""
    before = _opened(child.pid)
    resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (max(before) + 1 + free, 4096))
    with _traced(child.pid) as thread:
        if free < 2:
            with pytest.raises(OSError, match="Too many open files") as failure:
                send_descriptor(thread, memory_file)
            assert failure.value.errno == errno.EMFILE
        else:
            close_descriptor(thread, send_descriptor(thread, memory_file))
    assert _opened(child.pid) == before


def test_a_process_without_a_free_descriptor_for_the_file(
    child: Child, memory_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last free number is taken by somebody else before the file arrives: the kernel drops the file then."""
    before = _opened(child.pid)
    real = run_syscall

    def with_limit(thread: TracedThread, number: int, *arguments: int) -> int:
        if number == RECVMSG:
            resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (3, 4096))
        return real(thread, number, *arguments)

    monkeypatch.setattr(descriptors, "run_syscall", with_limit)
    with _traced(child.pid) as thread, pytest.raises(OSError, match="refused one more descriptor") as failure:
        send_descriptor(thread, memory_file)
    assert failure.value.errno == errno.EMFILE
    assert _opened(child.pid) == before


@pytest.mark.parametrize("failing", [SOCKETPAIR, RECVMSG, "copy", "send"])
def test_nothing_stays_open_after_a_failure(
    child: Child, memory_file: int, monkeypatch: pytest.MonkeyPatch, failing: int | str
) -> None:
    before, ours = _opened(child.pid), _opened(os.getpid())
    real = run_syscall

    def failing_call(thread: TracedThread, number: int, *arguments: int) -> int:
        if number == failing:
            raise OSError(errno.EIO, "injected")
        return real(thread, number, *arguments)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(descriptors, "run_syscall", failing_call)
    if failing == "copy":
        monkeypatch.setattr(os, "pidfd_open", fail)
    if failing == "send":
        monkeypatch.setattr(socket, "send_fds", fail)
    with _traced(child.pid) as thread, pytest.raises(OSError, match="injected"):
        send_descriptor(thread, memory_file)
    assert _opened(child.pid) == before
    assert _opened(os.getpid()) == ours


def test_a_descriptor_that_is_not_open_cannot_be_sent_or_closed(thread: TracedThread) -> None:
    before = _opened(thread.tid)
    for act in (send_descriptor, close_descriptor):
        with pytest.raises(OSError, match="Bad file descriptor"):
            act(thread, 999)
    assert _opened(thread.tid) == before


def test_the_end_of_the_process_is_reported(child: Child, memory_file: int) -> None:
    with _traced(child.pid) as thread:
        child.make_zombie()
        with pytest.raises(ProcessLookupError):
            send_descriptor(thread, memory_file)


_POINTS = ["named", "sent", "received"]


def _send_and_die(tid: int, fd: int, point: str) -> None:
    """Send a descriptor as a gpucr that is killed at this point. In a process of its own; does not return."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def run(thread: TracedThread, number: int, *arguments: int) -> int:
        if number == RECVMSG and point == "sent":
            die()
        result = run_syscall(thread, number, *arguments)
        if number == RECVMSG and point == "received":
            die()
        return result

    vars(descriptors)["run_syscall"] = run
    if point == "named":
        socket.send_fds = die  # type: ignore[assignment]
    send_descriptor(TracedThread.seize(tid), fd)


@pytest.mark.parametrize("point", _POINTS)
def test_sockets_left_by_a_killed_gpucr_are_recognised(child: Child, memory_file: int, point: str) -> None:
    """Other sockets of the process, bound to names or not, are not touched."""
    with _traced(child.pid) as thread:
        scratch = scratch_address(thread)
        run_syscall(thread, SOCKETPAIR, socket.AF_UNIX, socket.SOCK_STREAM, 0, scratch)
    before = _opened(child.pid)
    assert descriptors.sockets_left_behind(child.pid) == ()

    killed = os.fork()
    if killed == 0:
        _send_and_die(child.pid, memory_file, point)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == -signal.SIGKILL

    left = descriptors.sockets_left_behind(child.pid)
    arrived = {number for number, target in _opened(child.pid).items() if "memfd:sent" in target}
    assert len(left) > 0
    assert set(_opened(child.pid)) - set(before) == {*left, *arrived}
    assert len(arrived) == (point == "received")
    with _traced(child.pid) as thread:
        for number in (*left, *arrived):
            close_descriptor(thread, number)
    assert _opened(child.pid) == before


def test_an_ended_process_holds_no_leftovers() -> None:
    assert descriptors.sockets_left_behind(1 << 22) == ()
