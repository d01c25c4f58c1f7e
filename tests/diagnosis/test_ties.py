"""What a job shares with processes outside it: each kind of object that two processes can share is found beforehand."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import gpucr
from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight import Finding
from gpucr.diagnosis.preflight.support import processes as process_facts
from gpucr.diagnosis.preflight.support import ties as facts
from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.driver.cuda import CudaDriver
from gpucr.linux import processes
from gpucr.model import CudaState
from gpucr.sim import build as simulator
from tests import command
from tests.counter import wait_until
from tests.diagnosis.programs import job_of, program

pytestmark = pytest.mark.root

_F_OFD_SETLK = 37  # include/uapi/linux/fcntl.h
_libc = ctypes.CDLL(None)


@contextlib.contextmanager
def sharing(*fds: int) -> Iterator[int]:
    """A program that has these descriptors of this process open, too. Its pid."""
    with subprocess.Popen(
        ["sleep", "1000"],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as child:
        try:
            wait_until(lambda: "sleep" in os.readlink(f"/proc/{child.pid}/exe"), "the program to run")
            yield child.pid
        finally:
            child.kill()


def findings(*pids: int) -> list[Finding]:
    return preflight.check_ties(job_of(*pids), lambda other: f"instead, with {other}", lambda: "one tree")


def assert_found(found: Sequence[Finding], fact: Fact, pid: int, other: int) -> None:
    assert len(found) == 1, found
    names = {"process": f"process {pid} ({_name(pid)})", "other": f"process {other} ({_name(other)})"}
    wanted = fact.what.format_map({**names, "file": "*", "part": "*"})
    assert found[0].what.split("*")[0].startswith(wanted.split("*")[0])
    assert (found[0].severity, found[0].pid, found[0].code) == (fact.severity, pid, fact.code)
    if fact is not facts.NUMBER:
        assert f"instead, with {other}" in found[0].remedy


def _name(pid: int) -> str:
    stat = processes.read_stat(pid)
    assert stat is not None
    return stat.name


# --- descriptors that were inherited, or sent: open files of both ----------------------------------------------------


def _fifo(folder: Path) -> list[int]:
    os.mkfifo(folder / "fifo")
    return [os.open(folder / "fifo", os.O_RDWR)]


def _epoll(folder: Path) -> list[int]:
    return [_kept(select.epoll()).fileno()]


def _listening(folder: Path) -> list[int]:
    return [_detached(socket.create_server(("127.0.0.1", 0)))]


def _pair(folder: Path) -> list[int]:
    return [_detached(each) for each in socket.socketpair()]


def _udp(folder: Path) -> list[int]:
    return [_detached(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))]


def _netlink(folder: Path) -> list[int]:
    return [_detached(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))]


def _removed(folder: Path) -> list[int]:
    fd = os.open(folder / "removed", os.O_RDWR | os.O_CREAT)
    os.unlink(folder / "removed")
    return [fd]


def _in_shared_memory(folder: Path) -> list[int]:
    return [os.open(f"/dev/shm/gpucr-test-{os.getpid()}", os.O_RDWR | os.O_CREAT)]


def _locked(folder: Path) -> list[int]:
    fd = os.open(folder / "locked", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return [fd]


def _ofd_locked(folder: Path) -> list[int]:
    fd = os.open(folder / "locked", os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    return [fd]


def _made(name: str, *arguments: int) -> Callable[[Path], list[int]]:
    def make(folder: Path) -> list[int]:
        fd = int(_libc[name](*arguments))
        assert fd >= 0
        return [fd]

    return make


def _signalfd(folder: Path) -> list[int]:
    return [int(_libc.signalfd(-1, bytes(128), 0))]


_KEPT: list[object] = []


def _kept(each: select.epoll) -> select.epoll:
    _KEPT.append(each)
    return each


def _detached(each: socket.socket) -> int:
    fd = os.dup(each.fileno())
    each.close()
    return fd


INHERITED: dict[str, tuple[Callable[[Path], list[int]], Fact]] = {
    "both ends of a pipe": (lambda folder: list(os.pipe()), facts.PIPE),
    "named pipe": (_fifo, facts.PIPE),
    "eventfd": (lambda folder: [os.eventfd(0)], facts.OPEN_FILE),
    "epoll": (_epoll, facts.OPEN_FILE),
    "timerfd": (_made("timerfd_create", 1, 0), facts.OPEN_FILE),
    "signalfd": (_signalfd, facts.OPEN_FILE),
    "inotify": (_made("inotify_init1", 0), facts.OPEN_FILE),
    "listening socket": (_listening, facts.SOCKET),
    "both ends of a connection": (_pair, facts.SOCKET),
    "UDP socket": (_udp, facts.SOCKET),
    "netlink socket": (_netlink, facts.SOCKET),
    "memfd": (lambda folder: [os.memfd_create("test")], facts.MEMORY),
    "removed file": (_removed, facts.UNNAMED_FILE),
    "file in /dev/shm": (_in_shared_memory, facts.NAMED_MEMORY),
    "flock": (_locked, facts.LOCK),
    "lock of an open file": (_ofd_locked, facts.LOCK),
    "position": (lambda folder: [os.open(folder / "log", os.O_WRONLY | os.O_CREAT)], facts.POSITION),
    "pidfd": (lambda folder: [os.pidfd_open(os.getpid())], facts.PIDFD),
}


@pytest.mark.parametrize("kind", INHERITED)
def test_an_inherited_descriptor(kind: str, tmp_path: Path) -> None:
    make, fact = INHERITED[kind]
    fds = make(tmp_path)
    try:
        with sharing(*fds) as pid:
            assert_found(findings(pid), fact, pid, os.getpid())
    finally:
        for fd in fds:
            os.close(fd)
        Path(f"/dev/shm/gpucr-test-{os.getpid()}").unlink(missing_ok=True)


HARMLESS: dict[str, Callable[[Path], list[int]]] = {
    "/dev/null": lambda folder: [os.open("/dev/null", os.O_RDWR)],
    "folder": lambda folder: [os.open(folder, os.O_RDONLY)],
    "file to read": lambda folder: [os.open("/etc/passwd", os.O_RDONLY)],
    "file to append to": lambda folder: [os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)],
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_a_harmless_descriptor_is_allowed(kind: str, tmp_path: Path) -> None:
    fds = HARMLESS[kind](tmp_path)
    with sharing(*fds) as pid:
        assert findings(pid) == []
    for fd in fds:
        os.close(fd)


def test_files_that_both_have_opened_are_allowed(tmp_path: Path) -> None:
    """Also a mapped one, and one that each has locked by itself."""
    path = tmp_path / "data"
    path.write_bytes(bytes(4096))
    code = "import mmap\nf = open('data', 'r+b')\nm = mmap.mmap(f.fileno(), 4096)\nprint(1, flush=True)"
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as _, program(code, tmp_path) as (pid, _said):
        assert findings(pid) == []


def test_a_pipe_nobody_has_the_other_end_of(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with sharing(writing) as pid:
        os.close(reading)
        assert findings(pid) == []
        os.close(writing)
        assert findings(pid) == []


def test_the_process_at_the_other_end_of_a_pipe_is_named() -> None:
    """And not the one that holds the same end."""
    reading, writing = os.pipe()
    with sharing(writing) as writer, sharing(reading) as reader:
        os.close(reading)
        os.close(writing)
        assert_found(findings(writer), facts.PIPE, writer, reader)
        assert_found(findings(reader), facts.PIPE, reader, writer)


def test_a_reader_that_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in another pid namespace, or of another user."""
    reading, writing = os.pipe()
    monkeypatch.setattr("gpucr.linux.descriptor_scan.all_pids", lambda: iter(()))
    with sharing(writing) as pid:
        (found,) = findings(pid)
        assert "is connected to a process that cannot be seen from here by a pipe" in found.what
    os.close(reading)
    os.close(writing)


# --- local sockets whose other end is outside -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
def test_one_end_of_a_pair(kind: socket.SocketKind) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, sharing(theirs.fileno()) as pid:
        theirs.close()
        assert_found(findings(pid), facts.LOCAL_SOCKET, pid, os.getpid())


def test_a_client_of_a_daemon_and_the_daemon(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as client:
        listening.bind(str(tmp_path / "daemon"))
        listening.listen()
        client.connect(str(tmp_path / "daemon"))
        with sharing(client.fileno()) as pid:
            client.close()
            (found,) = findings(pid)
            assert "was not accepted yet" in found.evidence
            accepted, _ = listening.accept()
            with accepted:
                (found,) = findings(pid)
                assert found.code == "GPUCR-UNIX-OUTSIDE"
                assert str(tmp_path / "daemon") in found.evidence
                assert f"process {os.getpid()} " in found.what


def test_datagrams_to_a_name_are_allowed(tmp_path: Path) -> None:
    """CRIU connects the socket again."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client,
    ):
        log.bind(str(tmp_path / "log"))
        client.connect(str(tmp_path / "log"))
        with sharing(client.fileno()) as pid:
            client.close()
            assert findings(pid) == []


def test_a_connection_that_has_ended_is_allowed() -> None:
    ours, theirs = socket.socketpair()
    with sharing(theirs.fileno()) as pid:
        theirs.close()
        ours.close()
        assert findings(pid) == []


# --- memory, and what clone(2) shares ---------------------------------------------------------------------------------

FORK = """
import ctypes, mmap, os, signal
{before}
child = {fork}
if child == 0:
    signal.pause()
print(child, flush=True)
"""


def test_anonymous_memory_of_a_worker(tmp_path: Path) -> None:
    with program(FORK.format(before="m = mmap.mmap(-1, 4096)", fork="os.fork()"), tmp_path) as (parent, (worker,)):
        found = [each for each in findings(worker) if each.severity == "blocking"]
        assert_found(found, facts.MEMORY, worker, parent)
        assert findings(parent) == []


def test_memory_that_nobody_writes_to_is_allowed(tmp_path: Path) -> None:
    before = (
        "f = os.memfd_create('x')\nos.ftruncate(f, 4096)\nr = os.open(f'/proc/self/fd/{f}', os.O_RDONLY)\nos.close(f)"
    )
    with program(FORK.format(before=before, fork="os.fork()"), tmp_path) as (_, (worker,)):
        assert [each for each in findings(worker) if each.severity == "blocking"] == []


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of clone(2) is that of x86-64")
@pytest.mark.parametrize(("flag", "part"), [(0x400, "file descriptors"), (0x200, "working folder and umask")])
def test_a_cloned_part(flag: int, part: str, tmp_path: Path) -> None:
    fork = f"ctypes.CDLL(None).syscall(56, {flag} | 17, 0, 0, 0, 0)"
    with program(FORK.format(before="", fork=fork), tmp_path) as (parent, (worker,)):
        found = [each for each in findings(worker) if part in each.what]
        assert_found(found, facts.CLONED, worker, parent)
        inside = [each.what for each in findings(parent)]
        assert any(part in each for each in inside) is (part != "file descriptors")


# --- terminals, sessions ----------------------------------------------------------------------------------------------


def test_the_other_side_of_a_terminal() -> None:
    master, slave = os.openpty()
    with sharing(master) as pid:
        os.close(master)
        assert_found(findings(pid), facts.TERMINAL, pid, os.getpid())
    os.close(slave)


def test_an_orphan_in_the_jobs_session(tmp_path: Path) -> None:
    code = """
import os, signal, time
middle = os.fork()
if middle == 0:
    middle = os.getpid()
    if os.fork() == 0:
        while os.getppid() == middle:
            time.sleep(0.01)
        print(os.getpid(), flush=True)
        signal.pause()
    os._exit(0)
os.waitpid(middle, 0)
"""
    with program(code, tmp_path) as (pid, (orphan,)):
        found = [each for each in findings(pid) if each.what.startswith(f"process {orphan} ")]
        assert_found(found, facts.NUMBER, pid, orphan)


# --- several trees ----------------------------------------------------------------------------------------------------


def test_two_trees_of_one_job() -> None:
    fd = os.eventfd(0)
    with sharing(fd) as first, sharing(fd) as second:
        os.close(fd)
        (found,) = findings(first, second)
        assert found.code == process_facts.TREES_SHARE.code
        assert found.remedy == "one tree"
        assert_found(findings(first), facts.OPEN_FILE, first, second)


# --- one answer -------------------------------------------------------------------------------------------------------


@pytest.mark.criu
def test_dump_plan_and_doctor_agree(tmp_path: Path) -> None:
    """The common parent is what can be dumped instead."""
    code = """
import subprocess
writer = subprocess.Popen(["sleep", "1000"], stdout=subprocess.PIPE)
reader = subprocess.Popen(["sleep", "1001"], stdin=writer.stdout)
writer.stdout.close()
print(writer.pid, reader.pid, flush=True)
"""
    with program(code, tmp_path) as (parent, (writer, reader)):
        hint = f"dump the process that started both, with all that it started: {parent} (python"
        for words in (["dump", writer, "--to", tmp_path / "s"], ["dump", reader, "--to", tmp_path / "s", "--dry-run"]):
            done = command.run(*words)
            assert done.returncode == 3
            for each in (f"process {writer} (sleep)", f"process {reader} (sleep)", hint, "GPUCR-SHARED-OUTSIDE"):
                assert each in done.stderr
        told = [
            each for each in gpucr.doctor(writer).checkups if each.about == "others" and each.severity == "blocking"
        ]
        assert [each.code for each in told] == ["GPUCR-SHARED-OUTSIDE"]
        assert hint in told[0].remedy
        assert [each.severity for each in gpucr.doctor(parent).checkups if each.about == "others"] == ["ok"]
        assert not (tmp_path / "s").exists()


@pytest.mark.criu
def test_a_suspend_does_not_care(driver: CudaDriver, tmp_path: Path) -> None:
    """It neither ends nor copies the processes."""
    words = [str(simulator.build() / "counter"), "--port", "0", "--mib", "1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=tmp_path, start_new_session=True) as job:
        try:
            assert job.stdout is not None
            assert b"ready" in job.stdout.readline()
            gpucr.suspend(job.pid)
            assert driver.state(job.pid) is CudaState.CHECKPOINTED
            gpucr.resume(job.pid)
            with pytest.raises(gpucr.Unsupported, match="by a pipe"):
                gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
            gpucr.dump(job.pid, tmp_path / "s", leave_running=True, force=True)
        finally:
            job.kill()
