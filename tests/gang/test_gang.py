"""gpucr.gang over a driver that fails on request. The processes are real: identity and death are the kernel's."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from gpucr.driver.api import Driver, DriverCapabilities
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import (
    DeadlineExceeded,
    DriverError,
    GpucrError,
    IllegalState,
    JobChanged,
    LockTimeout,
    NotACudaProcess,
    ProcessNotFound,
    Unsupported,
)
from gpucr.gang import Gang, actions
from gpucr.gang import discovery as gangs
from gpucr.linux import processes
from gpucr.model import CudaState, GangMember, GpuMap
from tests.children import PTRACE_O_TRACEEXIT, Child, identity, sleeper, tracer_of
from tests.counter import CounterFactory, wait_until

RUNNING, LOCKED, CHECKPOINTED = CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED
ACTIONS = {
    "lock": (RUNNING, LOCKED),
    "checkpoint": (LOCKED, CHECKPOINTED),
    "restore": (CHECKPOINTED, LOCKED),
    "unlock": (LOCKED, RUNNING),
}
PATIENCE_S = 60.0

Hook = Callable[[], None]


class FakeDriver:
    """The driver's state machine. ``hooks[action, pid]`` runs once at the beginning of that call, and may raise."""

    def __init__(self, states: Mapping[int, CudaState]) -> None:
        self.states: dict[int, CudaState] = dict(states)
        self.hooks: dict[tuple[str, int], Hook] = {}
        self.calls: list[tuple[str, int]] = []
        self.lock_timeouts_ms: list[int] = []
        self.gpu_maps: dict[int, GpuMap | None] = {}

    def capabilities(self) -> DriverCapabilities:
        return DriverCapabilities(13000, gpu_map=True, custom_storage=False)

    def state(self, pid: int) -> CudaState | None:
        self._run_hook("state", pid)
        return self.states[pid]

    def restore_thread_id(self, pid: int) -> int:
        return pid

    def lock(self, pid: int, timeout_ms: int = 0) -> None:
        self.lock_timeouts_ms.append(timeout_ms)
        self._act("lock", pid)

    def checkpoint(self, pid: int) -> None:
        self._act("checkpoint", pid)

    def restore(self, pid: int, gpu_map: GpuMap | None = None) -> None:
        self.gpu_maps[pid] = gpu_map
        self._act("restore", pid)

    def unlock(self, pid: int) -> None:
        self._act("unlock", pid)

    def _act(self, action: str, pid: int) -> None:
        self.calls.append((action, pid))
        self._run_hook(action, pid)
        before, after = ACTIONS[action]
        if self.states[pid] is not before:
            raise IllegalState(f"{pid} is {self.states[pid].word}", pid=pid, action=action, result=401)
        self.states[pid] = after

    def _run_hook(self, action: str, pid: int) -> None:
        hook = self.hooks.pop((action, pid), None)
        if hook is not None:
            hook()


def failing(action: str, pid: int, error: GpucrError | None = None) -> Hook:
    def fail() -> None:
        raise error or DriverError(f"{action} of {pid} failed", pid=pid, action=action, result=999)

    return fail


def of_gang(driver: Driver, found: Mapping[int, CudaState], deadline: float | None = None) -> Gang:
    members = [GangMember(identity(pid), state) for pid, state in found.items()]
    return Gang(driver, members, deadline=deadline)


def do(gang: Gang, action: str) -> None:
    """One action, for a suspend (lock, checkpoint) or for a resume (restore, unlock)."""
    if action == "lock":
        gang.lock()
    elif action == "checkpoint":
        gang.checkpoint()
    elif action == "restore":
        gang.restore(down_to=lambda member: RUNNING)
    else:
        gang.unlock(down_to=lambda member: RUNNING)


@pytest.fixture(scope="module")
def three() -> Iterator[list[int]]:
    """The pids of three processes that live as long as this module's tests."""
    with sleeper() as a, sleeper() as b, sleeper() as c:
        yield [a.pid, b.pid, c.pid]


@pytest.fixture
def mortals() -> Iterator[list[Child]]:
    """Three processes, any of them for a test to kill."""
    with sleeper() as a, sleeper() as b, sleeper() as c:
        yield [a, b, c]


# --- the actions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_runs_in_all_processes_at_once(action: str, three: list[int]) -> None:
    before, after = ACTIONS[action]
    driver = FakeDriver(dict.fromkeys(three, before))
    all_there = threading.Barrier(3, timeout=PATIENCE_S)
    for pid in three:
        driver.hooks[action, pid] = lambda: (all_there.wait(), None)[1]
    do(of_gang(driver, driver.states), action)
    assert driver.states == dict.fromkeys(three, after)
    assert not all_there.broken


def test_suspend_and_resume_return_to_the_states_found(three: list[int]) -> None:
    found = dict(zip(three, (RUNNING, LOCKED, CHECKPOINTED), strict=True))
    driver = FakeDriver(found)
    gang = of_gang(driver, found)
    gang.lock()
    assert list(driver.states.values()) == [LOCKED, LOCKED, CHECKPOINTED]
    gang.checkpoint()
    assert list(driver.states.values()) == [CHECKPOINTED] * 3
    gang.restore(down_to=lambda member: member.found)
    assert list(driver.states.values()) == [LOCKED, LOCKED, CHECKPOINTED]
    gang.unlock(down_to=lambda member: member.found)
    assert driver.states == found
    assert driver.calls.count(("lock", three[0])) == 1
    assert ("lock", three[1]) not in driver.calls
    assert all(pid != three[2] for _, pid in driver.calls)


def test_each_member_gets_its_own_gpu_map(three: list[int]) -> None:
    driver = FakeDriver(dict.fromkeys(three, CHECKPOINTED))
    maps = {three[0]: GpuMap((("GPU-a", "GPU-b"),)), three[2]: GpuMap((("GPU-b", "GPU-a"),))}
    of_gang(driver, driver.states).restore(maps, down_to=lambda member: RUNNING)
    assert driver.gpu_maps == {three[0]: maps[three[0]], three[1]: None, three[2]: maps[three[2]]}


def test_members_that_join_later_do_not_replace_those_found_first(three: list[int]) -> None:
    driver = FakeDriver(dict.fromkeys(three, LOCKED))
    gang = of_gang(driver, {three[0]: RUNNING})
    gang.add([GangMember(identity(three[0]), LOCKED), GangMember(identity(three[1]), LOCKED)])
    assert [(member.pid, member.found) for member in gang.members] == [(three[0], RUNNING), (three[1], LOCKED)]


def test_a_reused_pid_is_never_acted_on(three: list[int]) -> None:
    driver = FakeDriver(dict.fromkeys(three, RUNNING))
    pid = three[0]
    old = GangMember(type(identity(pid))(pid, identity(pid).start_time_ticks - 2), RUNNING)
    gang = Gang(driver, [old])
    gang.lock()
    gang.return_to_found()
    assert gang.state(pid) is None
    assert driver.calls == []


# --- failures and the way back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ACTIONS)
def test_after_one_failure_all_return_to_their_initial_state(action: str, three: list[int]) -> None:
    steps = ("lock", "checkpoint") if action in ("lock", "checkpoint") else ("restore", "unlock")
    every = itertools.product((RUNNING, LOCKED, CHECKPOINTED), repeat=3)
    for found, victim in itertools.product(every, three):
        states = dict(zip(three, found, strict=True))
        driver = FakeDriver(states)
        gang = of_gang(driver, states)
        driver.hooks[action, victim] = failing(action, victim)
        raised = None
        try:
            for step in steps:
                do(gang, step)
        except DriverError as error:
            raised = error
        # The hook is used up exactly when the driver was asked, and then the error must have come out.
        assert (raised is not None) == ((action, victim) not in driver.hooks), (found, victim)
        assert raised is None or (raised.pid, raised.action) == (victim, action), (found, victim)
        driver.hooks.clear()
        gang.return_to_found()
        assert driver.states == states, (found, victim)


def test_a_failure_does_not_stop_the_others_midway(three: list[int]) -> None:
    driver = FakeDriver(dict.fromkeys(three, LOCKED))
    gang = of_gang(driver, driver.states)
    driver.hooks["checkpoint", three[0]] = failing("checkpoint", three[0])
    with pytest.raises(DriverError):
        gang.checkpoint()
    assert list(driver.states.values()) == [LOCKED, CHECKPOINTED, CHECKPOINTED]


@pytest.mark.parametrize("action", ["restore", "unlock"])
def test_an_undo_that_fails_does_not_stop_the_others(action: str, three: list[int]) -> None:
    driver = FakeDriver(dict.fromkeys(three, CHECKPOINTED))
    gang = of_gang(driver, dict.fromkeys(three, RUNNING))
    driver.hooks[action, three[1]] = failing(action, three[1])
    with pytest.raises(DriverError, match=f"{action} of {three[1]} failed"):
        gang.return_to_found()
    assert [driver.states[three[0]], driver.states[three[2]]] == [RUNNING, RUNNING]
    assert driver.states[three[1]] is ACTIONS[action][0]


def test_an_unreadable_state_does_not_stop_the_others(three: list[int]) -> None:
    driver = FakeDriver(dict.fromkeys(three, LOCKED))
    gang = of_gang(driver, dict.fromkeys(three, RUNNING))

    def fail_again() -> None:
        driver.hooks["state", three[0]] = fail_again
        raise DriverError("no answer", pid=three[0], action="state", result=999)

    driver.hooks["state", three[0]] = fail_again
    with pytest.raises(DriverError, match="no answer"):
        gang.return_to_found()
    assert [driver.states[pid] for pid in three] == [LOCKED, RUNNING, RUNNING]


def test_the_undo_of_a_resume_climbs_back(three: list[int]) -> None:
    found = dict(zip(three, (CHECKPOINTED, LOCKED, RUNNING), strict=True))
    driver = FakeDriver(dict.fromkeys(three, RUNNING))  # all were restored and unlocked
    of_gang(driver, found).return_to_found()
    assert driver.states == found
    assert ("lock", three[2]) not in driver.calls


def test_an_unknown_state_is_left_alone(three: list[int]) -> None:
    odd = CudaState(17)
    found = dict(zip(three, (odd, CudaState.FAILED, RUNNING), strict=True))
    driver = FakeDriver(found)
    gang = of_gang(driver, found)
    gang.lock()
    gang.checkpoint()
    gang.return_to_found()
    assert driver.states == found
    assert {pid for _, pid in driver.calls} == {three[2]}


# --- the job changes under our hands ---------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["lock", "checkpoint", "restore"])
def test_a_process_that_dies_during_an_action(action: str, mortals: list[Child]) -> None:
    before, _ = ACTIONS[action]
    dead, *others = (child.pid for child in mortals)
    driver = FakeDriver(dict.fromkeys([dead, *others], before))
    gang = of_gang(driver, driver.states)

    def die() -> None:
        mortals[0].make_zombie()
        raise DriverError("operating system error", pid=dead, action=action, result=304)

    driver.hooks[action, dead] = die
    with pytest.raises(JobChanged, match=f"process {dead} ended during the {action}") as caught:
        do(gang, action)
    assert caught.value.pids == (dead,)
    assert isinstance(caught.value.__cause__, DriverError)
    gang.return_to_found()
    assert [driver.states[pid] for pid in others] == [before] * 2


def test_a_job_that_ends_during_unlock_counts_as_unlocked(mortals: list[Child]) -> None:
    """The first one to run does its last work, ends, and takes the others with it."""
    first, second, third = (child.pid for child in mortals)
    driver = FakeDriver(dict.fromkeys([first, second, third], LOCKED))
    gang = of_gang(driver, driver.states)

    def die() -> None:
        mortals[1].make_zombie()
        raise DriverError("operating system error", pid=second, action="unlock", result=304)

    driver.hooks["unlock", second] = die
    gang.unlock(down_to=lambda member: RUNNING)
    assert (driver.states[first], gang.state(second), driver.states[third]) == (RUNNING, None, RUNNING)


def test_a_process_dies_between_two_queries(mortals: list[Child]) -> None:
    dead, *others = (child.pid for child in mortals)
    driver = FakeDriver(dict.fromkeys([dead, *others], RUNNING))
    gang = of_gang(driver, driver.states)

    def die() -> None:
        mortals[0].make_zombie()
        raise ProcessNotFound("there is no such process", pid=dead)

    driver.hooks["state", dead] = die
    gang.lock()
    assert [driver.states[pid] for pid in others] == [LOCKED, LOCKED]
    assert gang.state(dead) is None
    with pytest.raises(JobChanged, match=f"process {dead} ended during the checkpoint") as caught:
        gang.checkpoint()
    assert caught.value.pids == (dead,)
    assert ("checkpoint", dead) not in driver.calls
    gang.return_to_found()
    assert [driver.states[pid] for pid in others] == [RUNNING, RUNNING]


def test_a_process_dies_right_before_its_checkpoint(mortals: list[Child]) -> None:
    dead, *others = (child.pid for child in mortals)
    driver = FakeDriver(dict.fromkeys([dead, *others], LOCKED))

    def die() -> None:
        mortals[0].make_zombie()
        raise ProcessNotFound("there is no such process", pid=dead)

    driver.hooks["state", dead] = die
    with pytest.raises(JobChanged, match=f"process {dead} ended during the checkpoint"):
        of_gang(driver, driver.states).checkpoint()


@pytest.mark.parametrize("action", ACTIONS)
def test_another_tool_changes_a_state(action: str, three: list[int]) -> None:
    before, _ = ACTIONS[action]
    driver = FakeDriver(dict.fromkeys(three, before))
    elsewhere = RUNNING if before is not RUNNING else LOCKED
    driver.hooks[action, three[1]] = lambda: driver.states.update({three[1]: elsewhere})
    with pytest.raises(JobChanged, match=f"process {three[1]} left the state {before.word}") as caught:
        do(of_gang(driver, driver.states), action)
    assert caught.value.pids == (three[1],)
    assert "another tool" in (caught.value.hint or "")


def test_a_state_changed_by_another_tool_is_reported_if_it_cannot_be_undone(three: list[int]) -> None:
    driver = FakeDriver(dict.fromkeys(three, RUNNING))
    gang = of_gang(driver, driver.states)
    driver.states[three[0]] = CudaState.FAILED
    with pytest.raises(JobChanged, match=rf"not as found: {three[0]} \(failed, was running\)"):
        gang.return_to_found()


# --- time ------------------------------------------------------------------------------------------------------


def _wait_as_the_driver_does(driver: FakeDriver) -> None:
    threading.Event().wait(driver.lock_timeouts_ms[-1] / 1000)


@pytest.mark.parametrize("limit_s", [0.001, 0.0101, 0.0257])
def test_a_lock_pending_until_the_deadline(limit_s: float, three: list[int]) -> None:
    pid = three[0]
    driver = FakeDriver({pid: RUNNING})
    gang = of_gang(driver, driver.states, time.monotonic() + limit_s)

    def stay_pending() -> None:
        _wait_as_the_driver_does(driver)
        raise LockTimeout("not ready", pid=pid, action="lock", result=600)

    driver.hooks["lock", pid] = stay_pending
    with pytest.raises(DeadlineExceeded):
        gang.lock()
    assert driver.states == {pid: RUNNING}


def test_a_lock_that_times_out_without_a_deadline(three: list[int]) -> None:
    driver = FakeDriver({three[0]: RUNNING})
    error = LockTimeout("not ready", pid=three[0], action="lock", result=600)
    driver.hooks["lock", three[0]] = failing("lock", three[0], error)
    with pytest.raises(LockTimeout) as caught:
        of_gang(driver, driver.states).lock()
    assert caught.value is error
    assert 25_000 < driver.lock_timeouts_ms[0] <= 30_001, "30 s, less what passed until the call, rounded up"


def test_a_lock_may_take_up_to_the_users_timeout(three: list[int]) -> None:
    driver = FakeDriver({three[0]: RUNNING})
    of_gang(driver, driver.states, time.monotonic() + 500).lock()
    assert 400_000 < driver.lock_timeouts_ms[0] <= 500_000


@pytest.mark.parametrize("limit_s", [1e9, float("inf")])
def test_a_deadline_longer_than_the_driver_accepts(limit_s: float, three: list[int]) -> None:
    driver = FakeDriver({three[0]: RUNNING})
    of_gang(driver, driver.states, time.monotonic() + limit_s).lock()
    assert driver.lock_timeouts_ms == [2**32 - 1]


def test_no_lock_starts_after_the_deadline(three: list[int]) -> None:
    driver = FakeDriver(dict.fromkeys(three, RUNNING))
    with pytest.raises(DeadlineExceeded):
        of_gang(driver, driver.states, time.monotonic() - 1).lock()
    assert driver.calls == []


def test_a_call_that_never_returns_is_reported_and_the_others_are_undone(
    three: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "STUCK_AFTER_S", 0.5)
    driver = FakeDriver(dict.fromkeys(three, LOCKED))
    gang = of_gang(driver, dict.fromkeys(three, RUNNING), time.monotonic())
    freed = threading.Event()
    driver.hooks["checkpoint", three[1]] = lambda: (freed.wait(PATIENCE_S), None)[1]
    try:
        with pytest.raises(DeadlineExceeded, match=f"has not finished the checkpoint of process {three[1]}"):
            gang.checkpoint()
        with pytest.raises(JobChanged, match="still works on its checkpoint, was running") as caught:
            gang.return_to_found()
        assert caught.value.pids == (three[1],)
        assert [driver.states[three[0]], driver.states[three[2]]] == [RUNNING, RUNNING]
    finally:
        freed.set()
        _wait_for_threads(f"checkpoint-{three[1]}")


def test_a_state_query_that_hangs_does_not_block_the_others(three: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "STUCK_AFTER_S", 0.5)
    driver = FakeDriver(dict.fromkeys(three, LOCKED))
    gang = of_gang(driver, dict.fromkeys(three, RUNNING), time.monotonic())
    freed = threading.Event()
    driver.hooks["state", three[1]] = lambda: (freed.wait(PATIENCE_S), None)[1]
    try:
        with pytest.raises(GpucrError, match=str(three[1])):
            gang.return_to_found()
        assert [driver.states[three[0]], driver.states[three[2]]] == [RUNNING, RUNNING]
    finally:
        freed.set()
        _wait_for_threads(f"restore-{three[1]}")


def test_an_undo_has_its_own_time_limit_after_the_deadline(three: list[int]) -> None:
    driver = FakeDriver(dict.fromkeys(three, CHECKPOINTED))
    of_gang(driver, dict.fromkeys(three, RUNNING), time.monotonic() - 10_000).return_to_found()
    assert driver.states == dict.fromkeys(three, RUNNING)


def _wait_for_threads(name: str) -> None:
    wait_until(lambda: all(thread.name != name for thread in threading.enumerate()), f"the thread {name} to end")


# --- discovery -------------------------------------------------------------------------------------------------


class Unasked(FakeDriver):
    """A driver that must not be queried."""

    def state(self, pid: int) -> CudaState | None:
        raise AssertionError(f"the driver was asked about process {pid}")


def test_a_process_without_libcuda_is_never_queried(process_without_cuda: int) -> None:
    assert gangs.discover(Unasked({}), processes.tree(process_without_cuda)) == ()


def test_discover_finds_states(counter: CounterFactory, driver: CudaDriver) -> None:
    running, locked = counter(), counter()
    driver.lock(locked.pid)
    try:
        tree = [processes.describe(pid) for pid in (running.pid, locked.pid)]
        found = {member.pid: member.found for member in gangs.discover(driver, tree)}
        assert found == {running.pid: RUNNING, locked.pid: LOCKED}
    finally:
        driver.unlock(locked.pid)


def test_a_stopped_process_is_refused_before_the_driver_is_called(counter: CounterFactory) -> None:
    program = counter()
    process = processes.describe(program.pid)
    os.kill(program.pid, signal.SIGSTOP)
    wait_until(lambda: getattr(processes.read_stat(program.pid), "status", "") == "T", "the counter to stop")
    with pytest.raises(Unsupported, match=f"process {program.pid} .* is stopped") as caught:
        gangs.discover(Unasked({}), [process])
    assert f"kill -CONT {program.pid}" in (caught.value.hint or "")


def test_a_process_that_ends_while_queried_is_omitted(counter: CounterFactory) -> None:
    program = counter()
    process = processes.describe(program.pid)
    dying = FakeDriver({program.pid: RUNNING})

    def die() -> None:
        program.kill()
        raise ProcessNotFound("there is no such process", pid=program.pid)

    dying.hooks["state", program.pid] = die
    assert gangs.discover(dying, [process]) == ()


def test_a_failing_query_about_a_live_process_is_an_error(counter: CounterFactory) -> None:
    program = counter()
    broken = FakeDriver({program.pid: RUNNING})
    broken.hooks["state", program.pid] = failing("state", program.pid)
    with pytest.raises(DriverError):
        gangs.discover(broken, [processes.describe(program.pid)])


# --- killed, and still there -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["wait_for_calls", "return_to_found", "lock"])
def test_a_killed_process_counts_as_ended(way: str) -> None:
    """Its device memory is freed before it is gone, and the driver no longer knows it."""
    with sleeper() as child, sleeper() as other:
        driver = FakeDriver({child.pid: LOCKED, other.pid: RUNNING})
        gang = of_gang(driver, {child.pid: RUNNING, other.pid: RUNNING})
        gone = NotACudaProcess(f"cannot unlock process {child.pid}: it has no CUDA context", pid=child.pid)
        driver.hooks = {(action, child.pid): failing(action, child.pid, gone) for action in ("state", "unlock", "lock")}
        with tracer_of(child.pid, PTRACE_O_TRACEEXIT):
            os.kill(child.pid, signal.SIGKILL)
            wait_until(lambda: processes.is_about_to_end(gang.members[0].id), "SIGKILL to be seen")
            getattr(gang, way)()
            assert processes.is_alive(gang.members[0].id)
        assert [pid for _, pid in driver.calls] in ([], [other.pid])
        assert driver.states[other.pid] is (LOCKED if way == "lock" else RUNNING)
