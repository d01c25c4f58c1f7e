"""While the target's restore thread is stopped no call returns but the one for its id; other threads do not matter."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.linux import cgroups, processes
from gpucr.linux.ptrace import HeldThreads, TracedThread
from tests.conftest import skip_or_fail
from tests.counter import CounterFactory, wait_until
from tests.sim.libcuda import CHECKPOINTED, LOCKED, RUNNING, Libcuda

UNANSWERED_S = 0.2
CALLS: dict[str, tuple[Callable[[Libcuda, int], object], object, int]] = {
    "state": (lambda libcuda, pid: libcuda.state(pid), (0, RUNNING), RUNNING),
    "lock": (lambda libcuda, pid: libcuda.lock(pid), 0, LOCKED),
    "unlock": (lambda libcuda, pid: libcuda.act("unlock", pid), 401, RUNNING),
}


class Caller:
    """A call under way in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._results: list[object] = []
        self._thread = threading.Thread(target=lambda: self._results.append(call()), daemon=True)
        self._thread.start()

    def assert_waits(self) -> None:
        self._thread.join(UNANSWERED_S)
        assert self._thread.is_alive()

    def result(self) -> object:
        self._thread.join(30)
        return self._results[0]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _states(pid) == {"T"}, "every thread to stop")


def _states(pid: int) -> set[str]:
    stats = [processes.read_stat(tid) for tid in processes.threads(pid)]
    return {stat.status for stat in stats if stat is not None}


@pytest.fixture
def only_main_thread_runs() -> Iterator[Callable[[int], HeldThreads]]:
    held: list[HeldThreads] = []

    def hold(pid: int) -> HeldThreads:
        held.append(HeldThreads({pid: pid}))
        held[-1].hold()
        return held[-1]

    yield hold
    for threads in held:
        threads.release()


@pytest.mark.parametrize("name", CALLS)
def test_answered_when_a_stopped_target_continues(libcuda: Libcuda, counter: CounterFactory, name: str) -> None:
    call, answer, state = CALLS[name]
    program = counter()
    stop(program.pid)
    caller = Caller(lambda: call(libcuda, program.pid))
    caller.assert_waits()
    os.kill(program.pid, signal.SIGCONT)
    assert caller.result() == answer
    assert libcuda.state(program.pid) == (0, state)


@pytest.mark.parametrize("name", CALLS)
def test_answered_when_a_traced_restore_thread_continues(
    libcuda: Libcuda,
    counter: CounterFactory,
    only_main_thread_runs: Callable[[int], HeldThreads],
    name: str,
) -> None:
    call, answer, state = CALLS[name]
    program = counter()
    held = only_main_thread_runs(program.pid)
    caller = Caller(lambda: call(libcuda, program.pid))
    caller.assert_waits()
    held.release()
    assert caller.result() == answer
    assert libcuda.state(program.pid) == (0, state)


def test_the_restore_thread_id_of_a_stopped_target_is_returned(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter()
    told = libcuda.restore_tid(program.pid)
    stop(program.pid)
    assert libcuda.restore_tid(program.pid) == told
    os.kill(program.pid, signal.SIGCONT)
    assert libcuda.state(program.pid) == (0, RUNNING)


def test_the_restore_thread_id_is_returned_while_all_threads_are_traced(
    libcuda: Libcuda, counter: CounterFactory
) -> None:
    program = counter()
    told = libcuda.restore_tid(program.pid)
    held = [TracedThread.seize(tid) for tid in processes.threads(program.pid)]
    assert libcuda.restore_tid(program.pid) == told
    for thread in held:
        thread.detach()
    assert libcuda.state(program.pid) == (0, RUNNING)


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A cgroup of version 2 without processes; a visible skip if a test can make none."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    places = [line.split()[4] for line in lines if line.partition(" - ")[2].startswith("cgroup2 ")]
    folder = Path(places[0] if places else "/nowhere") / f"gpucr-test-frozen-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as e:
        skip_or_fail("root", f"no cgroup of version 2 can be made: {e}")
    yield folder
    (folder / "cgroup.kill").write_text("1")
    wait_until(lambda: "populated 0" in (folder / "cgroup.events").read_text(), "the cgroup to be empty")
    folder.rmdir()


def test_answered_when_a_frozen_target_is_thawed(libcuda: Libcuda, counter: CounterFactory, freezer: Path) -> None:
    program = counter()
    (freezer / "cgroup.procs").write_text(str(program.pid))
    (freezer / "cgroup.freeze").write_text("1")
    wait_until(lambda: "frozen 1" in (freezer / "cgroup.events").read_text(), "the cgroup to be frozen")
    assert cgroups.frozen_by(program.pid) == freezer
    (listed,) = [each for each in gpucr.list_cuda_processes() if each.process.pid == program.pid]
    assert (listed.state, listed.halt) == (None, "frozen")
    caller = Caller(lambda: libcuda.state(program.pid))
    caller.assert_waits()
    cgroups.thaw(freezer)
    assert cgroups.frozen_by(program.pid) is None
    assert caller.result() == (0, RUNNING)


def test_only_the_restore_thread_needs_to_run(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter("--mib", "4")
    _, tid = libcuda.restore_tid(program.pid)
    held = HeldThreads({program.pid: tid})
    held.hold()
    try:
        libcuda.suspend(program.pid)
        assert libcuda.state(program.pid) == (0, CHECKPOINTED)
        libcuda.resume(program.pid)
        assert libcuda.restore_tid(program.pid) == (0, tid)
    finally:
        held.release()
    assert (program.ask(), program.send("verify")) == (101, "ok")


def test_killing_a_stopped_target_ends_the_call(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter()
    stop(program.pid)
    asking, locking = Caller(lambda: libcuda.state(program.pid)[0]), Caller(lambda: libcuda.lock(program.pid))
    asking.assert_waits()
    locking.assert_waits()
    program.kill()
    assert locking.result() == 304
    assert asking.result() in (0, 304)  # between the signal and its effect the threads count as running again


def test_killing_a_target_with_held_threads_ends_the_call(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter(env={"GPUCR_SIM_FAULTS": "checkpoint=hang"})
    _, tid = libcuda.restore_tid(program.pid)
    held = HeldThreads({program.pid: tid})
    held.hold()
    try:
        assert libcuda.act("lock", program.pid) == 0
        caller = Caller(lambda: libcuda.act("checkpoint", program.pid))
        caller.assert_waits()
        os.kill(program.pid, signal.SIGKILL)
        # the held threads are zombies that nobody collects before the release
        assert caller.result() == 304
    finally:
        held.release()
