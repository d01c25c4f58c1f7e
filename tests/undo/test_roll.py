"""A job that loses a process during an operation: never "as it was found", and the lost ones are named."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.criu.engine import Criu
from gpucr.errors import CriuError, JobDamaged
from gpucr.linux import oom, processes
from gpucr.model import Job, ProcessId
from gpucr.undo.events import Progress
from gpucr.undo.roll import Roll
from tests.counter import CounterFactory
from tests.linux.test_ends import TELLS_AFTERWARDS, started
from tests.storm import later


def _job_of(pid: int) -> Job:
    return Job((processes.describe(pid),), ())


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()
    child.stdin = None
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def test_nobody_is_missing() -> None:
    with started("os._exit(0)") as (child, _, _), Roll(_job_of(child.pid)) as roll:
        assert roll.call_after_undo() == ()


@pytest.mark.parametrize(("code", "is_loss"), [("os._exit(0)", False), ("os._exit(1)", True), ("os.abort()", True)])
def test_only_a_process_that_exited_successfully_is_no_loss(code: str, is_loss: bool) -> None:
    with started(code) as (child, process, _), Roll(_job_of(child.pid)) as roll:
        _end(child)
        child.wait()
        (ended,) = roll.call_after_undo()
        assert ended.process.id == process
        assert ended.is_loss is (is_loss or not TELLS_AFTERWARDS)


def test_without_descriptors_the_exit_status_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(24, "Too many open files")

    with started("os._exit(0)") as (child, _, _):
        monkeypatch.setattr(os, "pidfd_open", refuse)
        with Roll(_job_of(child.pid)) as roll:
            _end(child)
            child.wait()
            (ended,) = roll.call_after_undo()
            assert ended.sentence().endswith("ended, nobody can say how")
            assert ended.is_loss


# --- CRIU is killed in the middle ---


def _killing_criu(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    real = Criu.dump

    def dump(self: Criu, *arguments: Any, on_start: Callable[[Any], None], on_notify: Any, **others: Any) -> None:
        criu: list[int] = []

        def note(process: Any) -> None:
            criu.append(process.pid)
            on_start(process)

        def kill(name: str, pid: int) -> None:
            if name == hook:
                os.kill(criu[0], signal.SIGKILL)
            else:
                on_notify(name, pid)

        real(self, *arguments, on_start=note, on_notify=kill, **others)

    monkeypatch.setattr(Criu, "dump", dump)


@pytest.mark.criu
@pytest.mark.parametrize("hook", [later("pre-dump"), "query-ext-files", later("post-dump")])
def test_a_killed_criu(
    sim_only: None, counter: CounterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """Either every process is there and works, or the error names exactly those that are not."""
    job = counter("--fork", "2")
    before = set(job.processes())
    _killing_criu(monkeypatch, hook)
    with pytest.raises((CriuError, JobDamaged)) as failure:
        gpucr.dump(job.pid, tmp_path / "s")
    missing = before - {pid for pid in before if _goes_on(pid)}
    if isinstance(failure.value, JobDamaged):
        assert {int(lost.split()[1]) for lost in failure.value.failures} == missing
        return
    assert not missing
    monkeypatch.undo()
    assert job.ask() == 101
    assert job.send("verify") == "ok"
    assert not (tmp_path / "s").exists()


def _goes_on(pid: int) -> bool:
    with contextlib.suppress(gpucr.GpucrError):
        return processes.keeps_running(processes.describe(pid).id)
    return False


@pytest.mark.criu
def test_an_ended_process_does_not_block_the_others_device_memory(
    sim_only: None, counter: CounterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--fork", "2")
    children: list[int] = [pid for pid in job.processes() if pid != job.pid]

    def dump(*_: Any, **__: Any) -> None:
        os.kill(children[0], signal.SIGKILL)
        raise CriuError("CRIU could not dump the job: no space", phase="dump", code="GPUCR-NO-SPACE")

    monkeypatch.setattr(Criu, "dump", dump)
    with pytest.raises(JobDamaged) as failure:
        gpucr.dump(job.pid, tmp_path / "s")
    (lost,) = failure.value.failures
    assert lost.startswith(f"process {children[0]} (")
    assert job.ask() == 101
    assert job.send("verify") == "ok"


# --- what the kernel kills when memory runs out ---


@pytest.mark.criu
@pytest.mark.parametrize("is_allowed", [True, False])
def test_criu_is_spared_in_a_dump_or_a_warning_is_given_once(
    sim_only: None, counter: CounterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_allowed: bool
) -> None:
    job = counter()
    asked: list[int] = []
    started: list[int] = []
    real_dump = Criu.dump

    def dump(*arguments: Any, on_start: Callable[[ProcessId], None], **options: Any) -> None:
        def note(criu: ProcessId) -> None:
            started.append(criu.pid)
            on_start(criu)

        real_dump(*arguments, on_start=note, **options)

    def spare(pid: int) -> bool:
        asked.append(pid)
        return is_allowed

    monkeypatch.setattr(oom, "spare", spare)
    monkeypatch.setattr(Criu, "dump", dump)
    events: list[Progress] = []
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True, on_progress=events.append)
    assert len(started) == 1
    assert asked == started
    notes = [each for each in events if each.event == "note" and "CAP_SYS_RESOURCE" in each.description]
    assert len(notes) == (not is_allowed)


@pytest.mark.criu
def test_a_restored_job_is_not_spared_by_the_oom_killer(
    sim_only: None, counter: CounterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process inherits that from its parent: CRIU is not asked to be spared when it makes a job."""
    job = counter("--fork", "1")
    before = [_score(pid) for pid in job.processes()]
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    monkeypatch.setattr(oom, "spare", lambda pid: pytest.fail(f"process {pid} was to be spared"))
    gpucr.restore(tmp_path / "s")
    assert [_score(pid) for pid in job.processes()] == before


def _score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())
