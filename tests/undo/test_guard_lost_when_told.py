"""The guard dies before it is told something for the nth time: in every operation, for each n.

Between two such moments an operation does not need the guard. So these are all the moments that matter.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import BrokenInstall
from gpucr.interposer.library import installed, preload_path
from gpucr.model import CudaState
from gpucr.undo.guard import Guard
from tests.counter import Counter, CounterFactory
from tests.network.test_blocked_connections import Talking
from tests.own_network import own_network
from tests.scenarios.test_killed import is_claimed, is_unharmed
from tests.stepping import StartJob
from tests.storm import IS_STORM, later

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED

_EVERY = 1 if IS_STORM else 6
SOURCES = Path(gpucr.__file__).parent


def suspend(job: Counter, to: Path) -> None:
    gpucr.suspend(job.pid)


def resume(job: Counter, to: Path) -> None:
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid)


def move(job: Counter, to: Path) -> None:
    gpucr.move(job.pid, gpu="1")
    gpucr.move(job.pid, gpu="0")


def dump(job: Counter, to: Path) -> None:
    gpucr.dump(job.pid, to)


def dump_and_keep_running(job: Counter, to: Path) -> None:
    gpucr.dump(job.pid, to, leave_running=True)


def freeze_and_thaw(job: Counter, to: Path) -> None:
    with gpucr.freeze(job.pid) as frozen:
        frozen.save(to)


def freeze_and_end(job: Counter, to: Path) -> None:
    with gpucr.freeze(job.pid) as frozen:
        frozen.save(to)
        frozen.end()


def restore(job: Counter, to: Path) -> None:
    gpucr.dump(job.pid, to)
    job.reap()
    gpucr.restore(to)


class Telling:
    """Kills the guard before the nth message to it, counted over all guards of an operation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left = -1
        real = Guard._ask

        def ask(guard: Guard, kind: str, *arguments: object, **options: object) -> str:
            self._left -= 1
            if self._left == 0:
                os.kill(guard.pid, signal.SIGKILL)
                guard._process.wait()
            return real(guard, kind, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(Guard, "_ask", ask)

    def ends_before(self, number: int) -> None:
        self._left = number

    @property
    def was_reached(self) -> bool:
        return self._left <= 0


@pytest.fixture(params=["interposed", later("plain")])
def job(request: pytest.FixtureRequest, counter: CounterFactory, sim_only: None, tmp_path: Path) -> Counter:
    variables = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")}
    return counter("--mib", "4", "--fork", "1", env=variables if request.param == "interposed" else None)


@pytest.mark.criu
@pytest.mark.parametrize(
    "operation",
    [suspend, resume, move, dump, dump_and_keep_running, freeze_and_thaw, freeze_and_end, restore],
    ids=lambda each: each.__name__,
)
def test_the_job_is_as_it_was_found_or_the_operation_succeeds(
    operation: Callable[[Counter, Path], None],
    job: Counter,
    driver: CudaDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pids, telling, expected = job.processes(), Telling(monkeypatch), 101
    for number in itertools.count(1, _EVERY):
        to = tmp_path / f"s{number}"
        telling.ends_before(number)
        with contextlib.suppress(BrokenInstall):  # JobDamaged would say that the undo had failed
            operation(job, to)
        if not telling.was_reached:
            break
        _bring_back(job, driver, to)
        assert job.processes() == pids
        assert {driver.state(pid) for pid in pids} == {RUNNING}
        assert is_unharmed(job)
        assert not is_claimed(pids)
        assert job.ask() == expected
        assert job.send("verify") == "ok"
        expected += 1
    assert number > _EVERY, "the guard was told something"


@pytest.mark.criu
@pytest.mark.parametrize("operation", [dump, dump_and_keep_running, freeze_and_thaw, freeze_and_end])
def test_connections_too(
    operation: Callable[[Any, Path], None], start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job without CUDA, whose packets are blocked."""
    telling = Telling(monkeypatch)
    with own_network():
        talking = Talking(start)
        for number in itertools.count(1, _EVERY // 2 or 1):
            to = tmp_path / f"s{number}"
            telling.ends_before(number)
            with contextlib.suppress(BrokenInstall):
                operation(talking.job, to)
            if not telling.was_reached:
                break
            if not talking.job.pids():
                assert (to / "manifest.json").exists()
                assert talking.peer.recv(1) == b"", "the other end has been told"
                talking.peer.close()
                talking = Talking(start)
            talking.assert_unharmed()
            talking.assert_nothing_is_blocked()
        talking.peer.close()
    assert number > _EVERY, "the guard was told something"


def _bring_back(job: Counter, driver: CudaDriver, to: Path) -> None:
    """What has ended, or is suspended, must be so as a whole; then it comes back."""
    if not job.alive:
        job.reap()
        gpucr.restore(to)
    elif {driver.state(pid) for pid in job.processes()} == {CHECKPOINTED}:
        gpucr.resume(job.pid)
    else:
        assert to.exists() == (to / "manifest.json").exists(), "an unfinished folder stays"


def test_every_operation_names_its_protection() -> None:
    """Every operation on a job says whose `Protection` it has, which is told before the undo."""
    without = {"operations/stores.py"}  # no job
    running = {
        path.relative_to(SOURCES).as_posix(): text
        for path in sorted(SOURCES.rglob("*.py"))
        if "running.run(" in (text := path.read_text())
    }
    named = {name for name, text in running.items() if "taken_job(running, " in text or "running.works_on(" in text}
    assert len(named) > 5
    assert running.keys() - named == without
