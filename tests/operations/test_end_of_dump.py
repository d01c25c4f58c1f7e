"""CRIU fails after the commit: a complete snapshot is not called damaged, and vice versa."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import gpucr
from gpucr.criu.engine import Criu
from gpucr.errors import CriuError, JobDamaged
from gpucr.jobs import registered
from gpucr.jobs.record import JobRecord
from gpucr.linux import processes
from gpucr.operations import launch
from tests.counter import processes_in, wait_until

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("state_home")]

PROGRAM = """
import os, time
os.fork()
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture(params=[True, False], ids=["isolated", "not isolated"])
def job(request: pytest.FixtureRequest, folder: Path) -> JobRecord:
    """A job of two processes."""
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    record = launch.run_job(command, name="job", cwd=folder, isolate=request.param).record
    wait_until(lambda: record.log.read_text().count("ready") == 2, "both processes")
    return record


@pytest.fixture
def failing_criu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make CRIU fail after its answer; with ``leave_running`` it has killed nothing."""
    real = Criu.dump

    def fail(*, leave_running: bool, then: Callable[[], object] = lambda: None) -> None:
        def dump(self: Criu, pid: int, images_dir: Path, options: Any, **others: Any) -> None:
            real(self, pid, images_dir, replace(options, leave_running=leave_running), **others)
            then()
            raise CriuError("CRIU could not dump the job: it was killed", phase="dump")

        monkeypatch.setattr(Criu, "dump", dump)

    return fail


def _record() -> JobRecord:
    record = registered.registry().find("job").record
    assert record is not None
    return record


def test_criu_has_ended_the_job(
    job: JobRecord, failing_criu: Callable[..., None], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_criu(leave_running=False)
    gpucr.dump("job", tmp_path / "s")
    assert processes_in(folder) == []
    assert registered.registry().find("job").state.word == "dumped"
    monkeypatch.undo()
    os.environ["XDG_STATE_HOME"] = str(tmp_path / "state")
    gpucr.restore(tmp_path / "s")
    assert len(processes_in(folder)) == 2


def test_criu_has_killed_nothing(
    job: JobRecord, failing_criu: Callable[..., None], folder: Path, tmp_path: Path
) -> None:
    failing_criu(leave_running=True)
    with pytest.raises(CriuError, match="it was killed"):
        gpucr.dump("job", tmp_path / "s")
    assert len(processes_in(folder)) == 2
    assert not (tmp_path / "s").exists()
    assert (_record().snapshot, _record().dumped) == (None, False)


@pytest.mark.parametrize("job", [False], indirect=True, ids=["not isolated"])
def test_criu_has_killed_some_processes(
    job: JobRecord, failing_criu: Callable[..., None], folder: Path, tmp_path: Path
) -> None:
    (child,) = (pid for pid in processes_in(folder) if pid != job.pid)
    failing_criu(leave_running=True, then=lambda: os.kill(child, signal.SIGKILL))
    with pytest.raises(JobDamaged, match="1 of its processes are gone") as caught:
        gpucr.dump("job", tmp_path / "s")
    assert f"the snapshot {tmp_path / 's'} is complete: kill [{job.pid}], then restore it" in str(caught.value.hint)
    os.kill(job.pid, signal.SIGKILL)
    wait_until(lambda: processes_in(folder) == [], "the rest to end")
    gpucr.restore(tmp_path / "s")
    assert len(processes_in(folder)) == 2


@pytest.mark.parametrize("code", ["GPUCR-NO-SPACE", None])
def test_a_process_killed_meanwhile_is_reported_lost_after_any_failure(
    job: JobRecord, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str | None
) -> None:
    """It uses no CUDA, so no undo looks at it. The reason of the failure is told as well."""
    (child,) = (pid for pid in processes_in(folder) if pid != job.pid)
    name = Path(f"/proc/{child}/comm").read_text().strip()

    def dump(*_: Any, **__: Any) -> None:
        os.kill(child, signal.SIGKILL)
        raise CriuError("CRIU could not dump the job: no space", phase="dump", code=code)

    monkeypatch.setattr(Criu, "dump", dump)
    with pytest.raises(JobDamaged) as failure:
        gpucr.dump("job", tmp_path / "s")
    assert failure.value.exit_code == 10
    assert failure.value.failures == (f"process {child} ({name}) was ended by SIGKILL",)
    assert (f"process {child} ended while it was dumped" if code is None else "no space") in failure.value.message
    assert processes.is_alive(job.root)
