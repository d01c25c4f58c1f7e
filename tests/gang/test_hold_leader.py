"""The algorithm alone, over ranks that are numbers: how many collectives each has submitted."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar

import pytest

from gpucr.driver.api import DriverCapabilities
from gpucr.errors import DriverError, IllegalState, LockTimeout
from gpucr.gang import hold_leader
from gpucr.gang.hold_leader import LeaderHold, LocksFailed
from gpucr.gang.holdable import DriverLock
from gpucr.model import CudaState, GpuMap
from tests.counter import wait_until
from tests.linux.test_priority import nice, require_privilege

RUNNING, LOCKED = CudaState.RUNNING, CudaState.LOCKED
END_S = 30.0


class Collectives:
    """Ranks that wait for each other, as a driver sees them.

    A rank submits ``pace`` collectives whenever it is let go, and none while it is locked or its lock is pending. Its
    lock is granted as soon as every rank has submitted as many as it has. When all run, all get to the same number.
    """

    def __init__(self, submitted: Mapping[int, int], pace: Mapping[int, int]) -> None:
        self.submitted = dict(submitted)
        self.pace = pace
        self.states = dict.fromkeys(submitted, RUNNING)
        self.pending: set[int] = set()
        self.calls: list[tuple[str, int]] = []
        self.timeouts_ms: dict[int, list[int]] = {pid: [] for pid in submitted}
        self.hooks: dict[tuple[str, int], Callable[[], None]] = {}
        self.changed = threading.Condition()

    def lock(self, pid: int, timeout_ms: int = 0) -> None:
        self._begin("lock", pid)
        with self.changed:
            self.timeouts_ms[pid].append(timeout_ms)
            if self.states[pid] is not RUNNING:
                raise IllegalState("not running", pid=pid, action="lock", result=401)
            self.pending.add(pid)
            granted = self.changed.wait_for(
                lambda: self.submitted[pid] <= min(self.submitted.values()), timeout_ms / 1000
            )
            self.pending.discard(pid)
            if not granted:
                self._let_go(pid)
                raise LockTimeout("not ready", pid=pid, action="lock", result=600)
            self.states[pid] = LOCKED

    def unlock(self, pid: int) -> None:
        self._begin("unlock", pid)
        with self.changed:
            if self.states[pid] is not LOCKED:
                raise IllegalState("not locked", pid=pid, action="unlock", result=401)
            self.states[pid] = RUNNING
            self._let_go(pid)

    def _begin(self, action: str, pid: int) -> None:
        with self.changed:
            self.calls.append((action, pid))
            hook = self.hooks.pop((action, pid), None)
        if hook is not None:
            hook()

    def _let_go(self, pid: int) -> None:
        self.submitted[pid] += self.pace[pid]
        if not self.pending and all(state is RUNNING for state in self.states.values()):
            self.submitted |= dict.fromkeys(self.states, max(self.submitted.values()))
        self.changed.notify_all()

    def finish(self, pid: int) -> None:
        """Nobody waits for this rank any more."""
        with self.changed:
            self.submitted.pop(pid, None)
            self.changed.notify_all()

    def capabilities(self) -> DriverCapabilities:
        return DriverCapabilities(13000, gpu_map=True, custom_storage=False)

    def state(self, pid: int) -> CudaState | None:
        return self.states[pid]

    def restore_thread_id(self, pid: int) -> int:
        return pid

    def checkpoint(self, pid: int) -> None:
        raise AssertionError("nobody asked for it")

    def restore(self, pid: int, gpu_map: GpuMap | None = None) -> None:
        raise AssertionError("nobody asked for it")


def ranks(*submitted: int, pace: int | Mapping[int, int] = 1) -> Collectives:
    paces = pace if isinstance(pace, Mapping) else dict.fromkeys(range(1, len(submitted) + 1), pace)
    return Collectives(dict(enumerate(submitted, 1)), paces)


def hold(
    job: Collectives, *, end_s: float = END_S, check: Callable[[], None] = lambda: None, locked: Collection[int] = ()
) -> LeaderHold:
    return LeaderHold(
        [DriverLock(job, pid) for pid in job.states],
        end=time.monotonic() + end_s,
        stuck_after_s=END_S,
        locked=locked,
        check=check,
        chance=random.Random(1),  # noqa: S311 - the same every time
    )


def assert_all_run(job: Collectives) -> None:
    """Everyone is RUNNING, and no call is at work that could change it."""
    assert set(job.states.values()) == {RUNNING}
    assert job.pending == set()
    wait_until(lambda: not any(t.name.startswith("lock-") for t in threading.enumerate()), "the threads to end")


def raise_error(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


# --- it gets there ---------------------------------------------------------------------------------------------


def test_ranks_that_do_not_wait_are_locked_at_the_first_attempt() -> None:
    job = ranks(5, 5, 5)
    lock = hold(job).lock()
    assert (lock.processes, lock.attempts) == (3, 1)
    assert sorted(job.calls) == [("lock", 1), ("lock", 2), ("lock", 3)]


def test_the_leader_is_held_and_the_others_come_up_to_it() -> None:
    job = ranks(4, 7, 4)
    lock = hold(job).lock()
    assert set(job.states.values()) == {LOCKED}
    assert set(job.submitted.values()) == {7}
    assert lock.attempts == 4
    assert [call for call in job.calls if call[1] == 2] == [("lock", 2)]


def test_ranks_of_different_speeds_are_locked() -> None:
    job = ranks(0, 9, 0, pace={1: 1, 2: 1, 3: 3})
    hold(job).lock()
    assert set(job.states.values()) == {LOCKED}
    assert len(set(job.submitted.values())) == 1


@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_at_any_position_are_locked(count: int, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    job = ranks(*(chance.randrange(4) for _ in range(count)))
    lock = hold(job).lock()
    assert set(job.states.values()) == {LOCKED}
    assert lock.processes == count
    # Nobody passes the leader, and each attempt moves the last ones; threads that a busy machine stops need a few more.
    assert lock.attempts <= max(8, count // 4)


def test_a_hold_grows_long_enough_for_a_slow_rank() -> None:
    job = ranks(0, 1, pace={1: 0, 2: 1})
    needs_s = 30 * hold_leader.FIRST_HOLD_S
    released_at = 0.0

    def note_release() -> None:
        nonlocal released_at
        released_at = time.monotonic()
        job.hooks["lock", 1] = submit_if_it_was_long_enough

    def submit_if_it_was_long_enough() -> None:
        job.hooks["unlock", 1] = note_release
        if time.monotonic() - released_at >= needs_s:
            with job.changed:
                job.submitted[1] = 1
                job.changed.notify_all()

    job.hooks["unlock", 1] = note_release
    lock = hold(job, end_s=5.0).lock()
    assert lock.attempts <= 10  # 1, 2, 4, ... times the first hold


def test_ranks_that_keep_overtaking_are_released_and_locked_again() -> None:
    job = ranks(0, 1, pace=2)  # 0 1, 2 1, 2 3, 4 3, ...
    lock = hold(job).lock()
    assert set(job.states.values()) == {LOCKED}
    assert lock.attempts > hold_leader.PASSES_BEFORE_A_NEW_START


class Crowded(Collectives):
    """Of more ranks than can run at once, some submit more before they are stopped."""

    at_once = 8
    chance = random.Random(2)  # noqa: S311 - the same every time

    def _let_go(self, pid: int) -> None:
        free = sum(state is RUNNING for state in self.states.values()) - len(self.pending)
        self.pace = {**self.pace, pid: self.chance.randrange(1, 5) if free > self.at_once else 1}
        super()._let_go(pid)


@pytest.mark.parametrize("count", [32, 64])
def test_many_ranks_are_released_a_few_at_a_time(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    job = Crowded(dict.fromkeys(range(count), 0) | {0: 3}, dict.fromkeys(range(count), 1))
    hold(job).lock()  # if all were released each time, they would never meet
    assert set(job.states.values()) == {LOCKED}


def test_no_rank_is_released_while_all_have_work_pending() -> None:
    """All are merely busy, so waiting is enough."""
    job = ranks(1, 1, 1)
    job.submitted[0] = 0  # they wait for somebody else, who is slow
    looks = 0

    def finish_at_the_fifth_look() -> None:
        nonlocal looks
        looks += len(job.pending) == 3
        if looks >= 5:
            job.finish(0)

    lock = hold(job, check=finish_at_the_fifth_look).lock()
    assert lock.attempts == 1
    assert all(action == "lock" for action, _ in job.calls)


def test_a_call_that_times_out_is_retried_with_a_longer_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_leader, "FIRST_CALL_LIMIT_S", 0.02)
    job = ranks(1, 1, pace=0)
    job.submitted[0] = 0

    def finish_after_three_calls() -> None:
        if len(job.timeouts_ms[1]) >= 3:
            job.finish(0)

    hold(job, check=finish_after_three_calls).lock()
    assert set(job.states.values()) == {LOCKED}
    assert job.timeouts_ms[1][:3] == [20, 40, 80]


class OneThatCannotBeUnlocked(Collectives):
    """The third rank is locked and stays so, despite every request."""

    def __init__(self, submitted: Mapping[int, int], pace: Mapping[int, int]) -> None:
        super().__init__(submitted, pace)
        self.states[3] = LOCKED

    def unlock(self, pid: int) -> None:
        if pid == 3:
            self._begin("unlock", pid)
            raise DriverError("broken", pid=pid, action="unlock", result=999)
        super().unlock(pid)


def test_a_rank_that_cannot_be_unlocked_does_not_block_the_others() -> None:
    """As in the undo of a resume that has failed with that unlock."""
    job = OneThatCannotBeUnlocked({1: 0, 2: 3, 3: 3}, dict.fromkeys((1, 2, 3), 1))
    hold(job, locked=[3]).lock()
    assert set(job.states.values()) == {LOCKED}
    assert job.calls.count(("unlock", 3)) == 1
    assert job.calls.count(("unlock", 1)) >= 3


def test_a_rank_that_cannot_be_unlocked_but_is_needed() -> None:
    job = OneThatCannotBeUnlocked({1: 3, 2: 3, 3: 0}, dict.fromkeys((1, 2, 3), 1))
    with pytest.raises(LocksFailed) as caught:
        hold(job, end_s=0.3, locked=[3]).lock()
    assert [type(error) for error in caught.value.errors.values()] == [LockTimeout]
    assert job.states == {1: RUNNING, 2: RUNNING, 3: LOCKED}
    assert job.pending == set()
    assert job.calls.count(("unlock", 3)) == 1


# --- it does not get there: everyone runs ------------------------------------------------------------------------


def test_a_rank_that_never_submits() -> None:
    job = ranks(0, 3, 3, pace={1: 0, 2: 1, 3: 1})
    with pytest.raises(LocksFailed) as caught:
        hold(job, end_s=0.3).lock()
    (error,) = caught.value.errors.values()
    assert isinstance(error, LockTimeout)
    assert re.match(r"only 1 of 3 CUDA processes could be locked in 0\.\d+ s and", error.message)
    assert "process 2, 3 still had GPU work pending" in error.message
    assert (error.pid, error.result, error.state) == (2, 600, "running")
    assert all(timeout_ms <= 300 for timeouts in job.timeouts_ms.values() for timeout_ms in timeouts)
    assert_all_run(job)


@pytest.mark.parametrize("action", ["lock", "unlock"])
def test_a_call_that_fails(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_leader, "FIRST_CALL_LIMIT_S", 0.1)  # what waits for the failed one waits so long
    job = ranks(0, 3, 0)
    error = DriverError("broken", pid=3, action=action, result=999)
    job.hooks[action, 3] = raise_error(error)
    holding = hold(job)
    with pytest.raises(LocksFailed) as caught:
        holding.lock()
    assert caught.value.errors == {3: error}
    left = {LOCKED} if action == "unlock" else {RUNNING}  # the failed unlock is not tried again here
    assert {job.states.pop(3)} == left
    assert_all_run(job)
    assert holding.stuck == []


def test_interrupted_midway() -> None:
    """Ctrl-C while some are locked and one lock is pending."""
    job = ranks(0, 5, 0, pace={1: 0, 2: 1, 3: 0})

    def interrupt() -> None:
        if job.pending == {2} and job.states[1] is LOCKED:
            job.pace = dict.fromkeys(job.states, 5)  # they continue when they are let go, and free the one that waits
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hold(job, end_s=2.0, check=interrupt).lock()
    assert_all_run(job)


def test_a_call_that_never_returns_does_not_block_the_others() -> None:
    job = ranks(3, 3, 3)
    freed = threading.Event()
    job.hooks["lock", 2] = lambda: (freed.wait(END_S), None)[1]
    holding = LeaderHold([DriverLock(job, pid) for pid in job.states], end=time.monotonic() + 0.2, stuck_after_s=0.2)
    try:
        with pytest.raises(LocksFailed):
            holding.lock()
        assert holding.stuck == [2]
        assert [job.states[1], job.states[3]] == [RUNNING, RUNNING]
    finally:
        freed.set()
        wait_until(lambda: not any(t.name.startswith("lock-") for t in threading.enumerate()), "the threads to end")


# --- anything that can be held -----------------------------------------------------------------------------------


class Gated(Collectives):
    """Ranks with a gate before their calls: one submits if it is neither behind its gate nor locked."""

    def __init__(self, submitted: Mapping[int, int], pace: Mapping[int, int]) -> None:
        super().__init__(submitted, pace)
        self.closed: set[int] = set()

    def _let_go(self, pid: int) -> None:
        if pid not in self.closed:
            super()._let_go(pid)

    def close_gate(self, pid: int) -> None:
        with self.changed:
            self.closed.add(pid)

    def open_gate(self, pid: int) -> None:
        with self.changed:
            self.closed.discard(pid)
            self._let_go(pid)


class GateAndLock:
    """A gate over the driver's lock, as one: the gate closes first, and opens last."""

    def __init__(self, job: Gated, pid: int) -> None:
        self._job = job
        self._lock = DriverLock(job, pid)
        self.pid = pid
        self.pending = self._lock.pending

    def hold(self, timeout_s: float) -> bool:
        self._job.close_gate(self.pid)
        try:
            is_held = self._lock.hold(timeout_s)
        except DriverError:
            self._job.open_gate(self.pid)
            raise
        if not is_held:
            self._job.open_gate(self.pid)
        return is_held

    def release(self) -> None:
        self._lock.release()
        self._job.open_gate(self.pid)

    @property
    def is_held(self) -> bool:
        return self._lock.is_held and self.pid in self._job.closed


def gated(*submitted: int) -> tuple[Gated, list[GateAndLock]]:
    numbered = dict(enumerate(submitted, 1))
    job = Gated(numbered, dict.fromkeys(numbered, 1))
    return job, [GateAndLock(job, pid) for pid in numbered]


def test_gate_and_lock_are_held_together() -> None:
    job, both = gated(4, 7, 4)
    lock = LeaderHold(both, end=time.monotonic() + END_S, stuck_after_s=END_S).lock()
    assert all(each.is_held for each in both)
    assert job.closed == {1, 2, 3}
    assert set(job.submitted.values()) == {7}
    assert (lock.processes, lock.attempts) == (3, 4)
    assert [call for call in job.calls if call[1] == 2] == [("lock", 2)], "the leader stays behind its gate"


class Noted(GateAndLock):
    """Remembers the priorities of the threads that hold it and release it."""

    priorities: ClassVar[list[int]] = []

    def hold(self, timeout_s: float) -> bool:
        self.priorities.append(nice())
        return super().hold(timeout_s)

    def release(self) -> None:
        self.priorities.append(nice())
        super().release()


def test_threads_that_hold_ranks_are_urgent() -> None:
    """A released rank would run on while the call that is to stop it waits for a processor."""
    require_privilege()
    before = nice()
    job, _ = gated(4, 7, 4)
    Noted.priorities.clear()
    LeaderHold([Noted(job, pid) for pid in (1, 2, 3)], end=time.monotonic() + END_S, stuck_after_s=END_S).lock()
    assert set(Noted.priorities) == {-20}
    assert nice() == before


def test_if_not_all_can_be_held_every_gate_reopens() -> None:
    job, both = gated(4, 7, 4)
    job.hooks["lock", 3] = raise_error(DriverError("broken", pid=3, action="lock", result=999))
    with pytest.raises(LocksFailed) as raised:
        LeaderHold(both, end=time.monotonic() + END_S, stuck_after_s=END_S).lock()
    assert list(raised.value.errors) == [3]
    assert job.closed == set()
    assert_all_run(job)


def test_gates_reopen_when_work_stays_pending_too_long() -> None:
    job, both = gated(4, 7)
    job.pace = {1: 0, 2: 0}
    with pytest.raises(LocksFailed) as raised:
        LeaderHold(both, end=time.monotonic() + 0.2, stuck_after_s=END_S).lock()
    assert isinstance(raised.value.errors[2], LockTimeout)
    assert job.closed == set()
    assert_all_run(job)
