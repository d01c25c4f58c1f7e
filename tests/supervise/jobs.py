"""Real jobs that are supervised: how far they are, and their end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpucr.jobs.registered import registry
from gpucr.operations.end_job import end_processes
from gpucr.supervise.folder import SupervisedFolder, SupervisedState
from gpucr.supervise.start import end_supervisors
from tests import command
from tests.counter import wait_until
from tests.lines import complete_lines

COUNTS = """
import os, time
out = open("steps", "a", buffering=1)
for step in range({steps}):
    print(step, flush=True)
    print(step, file=out)
    while os.path.exists("hold") or (step == {stop_at} and not os.path.exists("go")):
        time.sleep(0.01)
    time.sleep(0.02)
"""
"""Counts in a file and in its log; waits at a step until there is a file `go`, and while there is a file `hold`."""


def counting(steps: int, stop_at: int = -1) -> list[str]:
    """The command of such a job."""
    return [sys.executable, "-I", "-S", "-u", "-c", COUNTS.format(steps=steps, stop_at=stop_at)]


def run(folder: Path, *words: object, every: str = "500ms") -> dict[str, Any]:
    """`gpucr run --every ...`: options, ``--``, command."""
    options = ["--every", every, "--to", folder / "store", "--name", "train", "--cwd", folder]
    return command.run_json_before("run", *options, *words)


def state() -> SupervisedState:
    """How far the supervised job is."""
    return SupervisedFolder("train").state()


def events(kind: str) -> list[dict[str, Any]]:
    """The events of this kind so far."""
    told = [json.loads(line) for line in complete_lines(SupervisedFolder("train").events_path)]
    return [event for event in told if event["event"] == kind]


def wait_for_event(kind: str, count: int = 1) -> None:
    """Wait until the supervisor has told of that so many times."""
    wait_until(lambda: len(events(kind)) >= count, lambda: f"{count} times {kind}: {_log()}")


def _log() -> str:
    path = SupervisedFolder("train").log_path
    return path.read_text() if path.exists() else "there is no log"


def kill_job() -> None:
    """SIGKILL to its first process."""
    record = registry().find("train").record
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)


@pytest.fixture
def own_state(tmp_path: Path, state_home: Path) -> Iterator[Path]:
    """A private registry; the supervisors and jobs in it are ended with the test."""
    yield tmp_path
    end_supervisors(None, "leave", timeout_s=60)
    for job in registry().jobs():
        if job.record is not None:
            end_processes(job.record)
    for folder in SupervisedFolder.all():
        with contextlib.suppress(FileNotFoundError):
            folder.remove()
