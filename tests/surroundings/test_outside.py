"""Jobs with shared memory, alone and with files and connections: dumped, ended and restored. With real CRIU.

None may run beside another that has files in /dev/shm to which CRIU gives a name while it dumps: it numbers these names
again in each dump, and one of two that want the same number fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.criu.engine import Criu
from gpucr.sim import build as simulator
from tests import command
from tests.command import python
from tests.counter import wait_until
from tests.network.test_connections import time_waits
from tests.stepping import StartJob

pytestmark = pytest.mark.criu

# --- shared memory ---------------------------------------------------------------------------------------------

SHARED = """
import ctypes, multiprocessing, posixpath
from multiprocessing import shared_memory, synchronize

named = shared_memory.SharedMemory(create=True, size=3 << 20, name="NAME")
named.buf[1 << 20 : (1 << 20) + 5] = b"first"

libc = ctypes.CDLL(None, use_errno=True)
libc.sem_open.restype = ctypes.c_void_p
for call in (libc.sem_wait, libc.sem_trywait, libc.sem_post, libc.sem_getvalue):
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p] if call is libc.sem_getvalue else [ctypes.c_void_p]
kept = libc.sem_open(b"/NAME", os.O_CREAT | os.O_EXCL, 0o600, 3)
assert kept and libc.sem_trywait(kept) == 0

# NCCL's way: a file of 34 MB that is mapped and has lost its name.
fd = os.open("/dev/shm/NAME-deleted", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
os.truncate(fd, 34 << 20)
import mmap
deleted = mmap.mmap(fd, 34 << 20)
os.close(fd)
os.unlink("/dev/shm/NAME-deleted")
deleted[33 << 20 : (33 << 20) + 5] = b"ghost"

# Semaphores of multiprocessing lose their names at once; a queue has three of them, and a pipe.
queue = multiprocessing.Queue()
lock = multiprocessing.Lock()
lock.acquire()

def work(queue, lock, buffer):
    while True:
        word = queue.get()
        lock.acquire()
        buffer[0:1] = bytes([buffer[0] + 1])
        lock.release()
        libc.sem_post(kept)

child = multiprocessing.get_context("fork").Process(target=work, args=(queue, lock, named.buf), daemon=True)
child.start()
queue.put("wait")
def value():
    found = ctypes.c_int()
    assert libc.sem_getvalue(kept, ctypes.byref(found)) == 0
    return found.value
time.sleep(0)
done(value())
while True:
    step()
    assert bytes(deleted[33 << 20 : (33 << 20) + 5]) == b"ghost"
    assert named.buf[2 << 20] == 0
    lock.release()
    assert libc.sem_wait(kept) == 0
    while value() == 1:
        time.sleep(0.001)
    lock.acquire()
    queue.put("more")
    again = shared_memory.SharedMemory(name="NAME")
    same = bytes(again.buf[:1]) == bytes(named.buf[:1])
    done(f"{value()} {named.buf[0]} {bytes(named.buf[1 << 20 : (1 << 20) + 5])} {same}")
    named.buf[1 << 20 : (1 << 20) + 5] = b"later"
    again.close()
"""
"""What jobs have in /dev/shm. At each turn the child takes the lock once and posts the semaphore."""


KILLED_AT_THE_END = """
import gpucr, os, signal, sys
from gpucr.operations import dump_steps
commit = dump_steps.commit
def committing(context, draft, *rest):
    for each in draft.shared_files:
        if any("link_remap" in name for name in each.names):
            print("named by CRIU", file=sys.stderr, flush=True)
    return commit(context, draft, *rest)
dump_steps.commit = committing
dump_steps.CriuDump._size_bytes_after_the_end = lambda self: os.kill(os.getpid(), signal.SIGKILL)
gpucr.dump(int(sys.argv[1]), sys.argv[2])
"""


@pytest.fixture
def shared_name() -> Iterator[str]:
    name = f"gpucr-test-{os.getpid()}"
    with (Path(tempfile.gettempdir()) / f"gpucr-tests-of-shared-memory-{os.getuid()}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the others, in other processes, are through
        yield name
        for path in Path("/dev/shm").glob(f"*{name}*"):
            path.unlink()


def shared_paths(name: str) -> list[str]:
    """Also what CRIU has named and left there. While another job is dumped, by another test, it has such names, too."""
    passing = remaps()
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not passing & remaps(), "the dumps of others")
    left = [remap for remap, _ in passing & remaps()]
    return sorted([*left, *(path.name for path in Path("/dev/shm").iterdir() if name in path.name)])


def remaps() -> set[tuple[str, int]]:
    """CRIU's names in /dev/shm, and their inodes."""
    found = set()
    for path in Path("/dev/shm").glob("link_remap.*"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.lstat().st_ino))
    return found


def test_shared_memory_is_restored_unchanged(start: StartJob, tmp_path: Path, shared_name: str) -> None:
    job = start(SHARED.replace("NAME", shared_name))
    assert shared_paths(shared_name) == [shared_name, f"sem.{shared_name}"]
    inode = Path(f"/dev/shm/{shared_name}").stat().st_ino
    report = job.dump_and_end(tmp_path / "s", leave_running=True)
    records = {record.names[0]: record for record in report.snapshot.manifest.shared_files}
    assert records[shared_name].size_bytes == 3 << 20
    stored = tmp_path / "s" / records[shared_name].stored
    assert stored.stat().st_blocks * 512 <= 1 << 20, "zeros are not stored"
    assert job.go_on() == "2 1 b'first' True"
    assert job.go_on() == "2 2 b'later' True"
    job.kill()
    job.forget()
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "2 1 b'first' True"
    assert Path(f"/dev/shm/{shared_name}").stat().st_ino != inode, "it was made again"
    assert shared_paths(shared_name) == [shared_name, f"sem.{shared_name}"]


def test_a_gpucr_killed_after_criu_leaves_no_names(start: StartJob, tmp_path: Path, shared_name: str) -> None:
    """The snapshot is already complete. The names would block another job's dump."""
    job = start(SHARED.replace("NAME", shared_name))
    inode = Path(f"/dev/shm/sem.{shared_name}").stat().st_ino
    done = python(KILLED_AT_THE_END, job.pid, tmp_path / "s")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "named by CRIU" in done.stderr
    job.reap()
    assert inode not in [each for _, each in remaps()]
    job.forget()
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "2 1 b'first' True"


def test_shared_memory_without_names_is_restored(start: StartJob, tmp_path: Path, shared_name: str) -> None:
    """After a reboot, or on another machine, /dev/shm is empty."""
    job = start(SHARED.replace("NAME", shared_name))
    job.dump_and_end(tmp_path / "s")
    assert shared_paths(shared_name) == [shared_name, f"sem.{shared_name}"], "CRIU's own names do not stay"
    for name in shared_paths(shared_name):
        Path("/dev/shm", name).unlink()
    job.forget()
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "2 1 b'first' True"
    assert shared_paths(shared_name) == [shared_name, f"sem.{shared_name}"]


def test_shared_memory_in_use_by_others_is_not_replaced(start: StartJob, tmp_path: Path, shared_name: str) -> None:
    job = start(SHARED.replace("NAME", shared_name))
    job.dump_and_end(tmp_path / "s")
    with (
        Path("/dev/shm", shared_name).open("rb") as shared,
        subprocess.Popen(["sleep", "60"], stdin=shared) as other,
    ):
        with pytest.raises(gpucr.Unsupported, match=f"{shared_name} is in use.*by process {other.pid} "):
            gpucr.restore(tmp_path / "s")
        other.kill()


def test_shared_memory_is_put_back_when_the_restore_fails(
    start: StartJob, tmp_path: Path, shared_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(SHARED.replace("NAME", shared_name))
    job.dump_and_end(tmp_path / "s")
    path = Path("/dev/shm", shared_name)
    path.write_bytes(b"another one's")
    path.chmod(0o644)
    os.chown(path, 12, 34)

    def fail(*arguments: Any, **options: Any) -> int:
        assert path.stat().st_size == 3 << 20, "CRIU was to find it as it was"
        raise gpucr.CriuError("injected", phase="restore")

    monkeypatch.setattr("gpucr.criu.engine.Criu.restore", fail)
    before = shared_paths(shared_name)
    with pytest.raises(gpucr.CriuError, match="injected"):
        gpucr.restore(tmp_path / "s")
    status = path.stat()
    assert path.read_bytes() == b"another one's"
    assert (status.st_mode & 0o777, status.st_uid, status.st_gid) == (0o644, 12, 34)
    assert shared_paths(shared_name) == before


def test_a_second_restore_takes_nothing_from_the_first(
    start: StartJob, tmp_path: Path, shared_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(SHARED.replace("NAME", shared_name))
    pids = job.pids()
    job.dump_and_end(tmp_path / "s")
    real, others = Criu.restore, []

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        others.append(command.run("restore", tmp_path / "s"))
        return real(*arguments, **options)

    monkeypatch.setattr(Criu, "restore", meanwhile)
    gpucr.restore(tmp_path / "s")
    (other,) = others
    assert other.returncode == 3
    # It names the smallest of the pids, which is the child's where the kernel began with small ones again.
    assert f"another gpucr is restoring a job with process {min(pids)}\n" in other.stderr
    assert job.go_on()
    assert Path("/dev/shm", shared_name).exists()


# --- all of it at once -----------------------------------------------------------------------------------------

TORCHRUN = """
import json, mmap, multiprocessing, signal, socket, subprocess
from multiprocessing import shared_memory

# The agent's store, as torchrun has one: ranks meet there over TCP. No SO_REUSEADDR.
store = socket.socket()
store.bind(("127.0.0.1", lasting_port()))
store.listen()
port = store.getsockname()[1]
buffer = shared_memory.SharedMemory(create=True, size=1 << 20, name="NAME")
log = open("train.log", "w", buffering=1)

def loader(queue, room):
    for number in range(10**9):
        room.acquire()
        queue.put(number)

def rank(number, pipe, side):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = socket.create_connection(("127.0.0.1", port))
    fd = os.open(f"/dev/shm/nccl-NAME-{number}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.truncate(fd, 34 << 20)
    segment = mmap.mmap(fd, 34 << 20)
    os.close(fd)
    os.unlink(f"/dev/shm/nccl-NAME-{number}")
    context = multiprocessing.get_context("fork")
    batches, room = context.Queue(), context.Semaphore(2)
    worker = context.Process(target=loader, args=(batches, room), daemon=True)
    worker.start()
    mine = shared_memory.SharedMemory(name="NAME")
    total = 0
    while True:
        command = pipe.recv()
        batch = batches.get()
        room.release()
        total += batch
        segment[20 << 20 : (20 << 20) + 8] = total.to_bytes(8, "big")
        link.sendall(bytes([number]))
        assert link.recv(1) == b"g"
        side.send(b"u")
        mine.buf[number] = (mine.buf[number] + 1) % 256
        seen = int.from_bytes(segment[20 << 20 : (20 << 20) + 8], "big")
        pipe.send((number, batch, seen, mine.buf[number]))

context = multiprocessing.get_context("fork")
ranks = []
for number in range(2):
    ours, theirs = context.Pipe()
    left, right = socket.socketpair()
    process = context.Process(target=rank, args=(number, theirs, right), daemon=False)
    process.start()
    ranks.append((ours, left, store.accept()[0]))
for _ in range(2):  # short connections, closed by the store first
    client = socket.create_connection(("127.0.0.1", port))
    store.accept()[0].close()
    client.close()
if os.path.exists("counter"):
    with open("counter.out", "w") as out:
        counter = subprocess.Popen(json.load(open("counter")), stdin=subprocess.DEVNULL, stdout=out)
done(port)
while True:
    step()
    said = []
    for pipe, _, _ in ranks:
        pipe.send("step")
    for _, side, link in ranks:
        assert link.recv(1)
        link.sendall(b"g")
        assert side.recv(1) == b"u"
    for pipe, _, _ in ranks:
        said.append(pipe.recv())
    print(said, file=log)
    done(said)
"""
"""Like torchrun: an agent with a TCP store, two ranks with NCCL-like segments, and a data loader of each."""


def expected_of_training(turn: int) -> str:
    batch = turn - 1
    return str([(rank, batch, batch * (batch + 1) // 2, turn) for rank in range(2)])


def test_a_torchrun_like_job_continues_at_once(start: StartJob, tmp_path: Path, shared_name: str) -> None:
    job = start(TORCHRUN.replace("NAME", shared_name))
    port = int((job.folder / "done-0").read_text())
    for turn in range(1, 4):
        assert job.go_on() == expected_of_training(turn)
    tree = job.pids()
    assert len(tree) == 5 + 1, "the agent, two ranks, two loaders, and the agent's resource tracker"
    job.dump_and_end(tmp_path / "s")
    assert time_waits(port) >= 2
    report = gpucr.restore(tmp_path / "s")
    assert [phase.name for phase in report.phases] == ["verify", "keeper", "shared", "ports", "criu", "release", "keep"]
    assert sorted(job.pids()) == sorted(tree)
    for turn in range(4, 7):
        assert job.go_on() == expected_of_training(turn)
    assert (job.folder / "train.log").read_text().splitlines() == [expected_of_training(turn) for turn in range(1, 7)]


def test_an_older_snapshot_of_such_a_job_can_be_restored(start: StartJob, tmp_path: Path, shared_name: str) -> None:
    job = start(TORCHRUN.replace("NAME", shared_name))
    assert job.go_on() == expected_of_training(1)
    job.dump_and_end(tmp_path / "s", leave_running=True)
    for turn in range(2, 4):
        assert job.go_on() == expected_of_training(turn)
    job.kill()
    job.forget(after=1)
    gpucr.restore(tmp_path / "s", files="rewind")
    for turn in range(2, 4):
        assert job.go_on() == expected_of_training(turn)
    assert (job.folder / "train.log").read_text().splitlines() == [expected_of_training(turn) for turn in range(1, 4)]
    (kept,) = job.folder.glob("train.log.gpucr-*")
    assert kept.read_text().splitlines() == [expected_of_training(turn) for turn in range(2, 4)]


def test_a_torchrun_like_job_in_a_sandbox(start_sandboxed: StartJob, tmp_path: Path, shared_name: str) -> None:
    job = start_sandboxed(TORCHRUN.replace("NAME", shared_name))
    assert shared_paths(shared_name) == [], "its /dev/shm is its own"
    assert job.go_on() == expected_of_training(1)
    dumped = job.dump_and_end(tmp_path / "s", leave_running=True)
    assert [record.names for record in dumped.snapshot.manifest.shared_files] == [(shared_name,)]
    for turn in range(2, 4):
        assert job.go_on() == expected_of_training(turn)
    job.kill()
    job.forget(after=1)
    report = gpucr.restore(tmp_path / "s", files="rewind")
    names = [phase.name for phase in report.phases]
    assert names == ["verify", "sandbox", "shared", "files", "criu", "release", "keep"]
    for turn in range(2, 4):
        assert job.go_on() == expected_of_training(turn)
    assert (job.folder / "train.log").read_text().splitlines() == [expected_of_training(turn) for turn in range(1, 4)]
    assert shared_paths(shared_name) == []


def test_unopened_shared_memory_in_a_sandbox(start_sandboxed: StartJob, tmp_path: Path) -> None:
    """Torch's way to hand tensors on: a file lies in /dev/shm until the other process opens it."""
    code = (
        "with open('/dev/shm/handed-on', 'wb') as file:\n    file.write(b'tensor')\nos.mkdir('/dev/shm/folder')\n"
        "os.rename('/dev/shm/handed-on', '/dev/shm/folder/handed-on')\ndone()\n"
        "step()\ndone(open('/dev/shm/folder/handed-on').read())\nstep()\n"
    )
    job = start_sandboxed(code)
    job.dump_and_end(tmp_path / "s")
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "tensor"


def test_semaphores_in_a_sandbox(start_sandboxed: StartJob, tmp_path: Path, shared_name: str) -> None:
    job = start_sandboxed(SHARED.replace("NAME", shared_name))
    job.dump_and_end(tmp_path / "s")
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "2 1 b'first' True"


def test_a_torchrun_like_job_with_a_cuda_process(
    start: StartJob, sim_only: None, tmp_path: Path, shared_name: str
) -> None:
    """The agent's tree has a process with device memory, which goes the way of the driver."""
    program = [str(simulator.build() / "counter"), "--port", "0", "--mib", "8"]
    prepare = f"import json\njson.dump({program!r}, open('counter', 'w'))\n"
    job = start(prepare + TORCHRUN.replace("NAME", shared_name))
    said = job.folder / "counter.out"
    wait_until(lambda: said.exists() and "ready" in said.read_text(), "the counter")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.connect(("127.0.0.1", int(re.findall(r"port=(\d+)", said.read_text())[0])))
        asker.settimeout(60)

        def ask() -> int:
            asker.send(b"hello")
            return int(asker.recv(100))

        assert (ask(), job.go_on()) == (101, expected_of_training(1))
        job.dump_and_end(tmp_path / "s")
        report = gpucr.restore(tmp_path / "s")
        assert "restore" in {phase.name for phase in report.phases}
        assert (ask(), job.go_on()) == (102, expected_of_training(2))
