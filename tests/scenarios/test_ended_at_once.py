"""A job that ends as soon as it runs again was restored or resumed successfully: it did its remaining work."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.criu.engine import Criu, OnNotify
from gpucr.gpu_state.steps import ReleaseThreads
from gpucr.jobs import registered
from gpucr.linux import processes
from gpucr.operations import launch
from gpucr.sim import build as simulator
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter
from tests import command
from tests.counter import wait_until
from tests.sandboxed import wait_ready
from tests.storm import later, sample

PROGRAM = """
import os, sys
print("started", flush=True)
while not os.path.exists("restored"):
    pass
print("the last work", flush=True)
os._exit(7)
"""

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("state_home")]


def dumped(folder: Path, to: Path, *, isolate: bool) -> int:
    """A job that ends with 7 as soon as it is restored. Returns its pid."""
    command_line = [sys.executable, "-I", "-S", "-c", PROGRAM]
    record = launch.run_job(command_line, name="job", cwd=folder, isolate=isolate).record
    wait_until(lambda: record.log.stat().st_size > 0, "the job to start")
    gpucr.dump("job", to)
    (folder / "restored").touch()
    return record.pid


def assert_ended_with(code: int) -> None:
    wait_until(lambda: registered.registry().find("job").state.word == "ended", "its end to be known")
    assert registered.registry().find("job").state.exit_code == code


def wait_for_its_end(pid: int) -> None:
    wait_until(lambda: processes.read_stat(pid) is None, "the job's end, and its keeper to collect it")


@pytest.mark.parametrize("isolate", [later(False), True])
def test_the_command_reports_the_restore(folder: Path, tmp_path: Path, isolate: bool) -> None:
    dumped(folder, tmp_path / "s", isolate=isolate)
    done = command.run("restore", tmp_path / "s")
    assert (done.returncode, done.stderr.count("error:")) == (0, 0), done.stderr
    assert_ended_with(7)
    record = registered.registry().find("job").record
    assert record is not None
    assert record.log.read_text() == "started\nthe last work\n"


@pytest.mark.parametrize("isolate", [False, later(True)])
def test_a_job_ends_before_criu_finishes(
    folder: Path, tmp_path: Path, isolate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped(folder, tmp_path / "s", isolate=isolate)
    real = Criu.restore

    def restore(self: Criu, *arguments: Any, **options: Any) -> int:
        pid = real(self, *arguments, **options)
        wait_for_its_end(pid)
        return pid

    monkeypatch.setattr(Criu, "restore", restore)
    report = gpucr.restore(tmp_path / "s")
    assert (report.name, report.processes) == ("job", 1)
    assert_ended_with(7)


@pytest.mark.parametrize(
    ("what", "isolate"), sample([("deadline", False), ("deadline", True), ("signal", False), ("signal", True)], 3)
)
def test_neither_deadline_nor_signal_ends_a_restored_job(
    folder: Path, tmp_path: Path, isolate: bool, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped(folder, tmp_path / "s", isolate=isolate)
    real = Criu.restore

    def restore(self: Criu, *arguments: Any, deadline: float, on_notify: OnNotify, **options: Any) -> int:
        def notice(hook: str, pid: int) -> None:
            on_notify(hook, pid)
            if hook == "post-resume":
                if what == "signal":
                    signal.raise_signal(signal.SIGINT)
                wait_until(lambda: what == "signal" or time.monotonic() > deadline, "the deadline")

        return real(self, *arguments, deadline=deadline, on_notify=notice, **options)

    monkeypatch.setattr(Criu, "restore", restore)
    gpucr.restore(tmp_path / "s", timeout_s=5)
    assert_ended_with(7)


@pytest.mark.parametrize("isolate", [later(False), True])
def test_a_cuda_job_ends_before_its_keeper_adopts_it(
    folder: Path, tmp_path: Path, isolate: bool, sim_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = [str(simulator.build() / "counter"), "--port", "0", "--mib", "2"]
    record = launch.run_job(program, name="job", cwd=folder, isolate=isolate).record
    wait_ready(record.log)
    gpucr.dump("job", tmp_path / "s")
    real = ReleaseThreads.run

    def run(self: ReleaseThreads, interrupts: Interrupts, meter: Meter) -> int:
        done = real(self, interrupts, meter)
        (restored,) = [pid for pid in processes.all_pids() if _runs_in(pid, folder)]
        os.kill(restored, signal.SIGTERM)
        wait_for_its_end(restored)
        return done

    monkeypatch.setattr(ReleaseThreads, "run", run)
    assert gpucr.restore(tmp_path / "s").name == "job"
    assert_ended_with(0)


def _runs_in(pid: int, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").readlink() == folder
    except OSError:
        return False
