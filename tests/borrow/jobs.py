"""Jobs on simulated GPUs, and borrowers of these."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import gpucr
from gpucr.borrow import ledger
from gpucr.driver.gpus import gpu_processes, list_gpus
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import registry
from gpucr.operations.end_job import end_processes
from gpucr.sim import build as simulator
from tests import command
from tests.counter import DEADLINE_S, wait_until

_READY = re.compile(r"^ready pid=\d+ port=(\d+) ", re.MULTILINE)


def counter_command(devices: str = "0", mib: int = 4) -> list[str]:
    """The counter, as a job's command."""
    return [str(simulator.build() / "counter"), "--port", "0", "--mib", str(mib), "--devices", devices]


class SharedJob:
    """A counter of the registry."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        priority: int,
        devices: str,
        mib: int,
        faults: str | None,
        ends_with_caller: bool,
    ) -> None:
        self.name = name
        faults_set = {} if faults is None else {"GPUCR_SIM_FAULTS": faults}
        gpucr.run_job(
            counter_command(devices, mib),
            name=name,
            isolate=False,
            priority=priority,
            cwd=folder,
            environment={**os.environ, **faults_set},
            ends_with_caller=ends_with_caller,
        )
        self._port = 0
        wait_until(self._is_ready, f"{name} to become ready")

    def _is_ready(self) -> bool:
        found = _READY.search(self.record.log.read_text())
        self._port = int(found[1]) if found else 0
        return found is not None

    @property
    def record(self) -> JobRecord:
        """Its record now."""
        record = registry().find(self.name).record
        assert record is not None
        return record

    @property
    def state(self) -> str:
        """What `gpucr jobs` says."""
        return next(job.state.word for job in gpucr.list_jobs() if job.name == self.name)

    @property
    def is_lent(self) -> bool:
        """Whether a borrower has its GPUs."""
        return self.record.lent is not None

    def ask(self) -> int:
        """The incremented counter; the first answer is 101."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            made.settimeout(DEADLINE_S)
            made.connect(("127.0.0.1", self._port))
            made.send(b"hello")
            return int(made.recv(4096))

    def gpus(self) -> set[int]:
        """The indices of the GPUs that it has memory on."""
        numbers = {gpu.uuid: gpu.index for gpu in list_gpus()}
        return {numbers[use.gpu_uuid] for use in gpu_processes() if use.pid == self.record.pid}


class Machine:
    """Jobs and borrowers of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.borrowers: list[subprocess.Popen[str]] = []

    def job(
        self,
        name: str,
        *,
        priority: int = 0,
        devices: str = "0",
        mib: int = 4,
        faults: str | None = None,
        ends_with_caller: bool = False,
    ) -> SharedJob:
        """Start a job."""
        return SharedJob(
            self.folder,
            name,
            priority=priority,
            devices=devices,
            mib=mib,
            faults=faults,
            ends_with_caller=ends_with_caller,
        )

    def borrow(self, *words: object, gpu: str = "0", priority: int = 10) -> subprocess.Popen[str]:
        """Start `gpucr borrow`: options, ``--``, command."""
        started = command.start("borrow", "--gpu", gpu, "--priority", priority, "--no-isolate", *words)
        self.borrowers.append(started)
        return started

    def until(self, name: str) -> tuple[str, ...]:
        """A command that makes the file NAME-runs, and waits for the file NAME; then it ends with 7."""
        script = 'touch "$0-runs"; while [ ! -e "$0" ]; do sleep 0.01; done; exit 7'
        return ("--", "sh", "-c", script, str(self.folder / name))

    def runs(self, name: str) -> bool:
        """Whether such a command has begun."""
        return (self.folder / f"{name}-runs").exists()

    def wait_runs(self, name: str) -> None:
        """Wait until such a command has begun."""
        wait_until(lambda: self.runs(name), lambda: f"{name} to run: {self.talk()}")

    def let_go(self, name: str) -> None:
        """Let such a command end."""
        (self.folder / name).touch()

    def talk(self) -> str:
        """What borrowers that have ended have said, for a failure."""
        return "; ".join(each.communicate()[1] for each in self.borrowers if each.poll() is not None)

    def close(self) -> None:
        """End what still runs."""
        for each in self.borrowers:
            if each.poll() is None:
                each.kill()
            each.communicate()
        for listed in registry().jobs():
            if listed.record is not None:
                end_processes(listed.record)
        wait_until(lambda: not guards(), "the guards to end")


def guards() -> list[int]:
    """The pids of the guards of this test's borrowers."""
    mark = os.environ["XDG_STATE_HOME"].encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_guard = entry.name.isdigit() and b"gpucr.borrow.guard_process" in (entry / "cmdline").read_bytes()
            if is_guard and mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def kill_guards() -> None:
    """SIGKILL."""
    for pid in guards():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not guards(), "the guards to end")


def phase(name: str = "borrow-1") -> str | None:
    """How far a borrower is; None: it is gone from the ledger."""
    return next((each.phase for each in ledger.borrowings() if each.name == name), None)


def waits() -> dict[str, tuple[str, ...]]:
    """Who waits for whom."""
    found = gpucr.list_borrowed()
    return {each.name: each.waits_for for each in found.borrowers} | {each.name: each.waits_for for each in found.lent}
