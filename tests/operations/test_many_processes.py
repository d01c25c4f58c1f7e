"""How often gpucr asks /proc about each process of a job: as often for many processes as for few, and seldom."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.criu import progress
from gpucr.jobs import selection
from gpucr.linux import mounts, processes
from tests.counter import wait_until

pytestmark = pytest.mark.usefixtures("state_home")
"""No earlier test's job, whose first process had a pid that one of these has now: gpucr looks whether it lives."""

_PROCESSES = 'i=1; while [ $i -lt "$1" ]; do sleep 1000000 & i=$((i+1)); done; echo ready; wait'
_OF_PROCESS = re.compile(r"/proc/(\d+)/(?!fdinfo)")
"""Without fdinfo, which is read where anybody on the machine has locked a file with the same inode number."""
_CALLS = ("open", "readlink", "listdir", "stat", "lstat")

Looks = dict[int, Counter[str]]

MOST_IN_PREFLIGHT, MOST_IN_DUMP, MOST_IN_RESTORE = 36, 56, 14
"""For one process with three descriptors. What it shows is read once for each stage: of these files there are many."""


@contextlib.contextmanager
def job_of(count: int, folder: Path) -> Iterator[list[int]]:
    """A job of so many processes, whose descriptors lead to nobody else. Yields their pids, the first one first."""
    output = folder / f"output-{count}"
    with output.open("wb") as file:
        child = subprocess.Popen(
            ["sh", "-c", _PROCESSES, "sh", str(count)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        wait_until(lambda: output.read_bytes() == b"ready\n", "the job to be complete")
        pids = [process.pid for process in processes.tree(child.pid)]
        wait_until(lambda: all(map(_has_begun, pids[1:])), "each of its processes to run its program")
        yield pids
    finally:
        with contextlib.suppress(ProcessLookupError):  # a restored one has the same group
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _has_begun(pid: int) -> bool:
    """Whether it sleeps: before, it may have one of its libraries open."""
    words = Path(f"/proc/{pid}/stat").read_text().split()
    return words[1:3] == ["(sleep)", "S"] and len(os.listdir(f"/proc/{pid}/fd")) == 3


@contextlib.contextmanager
def counted() -> Iterator[Looks]:
    """How often the block looks at what of each process, by pid."""
    found: Looks = defaultdict(Counter)

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted_call(path: Any, *arguments: Any, **named: Any) -> Any:
            if isinstance(path, str | os.PathLike) and (match := _OF_PROCESS.match(os.fspath(path))):
                found[int(match[1])][f"{name} {os.fspath(path)[match.end() :]}"] += 1
            return call(path, *arguments, **named)

        return counted_call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "LOOK_EVERY_S", 1e6)  # on a slow machine it would look again
        for name in _CALLS:
            patch.setattr(os, name, counting(name, getattr(os, name)))
        patch.setattr("builtins.open", counting("open", open))
        patch.setattr(mounts, "mount_of", counting("mount_of", mounts.mount_of))
        yield found


def _are_free(pids: list[int]) -> bool:
    return not any(map(processes.read_stat, pids))


def most(found: Looks, pids: list[int]) -> Counter[str]:
    """The most for one process but the first three: what they have in common is looked at in the first of them."""
    return max((found[pid] for pid in pids[3:]), key=Counter.total)


def test_preflight(tmp_path: Path) -> None:
    reads = []
    for count in (20, 60):
        with job_of(count, tmp_path) as pids, counted() as found:
            assert selection.findings_for_criu(selection.find_job(pids[0])) == []
        reads.append(most(found, pids))
    assert reads[0] == reads[1]
    assert 10 < reads[0].total() <= MOST_IN_PREFLIGHT


@pytest.mark.criu
def test_a_dump_and_a_restore(tmp_path: Path) -> None:
    dumped, restored = [], []
    for count in (20, 60):
        with job_of(count, tmp_path) as pids:
            with counted() as found:
                gpucr.dump(pids[0], tmp_path / f"left-{count}", leave_running=True)
            dumped.append(most(found, pids))
            with counted() as found:
                gpucr.dump(pids[0], tmp_path / f"ended-{count}")
            assert most(found, pids).total() <= MOST_IN_DUMP
            os.waitpid(pids[0], 0)
            wait_until(partial(_are_free, pids), "the pids to be free")
            with counted() as found:
                gpucr.restore(tmp_path / f"ended-{count}")
            restored.append(most(found, pids))
    assert dumped[0] == dumped[1]
    assert restored[0] == restored[1]
    assert 20 < dumped[0].total() <= MOST_IN_DUMP
    assert 5 < restored[0].total() <= MOST_IN_RESTORE
