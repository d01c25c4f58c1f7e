"""Programs that take one step on each request of a test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpucr
from gpucr.jobs import sandbox
from tests.counter import kill_at_once, processes_in, wait_until

STEP = """
import os, sys, time
def step():
    "Wait for the next word from the test, and say where we are."
    global turn
    turn += 1
    while not os.path.exists(f"go-{turn}"):
        time.sleep(0.002)
turn = 0
def done(text="ok"):
    with open("tmp", "w") as file:
        file.write(str(text))
    os.rename("tmp", f"done-{turn}")
def lasting_port():
    "A port of 127.0.0.1 that nobody has between a dump and the restore."
    sys.path.insert(0, TESTS)
    from ports import lasting_port
    return lasting_port()
""".replace("TESTS", repr(str(Path(__file__).parent)))


class Job:
    """A Python program in a folder of its own, which does something each time that it is told to."""

    def __init__(self, folder: Path, code: str) -> None:
        self.folder = folder
        folder.mkdir()
        self._turn = 0
        self.pid = self._start([sys.executable, "-c", STEP + code])
        self.wait_done()

    def _start(self, command: list[str]) -> int:
        with (self.folder / "stderr").open("wb") as stderr:
            self._child = subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        return self._child.pid

    def go_on(self) -> str:
        """Let the program take its next step, and return what it says then."""
        self._turn += 1
        (self.folder / f"go-{self._turn}").touch()
        return self.wait_done()

    def wait_done(self) -> str:
        said = self.folder / f"done-{self._turn}"
        wait_until(lambda: said.exists() or not self.pids(), f"turn {self._turn} of the program")
        assert said.exists(), (self.folder / "stderr").read_text()
        return said.read_text()

    def forget(self, after: int = 0) -> None:
        """What it was told and said after that turn, so that a restored program waits for it again."""
        for turn in range(after + 1, self._turn + 1):
            (self.folder / f"go-{turn}").unlink()
            (self.folder / f"done-{turn}").unlink()
        self._turn = after

    def pids(self) -> list[int]:
        return processes_in(self.folder)

    def dump_and_end(self, to: Path | str, **options: Any) -> gpucr.DumpReport:
        report = gpucr.dump(self.pid, to, **options)
        if not report.left_running:
            self.reap()
        return report

    def reap(self) -> None:
        self._child.wait(60)

    def kill(self) -> None:
        kill_at_once(self.pids())
        self.reap()
        wait_until(lambda: not self.pids(), "the program to end")


class SandboxedJob(Job):
    """The same in namespaces of its own."""

    def _start(self, command: list[str]) -> int:
        started = sandbox.start(
            sandbox.Program(command, str(self.folder), dict(os.environ)),
            log_path=str(self.folder / "stderr"),
            status_path=str(self.folder / "status"),
        )
        return started.root.pid

    def reap(self) -> None:
        """Its keeper does."""


StartJob = Callable[[str], Job]
