"""The remains of a tree after a killed CRIU are ended, to the last task."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from gpucr.criu.remains import kill_orphans, task_pids
from gpucr.linux import processes
from gpucr.model import ProcessId


@pytest.fixture
def tasks() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    yield started
    for task in started:
        task.kill()
        task.wait()


def start_of(pid: int) -> int:
    stat = processes.read_stat(pid)
    assert stat is not None
    return stat.start_time_ticks


def add_to_tree(images: Path, pid: int) -> None:
    (images / f"core-{pid}.img").touch()


def is_running(pid: int) -> bool:
    stat = processes.read_stat(pid)
    return stat is not None and stat.status != "Z"


def test_a_task_forked_meanwhile(tasks: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU's first task makes the second; it may do so after that one was looked for and before it is killed itself."""
    parent, child = tasks
    pids = [parent.pid]
    kill_and_wait = processes.kill_and_wait

    def fork_and_kill(found: Iterable[ProcessId]) -> tuple[ProcessId, ...]:
        known = tuple(found)
        pids.append(child.pid)
        return kill_and_wait(known)

    monkeypatch.setattr(processes, "kill_and_wait", fork_and_kill)
    kill_orphans(pids, since_ticks=start_of(parent.pid))
    assert not is_running(parent.pid)
    assert not is_running(child.pid)


def test_older_processes_with_these_pids_are_left_alone(tmp_path: Path, tasks: list[subprocess.Popen[bytes]]) -> None:
    for task in tasks:
        add_to_tree(tmp_path, task.pid)
    pids = task_pids(tmp_path)
    assert sorted(pids) == sorted(task.pid for task in tasks)
    kill_orphans(pids, since_ticks=start_of(tasks[-1].pid) + 1)
    assert all(is_running(task.pid) for task in tasks)
