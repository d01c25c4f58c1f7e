"""Programs to dump, and the folders and the CRIU to dump them with."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpucr.criu.engine import Criu
from gpucr.criu.install import find_criu
from gpucr.criu.options import DumpOptions, RestoreOptions, choose_dump_options
from gpucr.linux import processes

DEADLINE_S = 60.0

# Every program writes how often its loop went round into the file `beat` of its folder, in a single write at offset 0.
BEAT = """
import os, sys, time
beat_fd = os.open("beat", os.O_CREAT | os.O_WRONLY, 0o600)
def beat(count):
    os.pwrite(beat_fd, b"%019d\\n" % count, 0)
    time.sleep(0.002)
"""
LOOP = """
count = 0
while True:
    count += 1
    beat(count)
"""


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Poll until ``condition`` returns something true, and return that."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {DEADLINE_S:g} s without success for {what}")
        time.sleep(0.002)
    return value


def running_criu() -> psutil.Process:
    """The one CRIU that this process has started. Other tests may have left children of other kinds, and zombies."""
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    # It changes its title at the request.
    (criu,) = [each for each in children if any(w == "swrk" or w.startswith("criu: ") for w in each.cmdline())]
    return criu


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie. psutil fails where it comes into being just then."""
    stat = processes.read_stat(pid)
    return stat is not None and stat.status not in "ZX"


def join_at_the_latest(watcher: threading.Thread, hook: str, _pid: int) -> None:
    """For a restore: it does not get to its end before the watcher has done its work."""
    if hook == "post-restore":
        watcher.join()


def status_of(pid: int, member: str) -> str:
    """A line of /proc/PID/status, without its name."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith(member + ":")).split(":", 1)[1].strip()


def is_undisturbed(pid: int) -> bool:
    """Whether the process is neither traced nor stopped."""
    return status_of(pid, "TracerPid") == "0" and status_of(pid, "State")[0] in "SRD"


class Program:
    """A running program and the tree below it."""

    def __init__(self, child: subprocess.Popen[bytes], folder: Path) -> None:
        self._child = child
        self.folder = folder
        self.pid = child.pid

    def tree(self) -> list[int]:
        """The pids of the program and all its descendants, the program first."""
        return [self.pid, *(child.pid for child in psutil.Process(self.pid).children(recursive=True))]

    def beats(self) -> int:
        """How many times the loop has run."""
        return int((self.folder / "beat").read_bytes() or b"0")

    def assert_undisturbed(self, pids: list[int] | None = None) -> None:
        """Every process runs, none is stopped or traced, and the loop continues."""
        for pid in pids or self.tree():
            wait_for(partial(is_undisturbed, pid), f"{pid} to run, without a tracer")  # one may just have ended
        seen = self.beats()
        wait_for(lambda: self.beats() > seen + 5, "the program to continue")

    def wait_gone(self, pids: list[int]) -> None:
        """Reap the program and wait until all these pids are free."""
        self._child.wait(DEADLINE_S)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the pids to become free")

    def end(self) -> None:
        """Kill the tree, including a restored one."""
        pids = [pid for pid in processes.all_pids() if self._is_ours(pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._child.kill()
        self._child.wait(DEADLINE_S)
        wait_for(lambda: not any(is_running(pid) for pid in pids), "the program to end")

    def _is_ours(self, pid: int) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/cwd") == str(self.folder)
        except OSError:
            return False


class Workspace:
    """Folders of one test, and dump and restore with them."""

    def __init__(self, criu: Criu, folder: Path) -> None:
        self.criu = criu
        self.images = folder / "images"
        self.images.mkdir()
        self.logs = folder / "logs"
        self.options = DumpOptions(False, False, 1 << 20)

    def dump(self, program: Program, *, leave_running: bool = False, **keywords: Any) -> None:
        """Dump with the options that are chosen for the program; they are kept for the restore."""
        self.options = choose_dump_options(program.tree(), leave_running=leave_running)
        self.criu.dump(program.pid, self.images, self.options, log_path=self.logs / "dump.log", **keywords)

    def restore(self, **keywords: Any) -> int:
        """Restore what was dumped."""
        options = RestoreOptions.from_dump(self.options)
        return self.criu.restore(self.images, options, log_path=self.logs / "restore.log", **keywords)


@pytest.fixture
def criu() -> Criu:
    return Criu(find_criu())


@pytest.fixture
def workspace(criu: Criu, tmp_path: Path) -> Workspace:
    return Workspace(criu, tmp_path)


StartProgram = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartProgram]:
    """``start(setup, loop=LOOP)`` runs Python code in a session of its own; it is ready when its loop goes round."""
    programs: list[Program] = []

    def start_program(setup: str = "", loop: str = LOOP) -> Program:
        folder = tmp_path / f"program-{len(programs)}"
        folder.mkdir()
        with (folder / "stderr").open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-c", BEAT + setup + loop],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        program = Program(child, folder)
        programs.append(program)
        beat = folder / "beat"
        wait_for(lambda: child.poll() is not None or (beat.exists() and program.beats() > 2), "the program to start")
        assert child.poll() is None, (folder / "stderr").read_text()
        return program

    yield start_program
    for program in programs:
        program.end()
