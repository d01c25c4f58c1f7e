"""Jobs that have made terminals (ptys) for their own children."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpucr
from gpucr.linux.terminal import makes_terminals
from gpucr.snapshot.folder import Snapshot, UnfinishedSnapshot
from tests.stepping import StartJob

pytestmark = pytest.mark.criu

# Before each step something lies in the terminal that nobody has read yet; then it is read, and what comes next.
TALKS = """
import pty, tty
pid, master = pty.fork()
if pid == 0:
    tty.setraw(0)
    os.write(1, b"!")
    while data := os.read(0, 100):
        os.write(1, data.upper())
    os._exit(0)
def said(text):
    data = b""
    while len(data) < len(text):
        data += os.read(master, 100)
    return data.decode()
while os.read(master, 1) != b"!":
    pass
done()
while True:
    os.write(master, b"hello")
    time.sleep(0.05)
    step()
    os.write(master, b"again")
    done(said("HELLOAGAIN"))
"""


def test_a_failed_dump_leaves_terminals_unchanged(
    start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU empties them, and makes them non-blocking, when it is to end the job."""
    job = start(TALKS)
    assert job.go_on() == "HELLOAGAIN"

    def fail(*_: object) -> None:
        raise gpucr.SnapshotError("the disk is full", path="there")

    monkeypatch.setattr(UnfinishedSnapshot, "commit", fail)
    with pytest.raises(gpucr.SnapshotError, match="the disk is full"):
        gpucr.dump(job.pid, tmp_path / "s")
    monkeypatch.undo()
    assert job.go_on() == "HELLOAGAIN"
    assert job.go_on() == "HELLOAGAIN"
    job.dump_and_end(tmp_path / "s")
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "HELLOAGAIN"


def test_processes_that_created_terminals() -> None:
    assert not makes_terminals(os.getpid())
    master, slave = os.openpty()
    try:
        assert makes_terminals(os.getpid())
        os.close(master)
        assert not makes_terminals(os.getpid())
    finally:
        os.close(slave)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert not makes_terminals(ended.pid)


def test_a_taken_number(start: StartJob, tmp_path: Path) -> None:
    """A sandbox has a /dev/pts of its own."""
    job = start(TALKS)
    assert job.go_on() == "HELLOAGAIN"
    job.dump_and_end(tmp_path / "s")
    (number,) = Snapshot.open(tmp_path / "s").manifest.terminals
    with contextlib.ExitStack() as taken:
        name = ""
        while name != f"/dev/pts/{number}":
            for fd in os.openpty():
                taken.callback(os.close, fd)
            name = os.ttyname(fd)
        with pytest.raises(gpucr.Unsupported, match=f"{name} is a terminal of process {os.getpid()} ") as caught:
            gpucr.restore(tmp_path / "s")
        assert (caught.value.code, "--isolate" in str(caught.value.hint)) == ("GPUCR-TERMINAL", True)
        restored = gpucr.restore(tmp_path / "s", isolate=True)
        assert job.go_on() == "HELLOAGAIN"
        gpucr.dump(restored.pid, tmp_path / "again")
    gpucr.restore(tmp_path / "again")
    assert job.go_on() == "HELLOAGAIN"
