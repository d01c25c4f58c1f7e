"""``--timeout``: late operations are undone, and nothing slow starts while a job stands still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.gang.threads import GangThreads
from gpucr.gpu_state.driver_staging import DriverStaging
from gpucr.gpu_state.order import Order
from gpucr.gpu_state.staging import Capture
from gpucr.linux import ptrace
from gpucr.linux.ptrace import TracedThread
from gpucr.model import CudaState
from gpucr.undo.events import Progress
from gpucr.undo.steps import Meter
from tests.counter import CounterFactory

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED


def test_a_suspend_that_ends_after_the_deadline_is_undone(
    counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--mib", "1")
    real = CudaDriver.checkpoint

    def until_it_is_over(self: CudaDriver, pid: int) -> None:
        real(self, pid)
        over = time.monotonic() + 3  # the operation has begun before
        while time.monotonic() <= over:
            threading.Event().wait(0.01)

    monkeypatch.setattr(CudaDriver, "checkpoint", until_it_is_over)
    with pytest.raises(gpucr.DeadlineExceeded, match="before everything was done"):
        gpucr.suspend(job.pid, timeout_s=3)
    assert driver.state(job.pid) is RUNNING
    assert job.send("verify") == "ok"


def test_a_thread_that_cannot_be_stopped_is_waited_for_until_the_deadline(
    counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that hangs in the kernel looks like this: seized, but not stopping."""
    job = counter("--mib", "1")
    monkeypatch.setattr(TracedThread, "_look", lambda _: None)
    threads = GangThreads()
    with pytest.raises(gpucr.DeadlineExceeded, match="hangs in the kernel"):
        threads.hold({job.pid: driver.restore_thread_id(job.pid)}, time.monotonic() + 0.1)
    capture = Capture(job.pid, driver.restore_thread_id(job.pid), None, deadline=time.monotonic() + 0.1)
    capture._tracer.start()
    capture.wait_started()
    capture.finish()
    assert capture.reason is not None
    assert "did not stop" in capture.reason
    monkeypatch.undo()
    assert job.ask() == 101


def test_no_deadline_is_no_limit() -> None:
    assert ptrace.seconds_left(None) is None
    assert ptrace.seconds_left(time.monotonic() - 1) == 0.0


def test_if_one_capture_cannot_begin_all_end(
    counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--mib", "1", "--fork", "1")
    pids = job.processes()
    begun: list[Capture] = []
    real = Capture.begin

    def begin(self: Capture) -> None:
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(self)
        real(self)

    monkeypatch.setattr(Capture, "begin", begin)
    order = Order([DriverStaging(use_files=False)])
    tids = {pid: driver.restore_thread_id(pid) for pid in pids}
    with pytest.raises(RuntimeError), order.taken(tids, Meter("checkpoint")):
        pytest.fail("the block must not be entered")
    assert not begun[0]._tracer.is_alive()
    assert job.ask() == 101


def test_resuming_a_running_job_does_nothing_silently(counter: CounterFactory) -> None:
    job = counter("--mib", "1")
    events: list[Progress] = []
    report = gpucr.resume(job.pid, on_progress=events.append)
    assert (events, report.phases) == ([], ())
    assert [(each.found, each.now) for each in report.processes] == [(RUNNING, RUNNING)]


def _starts_of_nvml(monkeypatch: pytest.MonkeyPatch, phases: list[str]) -> list[str]:
    """The phases in which NVML is started again, with nobody else having it open."""
    pynvml = pytest.importorskip("pynvml")
    starts: list[str] = []
    users = 0
    init, shutdown = pynvml.nvmlInit, pynvml.nvmlShutdown

    def nvml_init() -> None:
        nonlocal users
        if users == 0:
            starts.append(phases[-1])
        init()
        users += 1

    def nvml_shutdown() -> None:
        nonlocal users
        users -= 1
        shutdown()

    monkeypatch.setattr(pynvml, "nvmlInit", nvml_init)
    monkeypatch.setattr(pynvml, "nvmlShutdown", nvml_shutdown)
    return starts


@pytest.mark.criu
def test_nvml_is_not_initialised_while_a_job_is_stopped(
    counter: CounterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--mib", "1", "--fork", "1")
    phases: list[str] = []
    starts = _starts_of_nvml(monkeypatch, phases)

    def listen(progress: Progress) -> None:
        phases.append(progress.phase)

    operations: list[Callable[[], object]] = [
        lambda: gpucr.suspend(job.pid, on_progress=listen),
        lambda: gpucr.resume(job.pid, on_progress=listen),
        lambda: gpucr.dump(job.pid, tmp_path / "s", leave_running=True, on_progress=listen),
        lambda: gpucr.dump(job.pid, tmp_path / "t", on_progress=listen),
        lambda: gpucr.restore(tmp_path / "t", on_progress=listen),
    ]
    for operation in operations:
        phases.append("between")
        operation()
        if phases[-1] == "dump":
            job.reap()
    assert set(starts) == {"between"}
