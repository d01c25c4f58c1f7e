"""The state machine: every action from every state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpucr.driver.cuda import CudaDriver
from gpucr.errors import IllegalState, LockTimeout, NotSupportedByDriver
from gpucr.model import CudaState
from tests.counter import CounterFactory

RUNNING, LOCKED, CHECKPOINTED = CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED
LEADS_TO = {
    (RUNNING, "lock"): LOCKED,
    (LOCKED, "checkpoint"): CHECKPOINTED,
    (LOCKED, "unlock"): RUNNING,
    (CHECKPOINTED, "restore"): LOCKED,
}
ACTIONS = ("lock", "checkpoint", "restore", "unlock")
ILLEGAL = [
    (state, action)
    for state in (RUNNING, LOCKED, CHECKPOINTED)
    for action in ACTIONS
    if (state, action) not in LEADS_TO
]


def act(driver: CudaDriver, action: str, pid: int) -> None:
    actions: dict[str, Callable[[int], None]] = {
        "lock": driver.lock,
        "checkpoint": driver.checkpoint,
        "restore": driver.restore,
        "unlock": driver.unlock,
    }
    actions[action](pid)


def bring_to(driver: CudaDriver, state: CudaState, pid: int) -> None:
    """From RUNNING to ``state``."""
    for action in {RUNNING: (), LOCKED: ("lock",), CHECKPOINTED: ("lock", "checkpoint")}[state]:
        act(driver, action, pid)


def bring_back(driver: CudaDriver, pid: int) -> None:
    """From any state to RUNNING."""
    state = driver.state(pid)
    assert state is not None
    for action in {RUNNING: (), LOCKED: ("unlock",), CHECKPOINTED: ("restore", "unlock")}[state]:
        act(driver, action, pid)


@pytest.mark.parametrize(("state", "action"), LEADS_TO)
def test_legal_action(driver: CudaDriver, counter: CounterFactory, state: CudaState, action: str) -> None:
    pid = counter("--mib", "4").pid
    bring_to(driver, state, pid)
    act(driver, action, pid)
    assert driver.state(pid) == LEADS_TO[state, action]


@pytest.mark.parametrize(("state", "action"), ILLEGAL)
def test_illegal_action_changes_nothing(
    driver: CudaDriver, counter: CounterFactory, state: CudaState, action: str
) -> None:
    program = counter("--mib", "4")
    bring_to(driver, state, program.pid)
    with pytest.raises(IllegalState) as caught:
        act(driver, action, program.pid)
    assert (caught.value.pid, caught.value.action, caught.value.result) == (program.pid, action, 401)
    assert caught.value.state == state.word
    assert driver.state(program.pid) == state
    bring_back(driver, program.pid)
    assert program.ask() == 101


def test_data_survives_two_rounds(driver: CudaDriver, counter: CounterFactory) -> None:
    program = counter("--mib", "64")
    assert program.ask() == 101
    for expected in (102, 103):
        bring_to(driver, CHECKPOINTED, program.pid)
        bring_back(driver, program.pid)
        assert program.ask() == expected
        assert program.send("verify") == "ok"


@pytest.mark.parametrize("state", [LOCKED, CHECKPOINTED])
def test_calls_block_until_unlock(driver: CudaDriver, counter: CounterFactory, state: CudaState) -> None:
    program = counter("--mib", "4")
    bring_to(driver, state, program.pid)
    program.post()
    assert not program.answers_within(0.2)
    bring_back(driver, program.pid)
    assert program.answer() == "101"


def test_lock_times_out_while_work_is_pending(driver: CudaDriver, counter: CounterFactory) -> None:
    program = counter("--mib", "4")
    program.send("busy 3000")
    with pytest.raises(LockTimeout) as caught:
        driver.lock(program.pid, timeout_ms=50)
    assert (caught.value.result, caught.value.state) == (600, "running")
    driver.lock(program.pid)  # without a limit it waits for the work to end
    assert driver.state(program.pid) == LOCKED
    driver.unlock(program.pid)
    assert program.ask() == 101


def test_an_idle_process_locks_within_any_timeout(driver: CudaDriver, counter: CounterFactory) -> None:
    pid = counter().pid
    driver.lock(pid, timeout_ms=10_000)
    assert driver.state(pid) == LOCKED


def test_managed_memory_is_refused_and_unlock_recovers(driver: CudaDriver, counter: CounterFactory) -> None:
    program = counter("--managed")
    driver.lock(program.pid)
    with pytest.raises(NotSupportedByDriver) as caught:
        driver.checkpoint(program.pid)
    assert (caught.value.result, caught.value.state) == (801, "locked")
    driver.unlock(program.pid)
    assert driver.state(program.pid) == RUNNING
    assert program.ask() == 101


def test_the_restore_thread_is_a_task_of_the_target(driver: CudaDriver, counter: CounterFactory) -> None:
    pid = counter().pid
    thread_ids = set()
    for state in (RUNNING, LOCKED, CHECKPOINTED):
        bring_to(driver, state, pid)
        thread_ids.add(driver.restore_thread_id(pid))
        bring_back(driver, pid)
    assert len(thread_ids) == 1
    assert Path(f"/proc/{pid}/task/{thread_ids.pop()}").is_dir()
