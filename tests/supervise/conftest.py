"""A supervisor whose job, clock and dice are the test's."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpucr.errors import GpucrError
from gpucr.jobs.sidecar import Journal, StoredLaunch
from gpucr.supervise.clock import Stop
from gpucr.supervise.folder import SupervisedFolder
from gpucr.supervise.job import Checkpoint, Look
from gpucr.supervise.settings import Supervision
from gpucr.supervise.supervisor import Supervisor
from gpucr.supervise.watch import HealthRun, Watch
from gpucr.undo.cancellation import Cancellation
from tests.lines import complete_lines

RUNNING = Look("running")
DONE = Look("done")
CRASHED = Look("failed", "signal 9", "signal")


class FakeClock:
    """Time passes only if somebody waits. ``plan``: what happens when, by the clock that only grows."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.wall = 1_800_000_000.0
        self.plan: list[tuple[float, Callable[[], None]]] = []

    def now_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        return self.wall

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds
        for when, happen in [each for each in self.plan if each[0] <= self.now - 1000.0]:
            self.plan.remove((when, happen))
            happen()
        assert self.now < 1000.0 + 100 * 86400, "the supervisor does not end"

    def wait(self, seconds: float, stop: Stop) -> None:
        if stop.wish is None:
            self.pass_by(max(seconds, 0.001))

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        self.plan.append((seconds, happen))


class FakeJob:
    """A job that does what the test says, and notes what was done with it."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.now = RUNNING
        self.is_locked = False
        self.done: list[str] = []
        self.stored: list[str] = []
        self.log: list[str] = []
        self.printed = 0
        self.uses = {"GPU-1"}
        self.checkpoint_errors: list[GpucrError | None] = []
        self.restore_errors: list[GpucrError | None] = []
        self.list_errors: list[GpucrError | None] = []
        self.at: list[float] = []
        self.on_restore: Callable[[], None] = lambda: None
        self.during_checkpoint: Callable[[], None] = lambda: None
        self.protected: list[set[str]] = []
        self.counted: list[Collection[str] | None] = []
        self.rehearsal_errors: list[GpucrError | None] = []
        self.bad_gpus: set[str] = set()

    def look(self) -> Look:
        return self.now

    def log_size(self) -> int:
        return self.printed

    def checkpoint(self, cancel: Cancellation, *, end: bool = False, timeout_s: float | None = None) -> Checkpoint:
        self.at.append(self.clock.now - 1000.0)
        self.clock.pass_by(5.0)
        self.during_checkpoint()
        _raise_next(self.checkpoint_errors)
        self.stored.append(f"s{len(self.stored) + 1}")
        self.done.append("last dump" if end else "checkpoint")
        if end:
            self.now = Look("dumped")
        return Checkpoint(self.stored[-1], downtime_s=2.0, seconds=5.0, size_bytes=100, written_bytes=10)

    def rehearse(self, snapshot: str, cancel: Cancellation) -> float:
        self.done.append(f"rehearse {snapshot}")
        self.clock.pass_by(3.0)
        _raise_next(self.rehearsal_errors)
        return 3.0

    def snapshots(self) -> Sequence[str]:
        _raise_next(self.list_errors)
        return list(reversed(self.stored))

    def resume(self) -> bool:
        was_locked, self.is_locked = self.is_locked, False
        self.done += ["resume"] if was_locked else []
        return was_locked

    def end(self) -> None:
        self.done.append("end")
        if self.now.word == "running":
            self.now = Look("failed", "signal 9", "signal")

    def restore(self, snapshot: str, cancel: Cancellation, *, bad_gpus: Collection[str]) -> Sequence[str]:
        self.bad_gpus = set(bad_gpus)
        _raise_next(self.restore_errors)
        self.done.append(f"restore {snapshot}")
        self.now = RUNNING
        self.on_restore()
        return ()

    def start_again(self, how: StoredLaunch) -> None:
        self.done.append("start again")
        self.now = RUNNING
        self.on_restore()

    def mark(self, text: str) -> None:
        self.log.append(text)

    def prune(self, protected: Collection[str], counted: Collection[str] | None) -> int:
        self.protected.append(set(protected))
        self.counted.append(counted)
        return 0

    def gpus(self) -> Collection[str]:
        return self.uses


def _raise_next(errors: list[GpucrError | None]) -> None:
    error = errors.pop(0) if errors else None
    if error is not None:
        raise error


class Bench:
    """Everything around one supervisor."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.job = FakeJob(self.clock)
        self.stop = Stop()
        self.failed_gpus: list[tuple[str, str]] = []
        self.start_health: Callable[[Sequence[str]], HealthRun] = _no_health
        self.is_busy = True
        self.folder = SupervisedFolder("train")

    def supervise(self, *, with_new_settings: bool = True, **settings: Any) -> str:
        """Run a supervisor to its end. Returns the phase."""
        chosen = Supervision(store="/store", **{"every_s": 600.0, **settings})
        if with_new_settings:
            self.folder.write_settings(chosen)
        journal = Journal(self.folder, wall_s=self.clock.wall_s)
        watch = Watch(
            self.job, chosen, self.clock,
            start_health=self.start_health, is_busy=lambda _: self.is_busy,
        )  # fmt: skip
        supervisor = Supervisor(
            self.job, chosen, journal, watch,
            clock=self.clock, random=lambda: 0.5, stop=self.stop, gpu_failures=self._gpu_failures,
        )  # fmt: skip
        return supervisor.run()

    def _gpu_failures(self) -> Sequence[tuple[str, str]]:
        found, self.failed_gpus = self.failed_gpus, []
        return found

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """What the event log has."""
        told = [json.loads(line) for line in complete_lines(self.folder.events_path)]
        return [event for event in told if not kinds or event["event"] in kinds]

    def ends(self, look: Look) -> Callable[[], None]:
        """For `FakeClock.after`: the job ends so."""

        def end() -> None:
            self.job.now = look

        return end


def _no_health(command: Sequence[str]) -> HealthRun:
    raise AssertionError(f"{command} was not to be run")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A supervisor with a private state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Bench()
