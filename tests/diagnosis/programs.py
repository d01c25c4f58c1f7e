"""Programs that share nothing with the tests that start them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpucr.linux import processes
from gpucr.model import Job
from tests.counter import wait_until


@contextlib.contextmanager
def program(code: str, folder: Path, *, pass_fds: Sequence[int] = ()) -> Iterator[tuple[int, list[int]]]:
    """A Python program that prints numbers, into a file, and waits. Its pid and the numbers."""
    said = folder / "said"
    with said.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", f"{code}\nimport signal\nsignal.pause()"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    with child:
        try:
            wait_until(lambda: "\n" in said.read_text(), "the program to speak")
            yield child.pid, [int(word) for word in said.read_text().split()]
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def job_of(*pids: int) -> Job:
    """The trees of these processes as one job, without CUDA."""
    trees = processes.trees(pids)
    return Job(tuple(process for tree in trees for process in tree), (), tuple(pids[1:]))
