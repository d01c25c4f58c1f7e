"""CRIU, gpucr and its guard are killed at random while they dump a job with TCP connections.

Afterwards nothing is blocked, and the job runs with all of its connections, or is in a complete snapshot. CRIU's own
code in a process can die with it (SIGTRAP, SIGSEGV): such a loss must be named by whoever has survived.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter as Tally
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.linux import processes, sock_diag, tcp_repair
from gpucr.model import ProcessInfo
from gpucr.network import records
from gpucr.undo import left_behind
from tests.children import identity
from tests.counter import wait_until
from tests.own_network import filters, own_network
from tests.storm import long

pytestmark = pytest.mark.criu

ROUNDS = 12
"""Of one test: 30 of them make 360."""

VICTIMS = (
    ("criu",),
    ("gpucr",),
    ("guard",),
    ("criu", "gpucr"),
    ("criu", "guard"),
    ("gpucr", "guard"),
    ("criu", "gpucr", "guard"),
)

JOB = """
import os, signal, socket, sys
peer = int(sys.argv[1])
listener = socket.create_server(("127.0.0.1", 0))
inside = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
if os.fork() == 0:
    inside.close()
    while True:
        server.sendall(server.recv(8))
server.close()
outside = socket.create_connection(("127.0.0.1", peer))
connects = turn = 0
while True:
    turn += 1
    word = b"%8d" % turn
    inside.sendall(word)
    assert inside.recv(8) == word
    try:
        outside.sendall(word)
        answer = outside.recv(8)
    except (ConnectionError, BrokenPipeError):
        answer = b""
    if not answer:
        connects += 1
        outside.close()
        outside = socket.create_connection(("127.0.0.1", peer))
        continue
    assert answer == word, (answer, word)
    with open("progress.new", "w") as file:
        file.write(f"{turn} {connects}")
    os.rename("progress.new", "progress")
"""


class Peer:
    """Sends back what comes, over each connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    @staticmethod
    def _serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while word := connection.recv(8):
                connection.sendall(word)

    def close(self) -> None:
        self._listener.close()


class Job:
    """Two processes that talk to each other and to the peer, all the time."""

    def __init__(self, folder: Path, peer: Peer) -> None:
        self.folder = folder
        folder.mkdir()
        with (folder / "stderr").open("wb") as stderr:
            self._child = subprocess.Popen(
                [sys.executable, "-c", JOB, str(peer.port)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
            )
        self.pid = self._child.pid
        wait_until(lambda: self.progress()[0] > 2, "the job to talk")
        self.ids = [each.id for each in processes.tree(self.pid)]

    def progress(self) -> tuple[int, int]:
        """Its turns, and how often it has connected again."""
        try:
            turn, connects = (self.folder / "progress").read_text().split()
        except FileNotFoundError:
            return 0, 0
        return int(turn), int(connects)

    def is_whole(self) -> bool:
        return all(map(processes.keeps_running, self.ids))

    def has_ended(self) -> bool:
        self._child.poll()
        return not any(map(processes.keeps_running, self.ids))

    def assert_talks(self, connects: int, what: str) -> None:
        before = self.progress()[0]
        wait_until(lambda: self.progress()[0] > before + 2, lambda: f"the job to talk: {what} {self._seen()}")
        assert self.progress()[1] == connects, what

    def _seen(self) -> str:
        """Why it may stand still."""
        found = [processes.describe(each.pid) for each in self.ids]
        open_now = sock_diag.sockets_of(each.pid for each in found)
        sockets = [f"{each.connection} {each.state} {each.waiting}" for each in open_now]
        stops = [f"{each.pid} {each.status} {processes.tracer_pid(each.pid)}" for each in found]
        return f"{stops} {sockets} {filters()} in repair: {tcp_repair.end(self.ids, ())}"

    def said(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")[-300:]

    def end(self) -> None:
        for each in [*self.ids, *(each.id for each in _restored(self.folder))]:
            processes.kill_and_wait([each])
        self._child.wait(60)


def _restored(folder: Path) -> list[ProcessInfo]:
    found = []
    for pid in processes.all_pids():
        with contextlib.suppress(OSError, gpucr.GpucrError):
            if os.readlink(f"/proc/{pid}/cwd") == str(folder):
                found.append(processes.describe(pid))
    return found


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _victims(gpucr_pid: int, kinds: tuple[str, ...]) -> list[int]:
    """CRIU first: who looks after it must see it die."""
    below: dict[int, bytes] = {}
    with contextlib.suppress(gpucr.ProcessNotFound):  # it has just ended
        below = {each.pid: _command(each.pid) for each in processes.tree(gpucr_pid)[1:]}
    of_kind = {
        "criu": [pid for pid, words in below.items() if b"criu" in words and b"guard_process" not in words],
        "guard": [pid for pid, words in below.items() if b"guard_process" in words],
        "gpucr": [gpucr_pid],
    }
    return [pid for kind in ("criu", "gpucr", "guard") if kind in kinds for pid in of_kind[kind]]


@pytest.fixture
def peer() -> Iterator[Peer]:
    with own_network():
        made = Peer()
        yield made
        made.close()


def _strike(job: Job, to: Path, dice: random.Random, kinds: tuple[str, ...], options: list[str]) -> tuple[int, str]:
    """Dump, and kill. Returns gpucr's exit status and what it said, when it, CRIU and its guard have ended."""
    with (job.folder / "said").open("w+b") as said:
        dump = subprocess.Popen(
            [sys.executable, "-m", "gpucr", "dump", str(job.pid), "--to", str(to), *options],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        time.sleep(dice.uniform(0.1, 1.1))  # at any moment: that is what a storm is
        busy = [identity(pid) for pid in _victims(dump.pid, ("criu", "guard"))] if dump.poll() is None else []
        for pid in _victims(dump.pid, kinds) if dump.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = dump.wait(120)
        # The next command leaves to a CRIU what it still works on.
        wait_until(lambda: not any(map(processes.is_alive, busy)), "CRIU and the guard to end", 120)
        said.seek(0)
        return status, said.read().decode(errors="replace")


@long
@pytest.mark.parametrize("seed", range(30))
def test_no_connection_is_lost_in_a_storm(peer: Peer, tmp_path: Path, state_home: Path, seed: int) -> None:
    dice, tally = random.Random(seed), Tally[str]()  # noqa: S311 - the same storm each time
    for number in range(ROUNDS):
        job, to = Job(tmp_path / f"job-{number}", peer), tmp_path / f"s-{number}"
        kinds, options = dice.choice(VICTIMS), dice.choice(([], ["--leave-running"], ["--tcp", "keep"]))
        status, said = _strike(job, to, dice, kinds, options)
        subprocess.run([sys.executable, "-m", "gpucr", "connections"], capture_output=True, check=True, timeout=60)
        log = state_home / "gpucr" / "log" / "guard.log"
        told = said + (log.read_text() if log.exists() else "")
        what = f"{number}: {' '.join(kinds)} {' '.join(options)}: {status} {told} {job.said()}"
        kept = [name for name in records.names() if _snapshot_of(name) == str(to)]
        if job.is_whole():
            assert kept == [], what
            job.assert_talks(0, what)
            tally["runs"] += 1
        elif job.has_ended() and (to / "manifest.json").exists():
            assert bool(kept) == (options == ["--tcp", "keep"]), what
            gpucr.restore(to)
            job.ids = [each.id for each in processes.tree(job.pid)]
            job.assert_talks(0 if kept else 1, what)
            tally["restored"] += 1
        else:
            # CRIU's code in a process has died with it. Whoever is left says so.
            assert "criu" in kinds, what
            assert "lost" in told or "guard" in kinds, what
            assert "PermissionError" not in job.said() or {"guard", "gpucr"} <= set(kinds), what
            tally["lost with CRIU"] += 1
        job.end()
        assert filters() == (), what
        assert left_behind.RECORDS.ended() == [], what
        shutil.rmtree(to, ignore_errors=True)
        if log.exists():
            log.unlink()
    sys.stdout.write(f"{json.dumps({'seed': seed, **tally})}\n")
    assert tally["lost with CRIU"] <= ROUNDS // 5, tally


def _snapshot_of(name: str) -> str | None:
    record = records.read(name)
    return record.snapshot if record is not None else None
