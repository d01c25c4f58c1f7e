"""A killed guard ends the operation in any step, with a plain failure and the job as it was found."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import BrokenInstall
from gpucr.linux import processes
from gpucr.model import CudaState
from gpucr.operations.requests import Persist
from tests.counter import Counter, CounterFactory, wait_until
from tests.storm import sample

Listener = Callable[[gpucr.Progress], None]

_SUSPEND = ("lock", "checkpoint")
_RESUME = ("restore", "unlock")
_DUMP = ("prepare", "allocate", "lock", "checkpoint", "detach", "stop", "dump")
_THAW = ("hold", "attach", "restore", "unlock", "release")
_RESTORE = ("verify", "load", "keeper", "criu", "hold", "restore", "unlock", "release", "keep")


def killing_the_guard(event: str, phase: str, met: list[str]) -> Listener:
    """Kill this process's guard when this phase begins or ends."""

    def listen(progress: gpucr.Progress) -> None:
        if (progress.event, progress.phase) == (event, phase):
            found: list[int] = []

            def has_begun() -> bool:
                found[:] = [pid for pid in processes.all_pids() if _is_own_guard(pid)]
                return bool(found)

            wait_until(has_begun, "the guard to be there")
            (guard,) = found
            os.kill(guard, signal.SIGKILL)
            wait_until(lambda: _has_ended(guard), "the guard to end")
            met.append(phase)

    return listen


def _is_own_guard(pid: int) -> bool:
    stat = processes.read_stat(pid)
    if stat is None or stat.parent_pid != os.getpid():
        return False
    return b"gpucr.undo.guard_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _has_ended(pid: int) -> bool:
    stat = processes.read_stat(pid)
    return stat is None or stat.status in "ZX"


def assert_as_found(job: Counter, driver: CudaDriver, state: CudaState = CudaState.RUNNING) -> None:
    stat = processes.read_stat(job.pid)
    assert stat is not None
    assert stat.status not in "Tt"
    assert driver.state(job.pid) is state


@pytest.mark.parametrize("event", ["begin", "end"])
@pytest.mark.parametrize("phase", _SUSPEND)
def test_suspend(counter: CounterFactory, driver: CudaDriver, event: str, phase: str) -> None:
    job, met = counter("--mib", "4"), list[str]()
    try:
        gpucr.suspend(job.pid, on_progress=killing_the_guard(event, phase, met))
    except BrokenInstall:
        assert_as_found(job, driver)
    else:
        assert_as_found(job, driver, CudaState.CHECKPOINTED)
        gpucr.resume(job.pid)
    assert met
    assert job.send("verify") == "ok"


@pytest.mark.parametrize("event", ["begin", "end"])
@pytest.mark.parametrize("phase", _RESUME)
def test_resume(counter: CounterFactory, driver: CudaDriver, event: str, phase: str) -> None:
    job, met = counter("--mib", "4"), list[str]()
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid, on_progress=killing_the_guard(event, phase, met))
    assert met
    assert_as_found(job, driver)
    assert job.send("verify") == "ok"


@pytest.mark.criu
@pytest.mark.parametrize(
    ("phase", "event"),
    sample(list(itertools.product([each for each in _DUMP if each != "dump"], ["begin", "end"])), 6),
)
def test_dump(counter: CounterFactory, driver: CudaDriver, tmp_path: Path, event: str, phase: str) -> None:
    job, met = counter("--mib", "4"), list[str]()
    with pytest.raises(BrokenInstall, match="the guard process"):
        gpucr.dump(job.pid, tmp_path / "s", on_progress=killing_the_guard(event, phase, met))
    assert met
    assert_as_found(job, driver)
    assert not (tmp_path / "s").exists()
    assert job.send("verify") == "ok"


@pytest.mark.criu
@pytest.mark.parametrize(
    ("persist", "phase", "event"),
    sample(list(itertools.product(["background", "sync"], ["dump", *_THAW, "save"], ["begin", "end"])), 12),
)
def test_dump_that_leaves_its_job_running(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, persist: Persist, event: str, phase: str
) -> None:
    """After CRIU's work the guard only learns what it need not undo any more."""
    job, met = counter("--mib", "4"), list[str]()
    listener = killing_the_guard(event, phase, met)
    try:
        gpucr.dump(job.pid, tmp_path / "s", leave_running=True, persist=persist, on_progress=listener)
    except BrokenInstall:
        assert (event, phase) == ("begin", "dump")
        assert not (tmp_path / "s").exists()
    else:
        assert gpucr.open_snapshot(tmp_path / "s").manifest.left_running
    assert met
    assert_as_found(job, driver)
    assert job.send("verify") == "ok"


@pytest.mark.criu
@pytest.mark.parametrize(("phase", "event"), sample(list(itertools.product(_RESTORE, ["begin", "end"])), 20))
def test_restore(counter: CounterFactory, driver: CudaDriver, tmp_path: Path, event: str, phase: str) -> None:
    job, met = counter("--mib", "4"), list[str]()
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    try:
        gpucr.restore(tmp_path / "s", on_progress=killing_the_guard(event, phase, met))
    except BrokenInstall:
        assert not job.alive
        gpucr.restore(tmp_path / "s")
    assert met
    assert_as_found(job, driver)
    assert job.send("verify") == "ok"
