"""``cancel=``: another thread ends an operation, which is undone; and signals do the same."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import gpucr
from gpucr.criu import engine
from gpucr.driver.cuda import CudaDriver
from gpucr.model import CudaState, ProcessId
from gpucr.operations import dump_steps
from tests.counter import CounterFactory
from tests.storm import later

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED
REASON = "the queue wants the GPU"


def elsewhere(work: Callable[[], object]) -> None:
    """Do it in another thread, and wait for that."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def cancelling(cancel: gpucr.Cancellation, event: str, phase: str) -> gpucr.OnProgress:
    def listen(progress: gpucr.Progress) -> None:
        if (progress.event, progress.phase) == (event, phase):
            elsewhere(lambda: cancel.cancel(REASON))

    return listen


@pytest.mark.parametrize(("event", "phase"), [("begin", "lock"), ("end", "lock"), ("end", "checkpoint")])
def test_a_suspend_is_undone(counter: CounterFactory, driver: CudaDriver, event: str, phase: str) -> None:
    job, cancel = counter("--mib", "1"), gpucr.Cancellation()
    with pytest.raises(gpucr.Interrupted, match=f"^{REASON}; the job is as it was found$") as raised:
        gpucr.suspend(job.pid, cancel=cancel, on_progress=cancelling(cancel, event, phase))
    assert raised.value.code == "GPUCR-INTERRUPTED"
    assert driver.state(job.pid) is RUNNING
    assert job.send("verify") == "ok"


def test_a_resume_is_undone(counter: CounterFactory, driver: CudaDriver) -> None:
    job, cancel = counter("--mib", "1"), gpucr.Cancellation()
    gpucr.suspend(job.pid)
    with pytest.raises(gpucr.Interrupted, match=REASON):
        gpucr.resume(job.pid, cancel=cancel, on_progress=cancelling(cancel, "end", "restore"))
    assert driver.state(job.pid) is CHECKPOINTED
    gpucr.resume(job.pid)
    assert job.send("verify") == "ok"


def test_an_operation_in_another_thread(counter: CounterFactory, driver: CudaDriver) -> None:
    """Where no signal reaches it."""
    job, cancel = counter("--mib", "1"), gpucr.Cancellation()
    raised: list[BaseException] = []

    def suspend() -> None:
        try:
            gpucr.suspend(job.pid, cancel=cancel, on_progress=cancelling(cancel, "begin", "checkpoint"))
        except gpucr.Interrupted as error:
            raised.append(error)

    elsewhere(suspend)
    assert [str(error).startswith(REASON) for error in raised] == [True]
    assert driver.state(job.pid) is RUNNING


def test_one_cancellation_ends_all_later_operations(counter: CounterFactory, driver: CudaDriver) -> None:
    job, cancel = counter("--mib", "1"), gpucr.Cancellation()
    gpucr.suspend(job.pid, cancel=cancel)
    gpucr.resume(job.pid, cancel=cancel)
    cancel.cancel()
    cancel.cancel("again")
    with pytest.raises(gpucr.Interrupted, match=r"^cancelled; the job is as it was found$"):
        gpucr.suspend(job.pid, cancel=cancel)
    assert driver.state(job.pid) is RUNNING


@pytest.mark.criu
@pytest.mark.parametrize("phase", ["allocate", "checkpoint", "detach", "stop"])
def test_a_dump_is_undone(counter: CounterFactory, driver: CudaDriver, tmp_path: Path, phase: str) -> None:
    job, cancel = counter("--mib", "1"), gpucr.Cancellation()
    with pytest.raises(gpucr.Interrupted, match=REASON):
        gpucr.dump(job.pid, tmp_path / "s", cancel=cancel, on_progress=cancelling(cancel, "end", phase))
    assert driver.state(job.pid) is RUNNING
    assert not (tmp_path / "s").exists()
    assert job.send("verify") == "ok"


@pytest.mark.criu
def test_criu_is_interrupted(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU is stopped until it is asked to end, so only the cancellation can be the cause."""
    job, cancel, criu = counter("--mib", "1"), gpucr.Cancellation(), list[int]()
    expect, tell = dump_steps.expect_criu, engine._Run._ask_to_end

    def stopped(context: dump_steps.JobDump, process: ProcessId) -> None:
        expect(context, process)
        criu.append(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        threading.Thread(target=cancel.cancel, args=(REASON,)).start()

    def told(self: engine._Run) -> None:
        tell(self)
        os.kill(criu[0], signal.SIGCONT)

    monkeypatch.setattr(dump_steps, "expect_criu", stopped)
    monkeypatch.setattr(engine._Run, "_ask_to_end", told)
    with pytest.raises(gpucr.Interrupted, match=REASON):
        gpucr.dump(job.pid, tmp_path / "s", cancel=cancel)
    assert driver.state(job.pid) is RUNNING
    assert not (tmp_path / "s").exists()
    assert job.send("verify") == "ok"


@pytest.mark.criu
@pytest.mark.parametrize(("event", "phase"), [later("begin", "verify"), ("end", "criu"), later("end", "restore")])
def test_a_cancelled_restore_ends_what_it_started(
    counter: CounterFactory, tmp_path: Path, event: str, phase: str
) -> None:
    job, cancel = counter("--mib", "1"), gpucr.Cancellation()
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    with pytest.raises(gpucr.Interrupted, match=REASON):
        gpucr.restore(tmp_path / "s", cancel=cancel, on_progress=cancelling(cancel, event, phase))
    assert not job.alive
    gpucr.restore(tmp_path / "s")
    assert job.send("verify") == "ok"


@pytest.mark.criu
def test_a_cancellation_after_the_commit_is_too_late(counter: CounterFactory, tmp_path: Path) -> None:
    job, cancel = counter("--mib", "1"), gpucr.Cancellation()
    report = gpucr.dump(job.pid, tmp_path / "s", cancel=cancel, on_progress=cancelling(cancel, "end", "dump"))
    assert cancel.is_cancelled
    assert not report.left_running
    job.reap()
    assert gpucr.open_snapshot(tmp_path / "s").manifest.processes


def _cancelled() -> gpucr.Cancellation:
    cancel = gpucr.Cancellation()
    cancel.cancel(REASON)
    return cancel


SHORT: dict[str, Callable[[Path, gpucr.Cancellation], object]] = {
    "init_store": lambda path, cancel: gpucr.init_store(path / "new", cancel=cancel),
    "verify_snapshots": lambda path, cancel: gpucr.verify_snapshots(path / "store", cancel=cancel),
    "remove_snapshot": lambda path, cancel: gpucr.remove_snapshot(f"{path}/store#a", cancel=cancel),
    "prune_store": lambda path, cancel: gpucr.prune_store(path / "store", cancel=cancel),
    "copy_snapshots": lambda path, cancel: gpucr.copy_snapshots(path / "store", path / "other", cancel=cancel),
    "store_keys": lambda path, cancel: gpucr.store_keys(path / "store", cancel=cancel),
    "run_job": lambda path, cancel: gpucr.run_job(["touch", str(path / "ran")], cancel=cancel),
    "forget_job": lambda path, cancel: gpucr.forget_job("none", cancel=cancel),
    "restore": lambda path, cancel: gpucr.restore(path / "none", cancel=cancel),
}


@pytest.mark.parametrize("name", SHORT)
def test_an_operation_cancelled_beforehand_changes_nothing(name: str, tmp_path: Path) -> None:
    for store in ("store", "other"):
        gpucr.init_store(tmp_path / store)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(gpucr.Interrupted, match=REASON):
        SHORT[name](tmp_path, _cancelled())
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
