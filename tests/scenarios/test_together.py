"""Several gpucr at once for one user, each at its own job, in one registry, one store and one folder: none is in the
way of another.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gpucr
from gpucr.jobs.registered import registry
from gpucr.operations.end_job import end_processes
from gpucr.sim import build as simulator
from tests import command
from tests.conftest import FIXED_COST_MS
from tests.counter import wait_until
from tests.storm import IS_STORM

pytestmark = pytest.mark.criu

WORKERS = 8 if IS_STORM else 4
SECONDS = float(os.environ.get("GPUCR_STORM_SECONDS", "60" if IS_STORM else "3"))
_READY = re.compile(r"^ready pid=\d+ port=(\d+) ", re.MULTILINE)
_COMMAND_LIMIT_S = 300
_SHARED = (
    ("jobs", "--all"),
    ("ps",),
    ("ls", "STORE"),
    ("verify", "STORE"),
    ("prune", "STORE"),
    ("prune", "STORE", "--grace", "0s", "--repack"),
    ("doctor",),
)
"""What anybody may ask or tidy up at any time."""


class Worker:
    """Does to a job of its own all that a user may do, in any order that makes sense."""

    def __init__(self, number: int, folder: Path, store: Path, stop: threading.Event) -> None:
        self.name = f"job-{number}"
        self._dice = random.Random(number)  # noqa: S311 - the same storm each time
        self._folder, self._store, self._stop = folder, store, stop
        self._has_cuda = number % 2 == 0
        self._is_isolated = number % 4 < 2
        self._has_interposer = self._has_cuda and number % 8 < 4
        self._answer, self._snapshots = 100, 0
        self.said: list[str] = []

    def work(self, end_s: float) -> int:
        """Until then, or somebody has failed. Returns how many commands were run."""
        try:
            self._start()
            while time.monotonic() < end_s and not self._stop.is_set():
                self._dice.choice([self._suspend, self._keep, self._move_away, self._again, self._look, self._look])()
                self._ask()
        except BaseException:
            self._stop.set()
            raise
        return len(self.said)

    def _gpucr(self, *words: object) -> str:
        line = " ".join(map(str, words))
        self.said.append(line)
        done = subprocess.run(
            command.command(*words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: gpucr {line}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def _start(self) -> None:
        counter = [str(simulator.build() / "counter"), "--port", "0", "--mib", "2", "--by-file"]
        work = self._folder / self.name
        work.mkdir(exist_ok=True)
        how = ["--isolate", "--network", "host"] if self._is_isolated else ["--no-isolate"]
        how.append("--interpose" if self._has_interposer else "--no-interpose")
        program = [*counter, *([] if self._has_cuda else ["--no-cuda"])]
        self._gpucr("run", "--name", self.name, *how, "--cwd", work, "--", *program)
        self._answer = 100
        log = Path(self._log())
        wait_until(lambda: _READY.search(log.read_text()) is not None, f"{self.name} to be ready")

    def _log(self) -> Path:
        record = registry().find(self.name).record
        assert record is not None
        return record.log

    def _ask(self) -> None:
        work, self._answer = self._folder / self.name, self._answer + 1
        port = int((_READY.findall(self._log().read_text()) or ["0"])[-1])
        answer = work / f"{port}.answer"
        answer.unlink(missing_ok=True)
        (work / "unasked").write_text("hello")
        (work / "unasked").rename(work / f"{port}.ask")
        wait_until(answer.exists, f"the answer of {self.name}")
        assert answer.read_text().strip() == str(self._answer), self.said[-5:]

    def _suspend(self) -> None:
        if self._has_cuda:
            self._gpucr("suspend", self.name)
            self._gpucr("resume", self.name)

    def _place(self) -> tuple[str, bool]:
        self._snapshots += 1
        if self._dice.random() < 0.6:
            return f"{self._store}#{self.name}.{self._snapshots}", True
        return str(self._folder / f"{self.name}.{self._snapshots}"), False

    def _keep(self) -> None:
        place, is_in_store = self._place()
        self._gpucr("dump", self.name, "--to", place, "--leave-running")
        self._gpucr("inspect", place)
        self._remove(place, is_in_store=is_in_store)

    def _move_away(self) -> None:
        if not self._is_isolated:  # others may get its pids meanwhile
            return
        place, is_in_store = self._place()
        self._gpucr("dump", self.name, "--to", place)
        self._gpucr("restore", place)
        self._remove(place, is_in_store=is_in_store)

    def _remove(self, place: str, *, is_in_store: bool) -> None:
        if is_in_store:
            self._gpucr("rm", place)
        else:
            shutil.rmtree(place)

    def _again(self) -> None:
        self._gpucr("stop", self.name, "--grace", "5s")
        self._gpucr("jobs", "--forget", self.name)
        self._start()

    def _look(self) -> None:
        words = self._dice.choice(_SHARED)
        self._gpucr(*(str(self._store) if word == "STORE" else word for word in words))


@pytest.fixture
def place(sim_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with two GPUs, a registry and a store of its own."""
    variables = simulator.environment(
        "2x16GiB", state_dir=tmp_path / "gpus", machine=tmp_path.name, fixed_cost_ms=FIXED_COST_MS
    )
    for variable, value in {**variables, "XDG_STATE_HOME": str(tmp_path / "state")}.items():
        monkeypatch.setenv(variable, value)
    gpucr.init_store(tmp_path / "store")
    yield tmp_path
    for job in registry().jobs():
        if job.record is not None:
            with contextlib.suppress(OSError):
                end_processes(job.record)


@pytest.mark.timeout(SECONDS + 600)
def test_none_is_in_the_way_of_another(place: Path) -> None:
    stop = threading.Event()
    workers = [Worker(number, place, place / "store", stop) for number in range(WORKERS)]
    end_s = time.monotonic() + SECONDS
    with ThreadPoolExecutor(WORKERS) as threads:
        commands = [each.result() for each in [threads.submit(worker.work, end_s) for worker in workers]]
    assert all(commands)
